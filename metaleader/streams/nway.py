"""N-way classification with classes that arrive one at a time (section 6.2).

The first task has the first n classes. Each later task has one new class and n-1 earlier ones, with shuffled labels.
Datapoints of earlier classes recur: `Task.ids` identifies them, so that a learner stores each only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from metaleader.streams.base import BaseStream
from metaleader.streams.order import arrange
from metaleader.tasks import Batch, Task, rng


class Labelled(NamedTuple):
    """Labelled inputs, such as images.

    Attributes:
        x: an array with one row per datapoint.
        labels: the global class of each row, (N,), integers.
        test_x: held-out inputs.
        test_labels: the classes of the held-out inputs.
    """

    x: np.ndarray
    labels: np.ndarray
    test_x: np.ndarray
    test_labels: np.ndarray


class NWayStream(BaseStream):
    """A stream of n-way tasks over labelled inputs; C classes give C - n + 1 tasks.

    The datapoints of a task cycle through its classes, so any reveal of a multiple of n datapoints is balanced. A class
    contributes the same `per_class` datapoints to each of its tasks, each time in a different order.

    Args:
        data: the labelled inputs; they are not copied.
        ways: n, the number of classes per task.
        per_class: the number of training datapoints per class.
        test_per_class: the number of held-out datapoints per class; the size of the smallest class if None.
        order: of the classes: "random"; "given", ascending; "superclass", one group of `superclasses` after another,
            with groups and their classes in random order; one of the other orders of `reorder`; or a list of classes,
            which may omit some.
        superclasses: the group of each class, indexed by class.
        names: the name of each class, indexed by class; a task is named after its newest class.
        seed: `stream[t]` depends only on the seed and t.
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
        if superclasses is not None and len(superclasses) <= max(train, default=0):
            raise ValueError(f"{len(superclasses)} superclasses for class {max(train)}; give one per class")
        self._groups = [] if superclasses is None else [str(group) for group in superclasses]
        self.order = _class_order(sorted(train), order, self._groups, seed)
        self.names = {c: names[c] if names is not None else f"class {c}" for c in self.order}
        if not 2 <= ways <= len(self.order):
            raise ValueError(f"ways must lie in 2..{len(self.order)}, the number of classes; got {ways}")
        if test_per_class is None:
            test_per_class = min(len(test.get(c, ())) for c in self.order)
        for split, by_class, wanted in (("training", train, per_class), ("test", test, test_per_class)):
            available, smallest = min((len(by_class.get(c, ())), c) for c in self.order)
            if not 1 <= wanted <= available:
                raise ValueError(f"cannot take {wanted} {split} datapoints per class: class {smallest} has {available}")
        self._train = {c: rng("n-way pool", seed, c).permutation(train[c])[:per_class] for c in self.order}
        self._test = {c: test[c][:test_per_class] for c in self.order}

    def __len__(self) -> int:
        return len(self.order) - self.ways + 1

    @property
    def attributes(self) -> Mapping[str, Sequence[Any]]:
        """The superclasses of the newest classes, if there are superclasses."""
        return {"superclass": [self._groups[c] for c in self.order[self.ways - 1 :]]} if self._groups else {}

    def task(self, t: int) -> Task:
        """The task of round t."""
        draw = rng("n-way task", self.seed, t)
        newest = self.ways - 1 + t
        earlier = draw.permutation(newest)[: self.ways - 1]
        classes = tuple(self.order[i] for i in draw.permutation([newest, *earlier]))
        # Flattening (per_class, ways) cycles through the classes.
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


def _by_class(x: np.ndarray, labels: np.ndarray, split: str) -> dict[int, np.ndarray]:
    """Return the row indices of each class."""
    labels = np.asarray(labels)
    if labels.shape != (len(x),) or labels.dtype.kind not in "iu":
        raise ValueError(f"{split}: {len(x)} datapoints need as many integer labels, got {labels.dtype} {labels.shape}")
    if len(labels) and labels.min() < 0:
        raise ValueError(f"{split}: classes must not be negative, got {labels.min()}")
    grouped = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[grouped], return_index=True)
    return dict(zip(classes.tolist(), np.split(grouped, starts[1:]), strict=True))


def _class_order(classes: list[int], order: str | Sequence[int], groups: Sequence[str], seed: int) -> list[int]:
    if not isinstance(order, str):
        if len(set(order)) < len(order) or not set(order) <= set(classes):
            raise ValueError(f"order must list distinct classes of the data, got {list(order)}")
        return [int(c) for c in order]
    if order == "given":
        return classes
    shuffled = [classes[i] for i in rng("n-way order", seed).permutation(len(classes))]
    if order == "random":
        return shuffled
    if order == "superclass" and not groups:
        raise ValueError(f"order 'superclass' needs the superclass of each of the {len(classes)} classes")
    attributes = {"superclass": [groups[c] for c in shuffled]} if groups else {}
    others = ("random", "given", "a list of classes")
    return [shuffled[i] for i in arrange(order, attributes, seed, others=others)]
