"""Memory by class for n-way streams: one pool of images per global class, and meta-batches drawn from the pools.

A meta-training task consists of n random classes of those seen, with shuffled labels. Support and query are disjoint
and have the same number of datapoints of each class. If a class has too few images for both, its images are divided
and repeated as in `TaskBuffer`. There are no draws before n classes have been seen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from metaleader.distributed.shards import Shard, key_of
from metaleader.memory.fields import integer, integers, text_or_none
from metaleader.memory.rows import Draw, Rows, Weights, Which, arrival_times, checked_weights, distinct, split
from metaleader.tasks import Batch, rng, rows

_UNNAMED, _LARGEST = -1, 2**63 - 1


class ClassBuffer:
    """All images observed so far, by class.

    Each image is stored with the target of its first arrival; draws and D_t replace it by their own labels.

    Args:
        device: the device that stores the data.
        weights: nu^t over the classes seen, in order of arrival, for draws without replacement; uniform if None.
    """

    kind = "classes"

    def __init__(self, device: torch.device | str = "cpu", weights: Weights | None = None) -> None:
        self.device = torch.device(device)
        self.weights = weights
        self.store = Rows(self.device)
        self.ways: tuple[int, ...] = ()
        self._name = ""
        self._classes: list[int] = []  # of each row
        self._ids: list[int] = []  # of each row
        self._row_of: dict[int, int] = {}  # by id
        self._round_rows: list[int] = []
        self._round_labels: list[int] = []
        self._round_start = 0
        self._current: Batch | None = None

    def __len__(self) -> int:
        """The number of classes with at least one image."""
        return len(set(self._classes))

    @property
    def num_datapoints(self) -> int:
        """The number of images stored."""
        return self.store.length

    @property
    def num_new(self) -> int:
        """The number of images first observed in this round."""
        return self.store.length - self._round_start

    def begin(self, name: str, classes: Sequence[int] | None = None, num_classes: int | None = None) -> None:
        """Open a new task with the global class of each local label, in the order of the labels; D_t is empty.

        `num_classes` is the number of global classes that the network has outputs for; None if it has one output per
        local label.
        """
        if classes is None:
            raise ValueError(f"task {name!r} has no classes, but earlier tasks have; call begin(name, classes=[...])")
        global_classes = tuple(_integers(classes, f"task {name!r}: classes"))
        if len(global_classes) < 2 or len(set(global_classes)) < len(global_classes):
            raise ValueError(f"task {name!r}: classes must be two or more different integers, got {list(classes)}")
        if num_classes is not None and not 0 <= min(global_classes) <= max(global_classes) < num_classes:
            raise ValueError(
                f"task {name!r}: classes must lie in 0..{num_classes - 1}, the outputs of the network; got"
                f" {list(global_classes)}"
            )
        if self.ways and len(global_classes) != len(self.ways):
            raise ValueError(
                f"task {name!r} has {len(global_classes)} classes, earlier tasks have {len(self.ways)}; all tasks of a"
                " learner must have the same number"
            )
        self.ways, self._name = global_classes, name
        self._round_rows, self._round_labels, self._current = [], [], None
        self._round_start = self.store.length

    def append(self, batch: Batch, ids: Sequence[int] | Tensor | None = None, task: str | None = None) -> None:
        """Store images of the open task with local labels; a batch with a wrong label or id is rejected as a whole.

        An image whose id is already stored is not stored again; without ids, all images are new. A name is not
        available: the classes of a task belong to its round.
        """
        if task is not None:
            self.named(task)
        labels = self._checked_labels(batch.y)
        names = self._checked_ids(ids, labels)
        new: list[int] = []
        new_rows: dict[int, int] = {}  # by id
        round_rows: list[int] = []
        for i, name in enumerate(names):
            row = self._row_of.get(name, new_rows.get(name))
            if row is None:
                row = self.store.length + len(new)
                new.append(i)
                if name != _UNNAMED:
                    new_rows[name] = row
            round_rows.append(row)
        if new:
            self.store.append(rows(batch, torch.tensor(new, device=batch.y.device)))
        self._classes += [self.ways[labels[i]] for i in new]
        self._ids += [names[i] for i in new]
        self._row_of |= new_rows
        self._round_rows += round_rows
        self._round_labels += labels
        self._current = None

    def current(self) -> Batch | None:
        """D_t: all datapoints of the open task with their local labels; None if there are none."""
        if self._current is None and self._round_rows:
            index = torch.tensor(self._round_rows, device=self.device)
            self._current = self.store.take(index, self._labels(np.asarray(self._round_labels)))
        return self._current

    def counts(self) -> np.ndarray:
        """The number of images of each class, in order of the arrival of the classes."""
        return self._pools(self.store.length)[2]

    def draw(
        self,
        seed: int,
        steps: Sequence[int],
        tasks: int,
        support: int,
        query: int,
        which: Which = "all",
        without: Collection[str] = (),
        shard: Shard | None = None,
    ) -> Draw | None:
        """Draw meta-batches for some steps, each task with its own classes and labels; see `Memory.draw`.

        `support` and `query` are multiples of the number of classes. With "current", D_t and its labels are drawn
        from, and classes are not balanced; "past" draws from the images observed before this round. Names cannot be
        left out. There is nothing to draw from before as many classes as a task has.
        """
        if which == "current":
            return self._draw_current(seed, steps, tasks, support, query, shard)
        names, order, counts, starts = self._pools(self.store.length if which == "all" else self._round_start)
        num_ways = len(self.ways)
        if not num_ways or len(counts) < num_ways:
            return None
        for name, size in (("support", support), ("query", query)):
            if size % num_ways:
                raise ValueError(f"{name} must be a multiple of the {num_ways} classes of a task, got {size}")
        shape, width = (len(steps), tasks, num_ways), (support + query) // num_ways
        generators = [rng("draw", seed, step, *key_of(shard)) for step in steps]
        races = np.stack([g.random((tasks, len(counts))) for g in generators])
        if self.weights is not None:
            races = arrival_times(races, checked_weights(self.weights, len(counts)), num_ways)
        chosen = np.argsort(races, axis=-1, kind="stable")[..., :num_ways].reshape(-1)
        labels = np.argsort(np.stack([g.random((tasks, num_ways)) for g in generators]), axis=-1, kind="stable")
        uniforms = np.stack([g.random((tasks * num_ways, 2 * width)) for g in generators]).reshape(-1, 2 * width)
        share = (support // num_ways, query // num_ways)
        numbers = split(distinct(uniforms, counts[chosen], width), counts[chosen], *share)
        picked = order[starts[chosen][:, None] + numbers].reshape(*shape, width)
        repeated = np.broadcast_to(labels[..., None], (*shape, width))
        classes = np.empty(shape, dtype=np.int64)
        np.put_along_axis(classes, labels, names[chosen].reshape(shape), axis=-1)
        return self._as_draw(picked, repeated, share[0], classes)

    def current_classes(self) -> Tensor | None:
        """The global class of each label of the open task."""
        return torch.tensor(self.ways, device=self.device) if self.ways else None

    def named(self, name: str, reason: str = "") -> NoReturn:
        """Not available, as `forget`, `set_aside` and `readmit`: data is stored by class. Always raises ValueError."""
        raise ValueError(
            f"task {name!r}: n-way tasks store their data by class, not by task; leave task=None, which is the round"
            " opened by begin(name, classes=[...])"
        )

    forget = set_aside = readmit = named

    def of_names(self, names: Sequence[str]) -> NoReturn:
        """Not available: data is stored by class. Always raises ValueError."""
        self.named(names[0])

    def sizes(self) -> dict[str, int]:
        """The number of datapoints of the open task; images of earlier tasks are stored by class."""
        return {self._name: len(self._round_rows)} if self._round_rows else {}

    def names_drawn(self, *_: Any, **__: Any) -> list[str | None]:
        """No names: the tasks drawn are of random classes."""
        return []

    def shard_masses(self, total: int, which: Which, without: Collection[str]) -> None:
        """None: each shard draws from all classes."""

    @property
    def aside(self) -> dict[str, str]:
        """No task: data is stored by class."""
        return {}

    def latest(self, num: int) -> Batch | None:
        """The first `num` datapoints of D_t; images of earlier tasks have no label in the open task."""
        data = self.current()
        return None if data is None else Batch(*rows(data, slice(0, num)))

    def gather(self, draw: Draw) -> tuple[Batch, Batch]:
        """The support and query batches of a draw, each (..., tasks, datapoints, ...)."""
        return self.store.take(draw.support, draw.support_y), self.store.take(draw.query, draw.query_y)

    def point(self) -> tuple[Any, ...]:
        """This point, for `rollback`."""
        round_rows, round_labels = self._round_rows, self._round_labels
        return self.store.length, len(round_rows), (self.ways, self._name, round_rows, round_labels, self._round_start)

    mark = point

    def rollback(self, mark: tuple[Any, ...]) -> None:
        """Undo all changes since a point."""
        length, num_round, opened = mark
        self.ways, self._name, self._round_rows, self._round_labels, self._round_start = opened
        self.store.cut(length)
        for name in self._ids[length:]:
            self._row_of.pop(name, None)
        del self._classes[length:], self._ids[length:]
        del self._round_rows[num_round:], self._round_labels[num_round:]
        self._current = None

    def state_dict(self, data: bool = True) -> dict[str, Any]:
        """The state of the buffer; with `data=False` without the images, for streams that can replay them."""
        return {
            "kind": self.kind,
            "ways": list(self.ways),
            "name": self._name,
            "classes": torch.tensor(self._classes, dtype=torch.int64),
            "ids": torch.tensor(self._ids, dtype=torch.int64),
            "round_rows": torch.tensor(self._round_rows, dtype=torch.int64),
            "round_labels": torch.tensor(self._round_labels, dtype=torch.int64),
            "round_start": self._round_start,
        } | self.store.state_dict(data)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; if it was saved without data, the buffer must already hold the same images."""
        ways = integers(state, "ways", low=-_LARGEST, high=_LARGEST)
        classes, ids = integers(state, "classes", low=-_LARGEST, high=_LARGEST), integers(state, "ids", low=_UNNAMED)
        length = integer(state, "length")
        round_rows = integers(state, "round_rows", high=length - 1)
        round_labels = integers(state, "round_labels", high=len(ways) - 1)
        if not len(classes) == len(ids) == length or len(round_rows) != len(round_labels):
            raise ValueError(
                f"the state is damaged: it lists {len(classes)} classes and {len(ids)} ids of {length} images"
            )
        if len(set(ways)) < len(ways) or (len(ways) < 2 and (ways or classes)):
            raise ValueError(f"the state is damaged: its ways must be two or more different classes, not {ways}")
        if "data" not in state and (classes, ids) != (self._classes, self._ids):
            raise ValueError(
                f"the state was saved without its data of {len(classes)} images, and the {len(self._classes)} images in"
                " the buffer differ; observe the same data (update=False) before loading"
            )
        self.store.load_state_dict(state)
        self.ways, self._classes, self._ids = tuple(ways), classes, ids
        self._name = text_or_none({"name": ""} | dict(state), "name") or ""
        self._row_of = {name: row for row, name in enumerate(ids) if name != _UNNAMED}
        self._round_rows, self._round_labels = round_rows, round_labels
        self._round_start, self._current = integer(state, "round_start", high=length), None

    def _draw_current(
        self, seed: int, steps: Sequence[int], tasks: int, support: int, query: int, shard: Shard | None
    ) -> Draw | None:
        if not self._round_rows:
            return None
        width = support + query
        key = key_of(shard)
        uniforms = np.concatenate([rng("draw", seed, step, *key).random((tasks, 2 * width)) for step in steps])
        counts = np.full(len(uniforms), len(self._round_rows))
        numbers = split(distinct(uniforms, counts, width), counts, support, query)
        numbers = numbers.reshape(len(steps), tasks, 1, width)
        picked, labels = np.asarray(self._round_rows)[numbers], np.asarray(self._round_labels)[numbers]
        return self._as_draw(picked, labels, support, np.tile(self.ways, (len(steps), tasks, 1)))

    def _as_draw(self, picked: np.ndarray, labels: np.ndarray, support: int, classes: np.ndarray) -> Draw:
        """A draw from rows (steps, tasks, groups, datapoints); the first `support` of each group are support."""
        index, y = torch.from_numpy(picked), self._labels(labels)
        slices = (slice(None, support), slice(support, None))
        draw = Draw(*(tensor[..., columns].flatten(2) for tensor in (index, y) for columns in slices))
        return draw._replace(classes=torch.from_numpy(classes)).to(self.device)

    def _labels(self, labels: np.ndarray) -> Tensor:
        assert self.store.data is not None
        return torch.tensor(labels, dtype=self.store.data.y.dtype, device=self.device)

    def _pools(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The classes in order of arrival, the first rows grouped by class, and the count and start of each class."""
        classes, first, inverse = np.unique(
            np.asarray(self._classes[:length], dtype=np.int64), return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        arrival = np.empty(len(classes), dtype=np.int64)
        arrival[order] = np.arange(len(classes))
        pool = arrival[inverse]
        counts = np.bincount(pool, minlength=len(classes))
        return classes[order], np.argsort(pool, kind="stable"), counts, np.cumsum(counts) - counts

    def _checked_labels(self, y: Any) -> list[int]:
        if not self.ways:
            raise ValueError("observe before begin: call begin(name, classes=[...]) to open a task first")
        if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point() or y.dtype == torch.bool:
            raise ValueError("observe: the labels of an n-way task must be one integer per datapoint")
        labels = y.tolist()
        wrong = [label for label in labels if not 0 <= label < len(self.ways)]
        if wrong:
            raise ValueError(
                f"observe: label {wrong[0]} is not in 0..{len(self.ways) - 1}; labels are positions in the task's"
                f" classes {list(self.ways)}"
            )
        return labels

    def _checked_ids(self, ids: Sequence[int] | Tensor | None, labels: list[int]) -> list[int]:
        if ids is None:
            return [_UNNAMED] * len(labels)
        names = _integers(ids, "observe: ids")
        if len(names) != len(labels):
            raise ValueError(f"observe: {len(names)} ids for {len(labels)} datapoints; pass one id per datapoint")
        class_of: dict[int, int] = {}
        for name, label in zip(names, labels, strict=True):
            if name < 0:
                raise ValueError(f"observe: ids must not be negative, got {name}")
            row = self._row_of.get(name)
            stored_class = class_of.setdefault(name, self.ways[label]) if row is None else self._classes[row]
            if stored_class != self.ways[label]:
                raise ValueError(
                    f"observe: id {name} is of class {stored_class}, and is now said to be of class {self.ways[label]}"
                )
        return names


def _integers(values: Any, where: str) -> list[int]:
    array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype == np.uint64 and (array >= 2**63).any()):
        raise ValueError(f"{where} must be a list of integers, got {values!r}")
    return array.tolist()
