"""Which tasks a memory with limits drops: those with the smallest weights, or without weights the oldest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from metaleader.memory.entries import Entries
from metaleader.memory.entry import Entry
from metaleader.memory.limits import Limits
from metaleader.memory.pools import weights_of
from metaleader.memory.rows import Weights


class Needed(NamedTuple):
    """The room that new datapoints need.

    Attributes:
        entry: of their task; None for a new one.
        name: of their task; None for the open round, for which `begin` has made room.
        num: by how many datapoints the task grows.
        most: the number of datapoints of all tasks; None for any.
    """

    entry: Entry | None
    name: str | None
    num: int
    most: int | None


def make_room(entries: Entries, weights: Weights | None, limits: Limits, needed: Needed) -> None:
    """Drop other tasks until there is room."""
    num_tasks = 0
    if limits.max_tasks is not None and needed.entry is None and needed.name is not None:
        num_tasks = len(entries) + int(entries.open is not None) + 1 - limits.max_tasks

    def is_too_large() -> bool:
        return needed.most is not None and entries.total + needed.num > needed.most

    if num_tasks <= 0 and not is_too_large():
        return
    others = droppable(entries, weights, [needed.entry, entries.round])
    while (num_tasks > 0 or is_too_large()) and (other := next(others, None)) is not None:
        entries.drop(other)
        num_tasks -= 1


def droppable(entries: Entries, weights: Weights | None, kept: Sequence[Entry | None] = ()) -> Iterator[Entry]:
    """The tasks in the order in which they are dropped, without those kept; each one taken must be dropped."""
    some = [] if weights is None else [entry for entry in entries.all() if entry not in kept]
    by_task = weights_of(entries, weights, some, "all") if some else None
    if by_task is None:  # or all have the weight zero
        yield from entries.oldest(kept)
    else:
        yield from (some[i] for i in np.argsort(by_task, kind="stable"))
