"""Memory by class for n-way streams: one pool of images per global class, and meta-batches drawn from the pools.

A meta-training task consists of n random classes of those seen, with shuffled labels. Support and query are disjoint
and have the same number of datapoints of each class. If a class has too few images for both, its images are divided
and repeated as in `TaskBuffer`. There are no draws before n classes have been seen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from metaleader.distributed.shards import Shard
from metaleader.memory.fields import integer, integers, text_or_none
from metaleader.memory.images import UNNAMED, Images, observed_of
from metaleader.memory.labels import checked_ids, checked_labels, integers_of
from metaleader.memory.limits import Limits
from metaleader.memory.pools import arrival_times, checked_weights, distinct, split
from metaleader.memory.rows import Draw, Rows, Weights, Which, bytes_of
from metaleader.tasks import Batch, rng, rows

_LARGEST = 2**63 - 1


class ClassBuffer:
    """All images observed so far, by class, or as many as limits allow.

    Each image is stored with the target of its first arrival; draws and D_t replace it by their own labels. An image
    that is dropped is no longer part of D_t, and is new if it is observed again.

    Args:
        device: the device that computes.
        weights: nu^t over the classes kept, in order of arrival, for draws without replacement; uniform if None.
        limits: of the images of a class, and of the bytes of all images: the classes that were not observed for longest
            are dropped, but never those of the open task.
        folder: a folder on the disk for the data; None stores it in the memory of the device.
    """

    kind = "classes"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        weights: Weights | None = None,
        limits: Limits | None = None,
        folder: Path | None = None,
    ) -> None:
        self.device, self.weights = torch.device(device), weights
        self.limits = Limits() if limits is None else limits
        self.store = Rows(self.device, folder)
        self.ways: tuple[int, ...] = ()
        self._name = ""
        self._images = Images()
        self._round: list[int] = []  # positions
        self._round_labels: list[int] = []
        self._round_start = 0
        self._current: Batch | None = None

    def __len__(self) -> int:
        """The number of classes with at least one image."""
        return len(self.counts())

    @property
    def num_datapoints(self) -> int:
        """The number of images stored."""
        return len(self._images)

    @property
    def num_bytes(self) -> int:
        """The bytes of the images stored."""
        return len(self._images) * self.store.row_bytes

    @property
    def num_new(self) -> int:
        """The number of images first observed in this round, and kept."""
        return len(self._images) - len(self._images.kept(self._round_start))

    def begin(self, name: str, classes: Sequence[int] | None = None, num_classes: int | None = None) -> None:
        """Open a new task with the global class of each local label, in the order of the labels; D_t is empty.

        `num_classes` is the number of global classes that the network has outputs for; None if it has one output per
        local label.
        """
        if classes is None:
            raise ValueError(f"task {name!r} has no classes, but earlier tasks have; call begin(name, classes=[...])")
        global_classes = tuple(integers_of(classes, f"task {name!r}: classes"))
        if len(global_classes) < 2 or len(set(global_classes)) < len(global_classes):
            raise ValueError(f"task {name!r}: classes must be two or more different integers, got {list(classes)}")
        if num_classes is not None and not 0 <= min(global_classes) <= max(global_classes) < num_classes:
            raise ValueError(
                f"task {name!r}: classes must lie in 0..{num_classes - 1}, the outputs of the network; got"
                f" {list(global_classes)}"
            )
        self.ways, self._name = global_classes, name
        self._round, self._round_labels, self._current = [], [], None
        self._round_start = len(self._images.classes)

    def append(self, batch: Batch, ids: Sequence[int] | Tensor | None = None, task: str | None = None) -> None:
        """Store images of the open task with local labels; a batch with a wrong label or id is rejected as a whole.

        An image whose id is already stored is not stored again; without ids, all images are new. A name is not
        available: the classes of a task belong to its round.
        """
        if task is not None:
            self.named(task)
        labels = checked_labels(batch.y, self.ways)
        names = checked_ids(ids, labels, self.ways, self._images)
        images, limits, size = self._images, self.limits, bytes_of(batch)
        first_of: dict[int, int] = {}  # of the ids that are new, the first of their images
        new = [
            i
            for i, name in enumerate(names)
            if name not in images.position_of and (name == UNNAMED or first_of.setdefault(name, i) == i)
        ]
        classes, before = [self.ways[labels[i]] for i in new], [images.position_of.get(name) for name in names]
        most = limits.in_task(size, len(self.ways))
        admitted = images.admit(classes, limits, most)
        images.make_room(len(admitted), limits.in_all(size), self.ways)
        stored = [new[i] for i in admitted]
        positions = {i: len(images.classes) + j for j, i in enumerate(stored)}
        if stored:
            added = self.store.append(rows(batch, torch.tensor(stored, device=batch.y.device)))
            images.add([classes[i] for i in admitted], [names[i] for i in stored], np.asarray(added).tolist())
        arrived = [
            position if position is not None else positions.get(first_of.get(name, i), -1)
            for i, (name, position) in enumerate(zip(names, before, strict=True))
        ]
        dropped = images.is_dropped([*self._round, *arrived])
        pairs = zip([*self._round, *arrived], [*self._round_labels, *labels], dropped, strict=True)
        kept = [(position, label) for position, label, is_dropped in pairs if position >= 0 and not is_dropped]
        self._round, self._round_labels = [pair[0] for pair in kept], [pair[1] for pair in kept]
        self._current = None

    def current(self) -> Batch | None:
        """D_t: all datapoints of the open task with their local labels; None if there are none."""
        if self._current is None and self._round:
            self._current = self.store.take(self._round_rows(), self._labels(np.asarray(self._round_labels)))
        return self._current

    def _round_rows(self) -> np.ndarray:
        return np.asarray([self._images.rows[position] for position in self._round], dtype=np.int64)

    def counts(self) -> np.ndarray:
        """The number of images of each class, in order of the arrival of the classes."""
        return self._images.pools(None)[2]

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
        names, order, counts, starts = self._images.pools(None if which == "all" else self._round_start)
        num_ways = len(self.ways)
        if not num_ways or len(counts) < num_ways:
            return None
        for name, size in (("support", support), ("query", query)):
            if size % num_ways:
                raise ValueError(
                    f"{name} must be a multiple of the {num_ways} classes of a task, got {size}; tasks with several"
                    " numbers of classes need a multiple of each"
                )
        shape, width = (len(steps), tasks, num_ways), (support + query) // num_ways
        key = () if shard is None else (shard.number,)
        generators = [rng("draw", seed, step, *key) for step in steps]
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

    def scrub(self) -> None:
        """Make all changes so far permanent, and overwrite the rows of images that were dropped."""
        self.mark()
        self.store.scrub()

    def of_names(self, names: Sequence[str]) -> NoReturn:
        """Not available: data is stored by class. Always raises ValueError."""
        self.named(names[0])

    def sizes(self) -> dict[str, int]:
        """The number of datapoints of the open task; images of earlier tasks are stored by class."""
        return {self._name: len(self._round)} if self._round else {}

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

    def mark(self) -> tuple[Any, ...]:
        """Make all changes so far permanent, and return this point for `rollback`."""
        self.store.release(self._images.freed())
        moved = self._images.moved()
        if moved is not None:
            # D_t has no image that was dropped. One call: an interrupt comes before or after it.
            opened, start = moved[self._round].tolist() if self._round else [], moved[: self._round_start] >= 0
            vars(self).update(_images=self._images.kept_part(), _round=opened, _round_start=int(start.sum()))
        return self.point()

    def point(self) -> tuple[Any, ...]:
        """This point for `rollback`, within the changes since the latest mark."""
        opened = self.ways, self._name, self._round, self._round_labels, self._round_start
        return self.store.point(), self._images.point(), opened

    def rollback(self, mark: tuple[Any, ...]) -> None:
        """Undo all changes since a point."""
        start, images, opened = mark
        self.ways, self._name, self._round, self._round_labels, self._round_start = opened
        self.store.cut(start)
        self._images.rollback(images)
        self._current = None

    def state_dict(self, data: bool = True, here: bool = True) -> dict[str, Any]:
        """The state of the buffer; without the images unless both `data` and `here`."""
        images, kept = self._images, self._images.kept()
        place = {position: i for i, position in enumerate(kept.tolist())}
        stored = np.asarray(images.rows, dtype=np.int64)[kept]
        state: dict[str, Any] = {
            "kind": self.kind,
            "ways": list(self.ways),
            "name": self._name,
            "classes": torch.tensor([images.classes[i] for i in kept], dtype=torch.int64),
            "ids": torch.tensor([images.ids[i] for i in kept], dtype=torch.int64),
            "round_rows": torch.tensor([place[position] for position in self._round], dtype=torch.int64),
            "round_labels": torch.tensor(self._round_labels, dtype=torch.int64),
            "round_start": len(images.kept(self._round_start)),
        }
        if self.limits.max_datapoints is not None or self.limits.max_bytes is not None:
            state["observed"] = [[number, num] for number, num in images.observed.items()]
        return state | self.store.state_dict(data, stored, here)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; if it was saved without data, the buffer must already hold the same images."""
        ways = integers(state, "ways", low=-_LARGEST, high=_LARGEST)
        classes, ids = integers(state, "classes", low=-_LARGEST, high=_LARGEST), integers(state, "ids", low=UNNAMED)
        length = integer(state, "length")
        round_rows = integers(state, "round_rows", high=length - 1)
        round_labels = integers(state, "round_labels", high=len(ways) - 1)
        if not len(classes) == len(ids) == length or len(round_rows) != len(round_labels):
            raise ValueError(
                f"the state is damaged: it lists {len(classes)} classes and {len(ids)} ids of {length} images"
            )
        if len(set(ways)) < len(ways) or (len(ways) < 2 and (ways or classes)):
            raise ValueError(f"the state is damaged: its ways must be two or more different classes, not {ways}")
        present = self._images.kept_part()
        if "data" not in state and (classes, ids) != (present.classes, present.ids):
            raise ValueError(
                f"the state was saved without its data of {length} images, and the {len(present)} images in"
                " the buffer differ; observe the same data (update=False) before loading"
            )
        images = Images(classes, ids, range(length)) if "data" in state else present
        images.observed = observed_of(state, images)
        store = self.store
        if "data" in state:
            store = Rows(self.device, self.store.folder)
            store.load_state_dict(state)
        name, start = text_or_none({"name": ""} | dict(state), "name") or "", integer(state, "round_start", high=length)
        self.store, self._images, self.ways, self._name = store, images, tuple(ways), name
        self._round, self._round_labels, self._round_start, self._current = round_rows, round_labels, start, None

    def _draw_current(
        self, seed: int, steps: Sequence[int], tasks: int, support: int, query: int, shard: Shard | None
    ) -> Draw | None:
        if not self._round:
            return None
        width = support + query
        key = () if shard is None else (shard.number,)
        uniforms = np.concatenate([rng("draw", seed, step, *key).random((tasks, 2 * width)) for step in steps])
        counts = np.full(len(uniforms), len(self._round))
        numbers = split(distinct(uniforms, counts, width), counts, support, query)
        numbers = numbers.reshape(len(steps), tasks, 1, width)
        picked, labels = self._round_rows()[numbers], np.asarray(self._round_labels)[numbers]
        return self._as_draw(picked, labels, support, np.tile(self.ways, (len(steps), tasks, 1)))

    def _as_draw(self, picked: np.ndarray, labels: np.ndarray, support: int, classes: np.ndarray) -> Draw:
        """A draw from rows (steps, tasks, groups, datapoints); the first `support` of each group are support."""
        index, y = torch.from_numpy(picked), self._labels(labels)
        slices = (slice(None, support), slice(support, None))
        draw = Draw(*(tensor[..., columns].flatten(2) for tensor in (index, y) for columns in slices))
        draw = draw._replace(classes=torch.from_numpy(classes)).to(self.device)
        return draw._replace(
            support=draw.support.to(self.store.index_device), query=draw.query.to(self.store.index_device)
        )

    def _labels(self, labels: np.ndarray) -> Tensor:
        assert self.store.data is not None
        return torch.tensor(labels, dtype=self.store.data.y.dtype, device=self.device)
