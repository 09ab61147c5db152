"""The rows of one task.

A round of `begin` is one entry. Data stored under a name is one entry per name.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Entry:
    """The rows of one task, in order of arrival; they need not be contiguous.

    Attributes:
        name: of the task.
        number: the number of tasks seen before it.
        merged: whether data of any round may be added (`observe(task=)`), or it is a round of `begin`.
        start: the first row.
        count: the number of datapoints kept.
        observed: the number of datapoints observed.
        scattered: the row numbers, with spare capacity; None while they are start, start + 1, ...
        first: the position in `scattered` of the first row kept.
        touched: when the last datapoint arrived, in calls of `TaskBuffer.append`.
    """

    __slots__ = ("count", "first", "merged", "name", "number", "observed", "scattered", "start", "touched")

    def __init__(self, name: str, number: int, merged: bool, start: int = 0, count: int = 0) -> None:
        self.name, self.number, self.merged = name, number, merged
        self.start, self.count, self.observed, self.touched = start, count, count, 0
        self.scattered: np.ndarray | None = None
        self.first = 0

    def rows(self) -> np.ndarray:
        """The row numbers, (count,)."""
        if self.scattered is None:
            return np.arange(self.start, self.start + self.count)
        return self.scattered[self.first : self.first + self.count]

    def add(self, rows: range | np.ndarray) -> None:
        """Add rows at the end."""
        if len(rows) and isinstance(rows, range) and self.count == 0:
            self.start, self.scattered = rows.start, None
        elif len(rows) and (
            not isinstance(rows, range) or self.scattered is not None or rows.start != self.start + self.count
        ):
            self._extend(np.asarray(rows))
        self.count += len(rows)

    def drop(self, num: int) -> np.ndarray:
        """Remove the first rows; returns their numbers."""
        dropped = self.rows()[:num].copy()
        if self.scattered is None:
            self.start += num
        else:
            self.first += num
        self.count -= num
        return dropped

    def keep(self, positions: np.ndarray) -> np.ndarray:
        """Keep the rows at some positions; returns the numbers of the others."""
        rows = self.rows()
        self.scattered, self.first, self.count = rows[positions], 0, len(positions)
        return np.delete(rows, positions)

    def absorb(self, other: Entry) -> None:
        """Add the rows of another entry."""
        self._extend(other.rows())
        self.count += other.count
        self.observed += other.observed

    def values(self) -> tuple[Any, ...]:
        """Everything that changes, to restore it by `restore`; rows are only added behind those of now."""
        return self.merged, self.start, self.count, self.observed, self.touched, self.scattered, self.first

    def restore(self, values: tuple[Any, ...]) -> None:
        """The inverse of `values`."""
        self.merged, self.start, self.count, self.observed, self.touched, self.scattered, self.first = values

    def copy(self, name: str, merged: bool) -> Entry:
        """A copy with another name and kind, that does not change with this one."""
        copied = Entry(name, self.number, merged)
        copied.restore((merged, *self.values()[1:]))
        copied.scattered = None if self.scattered is None else self.scattered.copy()
        return copied

    def scatter(self) -> np.ndarray:
        """The row numbers as an array that can be changed in place, (count,)."""
        if self.scattered is None:
            self.scattered, self.first = self.rows(), 0
        return self.rows()

    def _extend(self, rows: np.ndarray) -> None:
        end, total = self.first + self.count, self.count + len(rows)
        if self.scattered is None or end + len(rows) > len(self.scattered):
            larger = np.empty(total * 5 // 4, dtype=np.int64)
            larger[: self.count] = self.rows()
            self.scattered, self.first = larger, 0
        self.scattered[self.first + self.count : self.first + total] = rows
