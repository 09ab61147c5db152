"""One task in memory: its name, and the numbers of its rows in the storage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class Entry:
    """The rows of one task, in order of arrival; they need not be contiguous.

    Attributes:
        name: of the task.
        number: the number of tasks seen before it.
        merged: whether data of any round may be added (`observe(task=)`), or it is a round of `begin`.
        count: the number of datapoints.
        start: the first row.
        touched: when the last datapoint arrived, in calls of `TaskBuffer.append`.
    """

    __slots__ = ("_rows", "count", "merged", "name", "number", "start", "touched")

    def __init__(self, name: str, number: int, merged: bool, start: int = 0, count: int = 0) -> None:
        self.name, self.number, self.merged = name, number, merged
        self.start, self.count, self.touched = start, count, 0
        self._rows: np.ndarray | None = None  # with spare capacity; None while the rows are contiguous

    @property
    def is_contiguous(self) -> bool:
        """Whether the rows are start, start + 1, ..."""
        return self._rows is None

    def rows(self) -> np.ndarray:
        """The row numbers, (count,)."""
        if self._rows is None:
            return np.arange(self.start, self.start + self.count)
        return self._rows[: self.count]

    def at(self, index: np.ndarray) -> np.ndarray:
        """The row numbers of some of the datapoints."""
        return self.start + index if self._rows is None else self._rows[index]

    def add(self, first: int, num: int) -> None:
        """Add the rows first, first + 1, ..., first + num - 1."""
        if self.count == 0:
            self.start, self._rows = first, None
        elif self._rows is not None or first != self.start + self.count:
            self._extend(np.arange(first, first + num))
        self.count += num

    def absorb(self, other: Entry) -> Callable[[], None]:
        """Add the rows of another entry; returns a function that undoes it."""
        count = self.count
        self._extend(other.rows())
        self.count += other.count
        return lambda: setattr(self, "count", count)

    def copy(self, name: str, merged: bool) -> Entry:
        """A copy with another name and kind, that does not change with this one."""
        copied = Entry(name, self.number, merged, self.start, self.count)
        copied.touched, copied._rows = self.touched, None if self._rows is None else self._rows.copy()
        return copied

    def placed(self, start: int) -> Entry:
        """A copy whose rows are contiguous from `start` on."""
        moved = Entry(self.name, self.number, self.merged, start, self.count)
        moved.touched = self.touched
        return moved

    def _extend(self, rows: np.ndarray) -> None:
        total = self.count + len(rows)
        if self._rows is None or total > len(self._rows):
            larger = np.empty(total * 5 // 4, dtype=np.int64)
            larger[: self.count] = self.rows()
            self._rows = larger
        self._rows[self.count : total] = rows
