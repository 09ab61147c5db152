"""N-way classification with classes that arrive one at a time (section 5.2).

The first n classes make the first task; after that, each task is the newest class and n-1 earlier ones, labels
shuffled. Images of earlier classes come again: `Task.ids` names them, so that a learner keeps each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from metaleader.tasks import Batch, Task, rng


class Labelled(NamedTuple):
    """Labelled inputs, images or any others.

    Attributes:
        x: an array with one row a datapoint.
        labels: (N,) the global class of each, integers.
        test_x: held-out inputs.
        test_labels: their classes.
    """

    x: np.ndarray
    labels: np.ndarray
    test_x: np.ndarray
    test_labels: np.ndarray


class NWayStream:
    """A stream of n-way tasks over labelled images, as many as there are classes after the first n-1.

    A task's datapoints come one class after the other in turn, so that every reveal of a multiple of n has equally many
    of each class. A class shows the same `per_class` datapoints whenever it is in a task, each time in another order.

    Args:
        data: the labelled inputs; kept as it is, not copied.
        ways: n.
        per_class: training datapoints of each class of a task.
        test_per_class: held-out datapoints of each class of a task; all that the poorest class has if None.
        order: "random"; "given", ascending; "superclass", one group of `superclasses` after the other, groups and
            classes within them at random; or the classes themselves in a list, which may leave some out.
        superclasses: the group of each class, by class.
        names: of the classes, by class; a task is named after its newest class.
        seed: `stream[t]` depends on the seed and t alone.
    """

    def __init__(
        self,
        data: Labelled,
        ways: int = 5,
        per_class: int = 400,
        test_per_class: int | None = None,
        order: str | Sequence[int] = "random",
        superclasses: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        train, test = _by_class(data.x, data.labels, "train"), _by_class(data.test_x, data.test_labels, "test")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.data, self.ways, self.per_class, self.seed = data, ways, per_class, seed
        self.order = _ordered(sorted(train), order, superclasses, seed)
        self.names = {c: names[c] if names is not None else f"class {c}" for c in self.order}
        if not 2 <= ways <= len(self.order):
            raise ValueError(f"ways must lie in 2..{len(self.order)}, the number of classes; got {ways}")
        if test_per_class is None:
            test_per_class = min(len(test.get(c, ())) for c in self.order)
        for what, part, wanted in (("training", train, per_class), ("test", test, test_per_class)):
            poorest = min(sorted(self.order), key=lambda c, part=part: len(part.get(c, ())))
            if not 1 <= wanted <= len(part.get(poorest, ())):
                raise ValueError(
                    f"cannot take {wanted} {what} datapoints of each class: class {poorest} has"
                    f" {len(part.get(poorest, ()))}"
                )
        self._train = {c: rng("n-way pool", seed, c).permutation(train[c])[:per_class] for c in self.order}
        self._test = {c: test[c][:test_per_class] for c in self.order}

    def __len__(self) -> int:
        return len(self.order) - self.ways + 1

    def __getitem__(self, t: int) -> Task:
        if not 0 <= t < len(self):
            raise IndexError(f"round {t} of a stream of {len(self)} tasks")
        draw = rng("n-way task", self.seed, t)
        newest = self.ways - 1 + t
        earlier = draw.permutation(newest)[: self.ways - 1]
        classes = tuple(self.order[i] for i in draw.permutation([newest, *earlier]))
        # (per_class, ways): reading it row by row takes the classes in turn.
        ids = np.stack([draw.permutation(self._train[c]) for c in classes], 1).reshape(-1)
        test = np.stack([self._test[c] for c in classes], 1).reshape(-1)
        return Task(
            self.names[self.order[newest]],
            _batch(self.data.x[ids], self.ways),
            _batch(self.data.test_x[test], self.ways),
            classes=classes,
            ids=torch.from_numpy(ids),
        )


def _batch(x: np.ndarray, ways: int) -> Batch:
    return Batch(torch.from_numpy(np.ascontiguousarray(x)), torch.arange(ways).repeat(len(x) // ways))


def _by_class(x: np.ndarray, labels: np.ndarray, part: str) -> dict[int, np.ndarray]:
    labels = np.asarray(labels)
    if labels.shape != (len(x),) or labels.dtype.kind not in "iu":
        raise ValueError(f"{part}: {len(x)} datapoints need as many integer labels, got {labels.dtype} {labels.shape}")
    if len(labels) and labels.min() < 0:
        raise ValueError(f"{part}: classes must not be negative, got {labels.min()}")
    grouped = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[grouped], return_index=True)
    return dict(zip(classes.tolist(), np.split(grouped, starts[1:]), strict=True))


def _ordered(
    classes: list[int], order: str | Sequence[int], superclasses: Sequence[int] | None, seed: int
) -> list[int]:
    if order == "given":
        return classes
    shuffled = [classes[i] for i in rng("n-way order", seed).permutation(len(classes))]
    if order == "random":
        return shuffled
    if order == "superclass":
        if superclasses is None or len(superclasses) <= max(classes):
            raise ValueError(f"order 'superclass' needs the superclass of each of the {len(classes)} classes")
        groups = list(dict.fromkeys(superclasses[c] for c in shuffled))
        return sorted(shuffled, key=lambda c: groups.index(superclasses[c]))
    if isinstance(order, str):
        raise ValueError(f"order must be random, given, superclass or a list of classes; got {order!r}")
    if len(set(order)) < len(order) or not set(order) <= set(classes):
        raise ValueError(f"order must list different classes of the data, got {list(order)}")
    return [int(c) for c in order]
