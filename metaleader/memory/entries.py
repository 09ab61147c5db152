"""The tasks in memory: which rows of the storage they have, which of them are drawn, and how a change is undone.

A round of `begin` is one entry. Data stored under a name is one entry per name, whatever arrives in between; it
includes the closed rounds of that name, and is drawn from its second datapoint on.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from metaleader.distributed.shards import Shard


class Entry:
    """The rows of one task, in order of arrival; they need not be contiguous.

    Attributes:
        name: of the task.
        number: the number of tasks seen before it.
        merged: whether data of any round may be added (`observe(task=)`), or it is a round of `begin`.
        start: the first row.
        count: the number of datapoints.
        scattered: the row numbers, with spare capacity; None while they are start, start + 1, ...
        touched: when the last datapoint arrived, in calls of `TaskBuffer.append`.
    """

    __slots__ = ("count", "merged", "name", "number", "scattered", "start", "touched")

    def __init__(self, name: str, number: int, merged: bool, start: int = 0, count: int = 0) -> None:
        self.name, self.number, self.merged = name, number, merged
        self.start, self.count, self.touched = start, count, 0
        self.scattered: np.ndarray | None = None

    def rows(self) -> np.ndarray:
        """The row numbers, (count,)."""
        if self.scattered is None:
            return np.arange(self.start, self.start + self.count)
        return self.scattered[: self.count]

    def add(self, rows: range) -> None:
        """Add rows that follow each other."""
        if self.count == 0:
            self.start, self.scattered = rows.start, None
        elif self.scattered is not None or rows.start != self.start + self.count:
            self._extend(np.asarray(rows))
        self.count += len(rows)

    def absorb(self, other: Entry) -> None:
        """Add the rows of another entry; setting `count` back undoes it."""
        self._extend(other.rows())
        self.count += other.count

    def copy(self, name: str, merged: bool) -> Entry:
        """A copy with another name and kind, that does not change with this one."""
        copied = Entry(name, self.number, merged, self.start, self.count)
        copied.touched, copied.scattered = self.touched, None if self.scattered is None else self.scattered.copy()
        return copied

    def _extend(self, rows: np.ndarray) -> None:
        total = self.count + len(rows)
        if self.scattered is None or total > len(self.scattered):
            larger = np.empty(total * 5 // 4, dtype=np.int64)
            larger[: self.count] = self.rows()
            self.scattered = larger
        self.scattered[self.count : total] = rows


class Entries:
    """The tasks kept.

    Attributes:
        drawn: closed entries that draws choose from.
        idle: closed entries that are not drawn, by number: those with a single datapoint under a name, or set aside.
        by_name: all entries by name.
        aside: the names that are set aside, with the reason.
        round: the open round, from its first datapoint on.
        open: the name of the open round before its first datapoint.
        seen: the number of tasks so far.
        removed: the number of tasks that were forgotten, or merged with another.
        holes: the number of rows that belong to no task.
        clock: the number of calls that added data.
    """

    def __init__(
        self, entries: Sequence[Entry] = (), has_round: bool = False, aside: Mapping[str, str] | None = None
    ) -> None:
        closed = entries[:-1] if has_round else entries
        self.aside = dict(aside or {})
        self.drawn = [entry for entry in closed if self._is_drawn(entry)]
        self.idle = {entry.number: entry for entry in closed if not self._is_drawn(entry)}
        self.by_name: dict[str, list[Entry]] = {}
        for entry in entries:
            self.by_name.setdefault(entry.name, []).append(entry)
        self.round = entries[-1] if has_round else None
        self.open: str | None = None
        self.seen = self.removed = self.holes = 0
        self.clock = max((entry.touched for entry in entries), default=-1) + 1
        self._undo: list[Callable[[], object]] = []
        self._by_shard: list[list[Entry]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_undo": []}  # marks do not outlast a call

    def __len__(self) -> int:
        return len(self.drawn) + len(self.idle) + int(self.round is not None)

    def all(self, with_round: bool = True) -> list[Entry]:
        """All tasks kept, the open round last."""
        last = [self.round] if with_round and self.round is not None else []
        return [*self.drawn, *(self.idle[number] for number in sorted(self.idle)), *last]

    def drawn_in(self, shard: Shard | None) -> list[Entry]:
        """The closed entries of a shard that draws choose from; of all shards for None."""
        if shard is None:
            return self.drawn
        if self._by_shard is None or len(self._by_shard) != shard.total:
            self._by_shard = [[] for _ in range(shard.total)]
            for entry in self.drawn:
                self._by_shard[entry.number % shard.total].append(entry)
        return self._by_shard[shard.number]

    def named(self, name: str) -> list[Entry]:
        """The entries of a name, in the order of their first datapoints."""
        return sorted(self.by_name.get(name, ()), key=lambda entry: entry.number)

    def closed(self, name: str) -> list[Entry]:
        """The entries of a name without the open round."""
        return [entry for entry in self.named(name) if entry is not self.round]

    def unknown(self, name: str, note: str = "") -> ValueError:
        """The error for a name without data."""
        listed = ", ".join(reprlib.repr(known)[1:-1] for known in itertools.islice(self.by_name, 10))
        more = f" and {len(self.by_name) - 10} more" if len(self.by_name) > 10 else ""
        return ValueError(f"no data of task {reprlib.repr(name)}; tasks with data: {listed or 'none yet'}{more}{note}")

    def compacted(self) -> Entries:
        """The same tasks, with their rows one after the other from 0 on."""
        kept, moved = self.all(), []
        for entry, start in zip(kept, starts_of(kept), strict=False):
            moved.append(Entry(entry.name, entry.number, entry.merged, start, entry.count))
            moved[-1].touched = entry.touched
        entries = Entries(moved, self.round is not None, self.aside)
        entries.seen, entries.open, entries.removed = self.seen, self.open, self.removed
        return entries

    # Changes: each records how it is undone.

    def mark(self) -> None:
        """Make all changes so far permanent."""
        self._undo = []

    def point(self) -> int:
        """The number of changes since the mark."""
        return len(self._undo)

    def rollback(self, point: int) -> None:
        """Undo all changes since a point."""
        for undo in reversed(self._undo[point:]):
            undo()
        del self._undo[point:]
        self._by_shard = None

    def begin(self, name: str) -> None:
        """Open a round without data, and close the one before."""
        self._record()
        if self.round is not None:
            closed, self.round = self.round, None
            self._enter(closed)
        self.open = name

    def add_to_round(self, rows: range) -> None:
        """Add rows to the open round."""
        self._record()
        if self.round is None:
            self.round, self.open = self._new(str(self.open), merged=False), None
        self._add(self.round, rows)

    def add(self, name: str, rows: range) -> None:
        """Add rows to the one entry of a name; the open round is left as it is."""
        self._record()
        entries = self.closed(name)
        if not entries:
            entry = self._new(name, merged=True)
            self._add(entry, rows)
            self._enter(entry)
            return
        entry, *others = entries
        was_drawn, was_merged, count = self._is_drawn(entry), entry.merged, entry.count
        self._undo.append(lambda: (setattr(entry, "merged", was_merged), setattr(entry, "count", count)))
        entry.merged = True
        for other in others:
            entry.absorb(other)
            self.drop(other, holes=0)
            self.removed += 1
        self._add(entry, rows)
        if self._is_drawn(entry) != was_drawn:
            self._leave(entry)
            self._enter(entry)

    def drop(self, entry: Entry, holes: int | None = None) -> None:
        """Remove a closed entry; its rows become holes, unless another entry has them."""
        name, entries = entry.name, self.by_name[entry.name]
        rest, reason = [other for other in entries if other is not entry], self.aside.get(entry.name)
        self._record()
        self._leave(entry)
        self._undo.append(lambda: self.by_name.update({name: entries}))
        self.by_name[name] = rest
        if not rest:
            del self.by_name[name]
            if reason is not None:
                self._undo.append(lambda: self.aside.update({name: reason}))
                del self.aside[name]
        self.holes += entry.count if holes is None else holes

    def forget(self, name: str) -> None:
        """Remove all entries of a name; an open round of that name stays open, without data."""
        if self.round is not None and self.round.name == name:
            self._record()
            closed, self.round, self.open = self.round, None, name
            self._enter(closed)
        for entry in self.named(name):
            self.drop(entry)
            self.removed += 1

    def set_aside(self, name: str, reason: str) -> None:
        """Draw the closed entries of a name no more."""
        drawn = [entry for entry in self.closed(name) if self._is_drawn(entry)]
        self._undo.append(lambda: self.aside.pop(name, None))
        for entry in drawn:
            self._leave(entry)
        self.aside[name] = reason
        for entry in drawn:
            self._enter(entry)

    def readmit(self, name: str) -> None:
        """Draw the entries of a name again."""
        reason = self.aside[name]
        closed = self.closed(name)
        self._undo.append(lambda: self.aside.update({name: reason}))
        for entry in closed:
            self._leave(entry)
        del self.aside[name]
        for entry in closed:
            self._enter(entry)

    def _add(self, entry: Entry, rows: range) -> None:
        count, touched = entry.count, entry.touched
        self._undo.append(lambda: (setattr(entry, "count", count), setattr(entry, "touched", touched)))
        entry.add(rows)
        entry.touched, self.clock = self.clock, self.clock + 1

    def _new(self, name: str, merged: bool) -> Entry:
        """A new entry, which is not among the closed ones yet."""
        entry, entries = Entry(name, self.seen, merged), self.by_name.get(name, [])
        self._undo.append(lambda: self.by_name.update({name: entries}) if entries else self.by_name.pop(name, None))
        self.by_name[name] = [*entries, entry]
        self.seen += 1
        return entry

    def _enter(self, entry: Entry) -> None:
        """Put an entry among those that are drawn, or among the idle ones."""
        if self._is_drawn(entry):
            self._undo.append(lambda: self.drawn.pop() if self.drawn[-1:] == [entry] else None)
            self.drawn.append(entry)
            if self._by_shard is not None:
                self._by_shard[entry.number % len(self._by_shard)].append(entry)
        else:
            self._undo.append(lambda: self.idle.pop(entry.number, None))
            self.idle[entry.number] = entry

    def _leave(self, entry: Entry) -> None:
        """The inverse of `_enter`."""
        if entry.number in self.idle:
            self._undo.append(lambda: self.idle.setdefault(entry.number, entry))
            del self.idle[entry.number]
        else:
            i = self.drawn.index(entry)
            self._undo.append(lambda: None if self.drawn[i : i + 1] == [entry] else self.drawn.insert(i, entry))
            del self.drawn[i]
            self._by_shard = None

    def _record(self) -> None:
        """Record the values that a change replaces."""
        names = ("seen", "round", "open", "holes", "removed", "clock")
        before = {name: getattr(self, name) for name in names}
        self._undo.append(lambda: self.__dict__.update(before))

    def _is_drawn(self, entry: Entry) -> bool:
        return entry.name not in self.aside and (entry.count > 1 or not entry.merged)


def starts_of(entries: Sequence[Entry]) -> list[int]:
    """The first row of each entry if they lie one after the other, and the end of the last."""
    return np.cumsum([0, *(entry.count for entry in entries)]).tolist()


def index_of(entries: Sequence[Entry]) -> slice | np.ndarray:
    """The rows of entries, one entry after the other: a slice if they are contiguous."""
    first = entries[0].start if entries else 0
    end = first
    for entry in entries:
        if entry.scattered is not None or entry.start != end:
            return np.concatenate([entry.rows() for entry in entries])
        end += entry.count
    return slice(first, end)
