"""The images of a memory by class, in order of arrival: which are kept, their rows in the storage, classes and ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from metaleader.memory.limits import Limits

UNNAMED = -1
# Positions are renumbered when this fraction of them was dropped.
_MAX_DROPPED = 0.25


class Images:
    """The images of all classes. The position of an image says how many arrived before it.

    Attributes:
        classes: of each image.
        ids: of each image; `UNNAMED` without one.
        rows: of each image, in the storage.
        position_of: by id.
        observed: the number of images observed of each class, in the order in which they were last observed.
    """

    def __init__(self, classes: Sequence[int] = (), ids: Sequence[int] = (), rows: Sequence[int] = ()) -> None:
        self.classes, self.ids, self.rows = list(classes), list(ids), list(rows)
        self.position_of = {name: i for i, name in enumerate(self.ids) if name != UNNAMED}
        self.observed: dict[int, int] = {}
        for one in self.classes:
            self.observed[one] = self.observed.pop(one, 0) + 1
        self._dropped: list[int] = []
        self._freed: list[int] = []

    def __len__(self) -> int:
        """The number of images kept."""
        return len(self.classes) - len(self._dropped)

    def kept(self, length: int | None = None) -> np.ndarray:
        """The positions of the images kept, among the first `length`."""
        mask = np.ones(len(self.classes), dtype=bool)
        mask[self._dropped] = False
        return np.flatnonzero(mask[:length])

    def of_class(self, number: int) -> np.ndarray:
        """The positions of the images kept of a class."""
        kept = self.kept()
        return kept[np.asarray(self.classes, dtype=np.int64)[kept] == number]

    def add(self, classes: Sequence[int], ids: Sequence[int], rows: Sequence[int]) -> None:
        """Add images at the end."""
        length = len(self.ids)
        self.ids += ids  # the first, by which `rollback` finds the others
        self.classes += classes
        self.rows += rows
        self.position_of |= {name: length + i for i, name in enumerate(ids) if name != UNNAMED}

    def count(self, classes: Mapping[int, int]) -> None:
        """Count images as observed, by class."""
        for number, num in classes.items():
            self.observed[number] = self.observed.pop(number, 0) + num

    def drop(self, positions: Collection[int]) -> None:
        """Remove images."""
        for position in positions:
            self._dropped.append(position)
            self._freed.append(self.rows[position])
            if self.position_of.get(self.ids[position]) == position:
                del self.position_of[self.ids[position]]

    def is_dropped(self, positions: Sequence[int]) -> list[bool]:
        """Whether each of some images was dropped."""
        dropped = set(self._dropped)
        return [position in dropped for position in positions]

    def point(self) -> tuple[Any, ...]:
        """This point, for `rollback`."""
        return len(self.classes), len(self._dropped), len(self._freed), dict(self.observed)

    def rollback(self, point: tuple[Any, ...]) -> None:
        """Undo all changes since a point."""
        length, num_dropped, num_freed, self.observed = point
        for position, name in enumerate(self.ids[length:], length):
            if self.position_of.get(name) == position:
                del self.position_of[name]
        for position in self._dropped[num_dropped:]:
            if position < length and self.ids[position] != UNNAMED:
                self.position_of[self.ids[position]] = position
        del self._dropped[num_dropped:], self._freed[num_freed:]
        del self.classes[length:], self.ids[length:], self.rows[length:]

    def freed(self) -> np.ndarray:
        """The rows of the images dropped since the last call."""
        freed, self._freed = np.array(self._freed, dtype=np.int64), []
        return freed

    def moved(self) -> np.ndarray | None:
        """The position in `kept_part` of each image, -1 if it was dropped; None while few were."""
        if not self._dropped or len(self._dropped) < _MAX_DROPPED * len(self.classes):
            return None
        kept = self.kept()
        moved = np.full(len(self.classes), -1)
        moved[kept] = np.arange(len(kept))
        return moved

    def kept_part(self) -> Images:
        """The images kept, numbered from 0."""
        kept = self.kept()
        part = Images(*([values[i] for i in kept] for values in (self.classes, self.ids, self.rows)))
        part.observed, part._freed = dict(self.observed), list(self._freed)
        return part

    def pools(self, length: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The classes in order of arrival, the rows grouped by class, and the count and start of each class.

        Of the images kept, and among the first `length`.
        """
        kept = self.kept(length)
        classes, first, inverse = np.unique(
            np.asarray(self.classes, dtype=np.int64)[kept], return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        arrival = np.empty(len(classes), dtype=np.int64)
        arrival[order] = np.arange(len(classes))
        pool = arrival[inverse]
        counts = np.bincount(pool, minlength=len(classes))
        grouped = np.asarray(self.rows, dtype=np.int64)[kept[np.argsort(pool, kind="stable")]]
        return classes[order], grouped, counts, np.cumsum(counts) - counts

    # Limits.

    def admit(self, classes: Sequence[int], limits: Limits, most: int | None) -> list[int]:
        """Drop images so that new ones of some classes can be kept; returns the positions of those kept among the new.

        Args:
            classes: of the new images.
            limits: of memory.
            most: the number of images kept of a class; None for all.
        """
        # In the order of their last images: the same however images are divided into calls.
        counts = {number: classes.count(number) for number in reversed(dict.fromkeys(reversed(classes)))}
        admitted = list(range(len(classes)))
        if most is not None:
            admitted = []
            for number, num in counts.items():
                old, observed, key = self.of_class(number), self.observed.get(number, 0), number % 2**64
                fewer = limits.merged(key, [len(old)], [max(observed, len(old))], most) if len(old) else None
                if fewer is not None:
                    self.drop(np.delete(old, fewer).tolist())
                    old = old[fewer]
                kept = limits.kept_in_order(key, len(old), observed, num, most)
                self.drop(np.delete(old, kept[kept < len(old)]).tolist())
                new = np.flatnonzero(np.asarray(classes) == number)
                admitted += new[kept[kept >= len(old)] - len(old)].tolist()
        self.count(counts)
        return sorted(admitted)

    def make_room(self, num: int, most: int | None, open_classes: Collection[int]) -> None:
        """Drop classes so that `num` images more can be kept: those not observed for longest, but those open."""
        for number in list(self.observed):
            if most is None or len(self) + num <= most:
                return
            if number not in open_classes:
                self.drop(self.of_class(number).tolist())
                del self.observed[number]


def observed_of(state: Mapping[str, Any], images: Images) -> dict[int, int]:
    """The number of images observed of each class in a state, in the order in which they were last observed."""
    if "observed" not in state:
        return images.observed
    pairs, counts = state["observed"], images.observed
    if type(pairs) is not list or any(type(pair) is not list or list(map(type, pair)) != [int, int] for pair in pairs):
        raise ValueError("the state is damaged: its observed must be pairs of integers")
    observed = dict(pairs)
    if observed.keys() != counts.keys() or any(observed[number] < num for number, num in counts.items()):
        raise ValueError("the state is damaged: a class has more images than were observed")
    return observed
