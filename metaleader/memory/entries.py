"""The tasks in memory: which rows of the storage they have, which of them are drawn, and how a change is undone.

A round of `begin` is one entry. Data stored under a name is one entry per name, whatever arrives in between; it
includes the closed rounds of that name, and is drawn from its second datapoint on.
"""

from __future__ import annotations

import heapq
import itertools
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from metaleader.distributed.shards import Shard
from metaleader.memory.entry import Entry
from metaleader.memory.limits import Kept


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
        total: the number of datapoints of all entries.
        freed: rows that belong to no task since the latest mark.
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
        self.seen = self.removed = 0
        self.total = sum(entry.count for entry in entries)
        self.freed: list[np.ndarray] = []
        self.clock = max((entry.touched for entry in entries), default=-1) + 1
        self._undo: list[Callable[[], object]] = []
        self._by_shard: list[list[Entry]] | None = None
        # By the last datapoint; entries that were touched again or dropped are still in it.
        self._ages: list[tuple[int, int, Entry]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_undo": []}  # marks do not outlast a call

    def __len__(self) -> int:
        return len(self.drawn) + len(self.idle) + int(self.round is not None)

    def all(self, with_round: bool = True) -> list[Entry]:
        """All tasks kept, the open round last."""
        last = [self.round] if with_round and self.round is not None else []
        return [*self.drawn, *(self.idle[number] for number in sorted(self.idle)), *last]

    def drawn_in(self, shard: Shard) -> list[Entry]:
        """The closed entries of a shard that draws choose from."""
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

    def oldest(self, kept: Sequence[Entry | None] = ()) -> Iterator[Entry]:
        """The entries but those kept, by their last datapoint, the oldest first; each one yielded must be dropped."""
        if self._ages is None or len(self._ages) > 4 * len(self) + 100:
            self._ages = [(entry.touched, entry.number, entry) for entry in self.all()]
            heapq.heapify(self._ages)
        skipped = []
        try:
            while self._ages:
                item = heapq.heappop(self._ages)
                touched, _, entry = item
                if entry.touched != touched or entry not in self.by_name.get(entry.name, ()):
                    continue
                if entry in kept:
                    skipped.append(item)
                else:
                    yield entry
        finally:
            for item in skipped:
                heapq.heappush(self._ages, item)

    def compacted(self) -> Entries:
        """The same tasks, with their rows one after the other from 0 on."""
        kept, moved = self.all(), []
        for entry, start in zip(kept, starts_of(kept), strict=False):
            moved.append(Entry(entry.name, entry.number, entry.merged, start, entry.count))
            moved[-1].touched, moved[-1].observed = entry.touched, entry.observed
        entries = Entries(moved, self.round is not None, self.aside)
        entries.seen, entries.open, entries.removed = self.seen, self.open, self.removed
        return entries

    # Changes: each records how it is undone.

    def mark(self) -> list[np.ndarray]:
        """Make all changes so far permanent; returns the rows that belong to no task since the latest mark."""
        freed, self.freed, self._undo = self.freed, [], []
        return freed

    def point(self) -> int:
        """The number of changes since the mark."""
        return len(self._undo)

    def rollback(self, point: int) -> None:
        """Undo all changes since a point."""
        for undo in reversed(self._undo[point:]):
            undo()
        del self._undo[point:]
        self._by_shard = self._ages = None

    def begin(self, name: str) -> None:
        """Open a round without data, and close the one before."""
        self._record()
        if self.round is not None:
            closed, self.round = self.round, None
            self._enter(closed)
        self.open = name

    def parts(self, name: str | None) -> tuple[list[int], list[int]]:
        """The datapoints kept, and those observed, of each entry that `target` would join."""
        entries = self.closed(name) if name is not None else [] if self.round is None else [self.round]
        return [entry.count for entry in entries], [entry.observed for entry in entries]

    def target(self, name: str | None) -> Entry | None:
        """The entry that datapoints of a name are added to, or of the open round for None; None if it would be new.

        The closed rounds of a name become one entry.
        """
        return self.round if name is None else self._merged(name)

    def _merged(self, name: str) -> Entry | None:
        """The closed rounds of a name and the data under it, as one entry; None if it has none."""
        entries = self.closed(name)
        if not entries:
            return None
        entry, *others = entries
        if others or not entry.merged:
            self._record()
            self._change(entry)
            entry.merged = True
            for other in others:
                entry.absorb(other)
                self.drop(other, keeps_rows=True)
                self.removed += 1
        return entry

    def add(self, entry: Entry | None, name: str | None, rows: range | np.ndarray, kept: Kept | None = None) -> None:
        """Add rows to an entry, or to a new one of a name or of the open round.

        Args:
            entry: see `target`.
            name: of the task; None for the open round.
            rows: of the new datapoints that are stored.
            kept: which of the new datapoints and those of before are kept; None for all.
        """
        self._record()
        is_new, was_drawn = entry is None, entry is not None and entry.number not in self.idle
        if entry is None:
            entry = self._new(str(self.open) if name is None else name, merged=name is not None)
            if name is None:
                self.round, self.open = entry, None
        else:
            self._change(entry)
        entry.add(rows if kept is None else self._replace(entry, rows, kept))
        entry.observed += len(rows) if kept is None else kept.num
        entry.touched, self.clock = self.clock, self.clock + 1
        self.total += len(rows)
        if self._ages is not None:
            heapq.heappush(self._ages, (entry.touched, entry.number, entry))
        if name is not None and (is_new or self._is_drawn(entry) != was_drawn):
            if not is_new:
                self._leave(entry)
            self._enter(entry)

    def _replace(self, entry: Entry, rows: range | np.ndarray, kept: Kept) -> range | np.ndarray:
        """Drop datapoints of an entry, and replace others by the first of the new rows; returns the remaining rows."""
        if kept.dropped:
            self._free(entry.drop(kept.dropped))
        num_replaced = len(kept.replaced)
        if num_replaced:
            entry_rows, positions = entry.scatter(), kept.replaced
            before = entry_rows[positions]
            self._undo.append(lambda: entry_rows.__setitem__(positions, before))
            self._free(before)
            entry_rows[positions] = rows[:num_replaced]
        return rows[num_replaced:]

    def keep(self, entry: Entry, positions: np.ndarray) -> None:
        """Keep the datapoints of an entry at some positions."""
        self._record()
        self._change(entry)
        self._free(entry.keep(positions))

    def drop(self, entry: Entry, keeps_rows: bool = False) -> None:
        """Remove a closed entry; another entry may have its rows."""
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
        if not keeps_rows:
            self._free(entry.rows())

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

    def _change(self, entry: Entry) -> None:
        """Record the values of an entry."""
        before = entry.values()
        self._undo.append(lambda: entry.restore(before))

    def _free(self, rows: np.ndarray) -> None:
        """Count rows as those of no entry."""
        self._undo.append(lambda: self.freed.pop() if self.freed and self.freed[-1] is rows else None)
        self.freed.append(rows)
        self.total -= len(rows)

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
        names = ("seen", "round", "open", "total", "removed", "clock")
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
