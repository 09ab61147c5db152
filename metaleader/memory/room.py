"""The room that a memory with limits makes: it drops the tasks with the smallest weights, or the oldest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from metaleader.memory.entries import Entries
from metaleader.memory.entry import Entry
from metaleader.memory.limits import Kept, Limits
from metaleader.memory.pools import weights_of
from metaleader.memory.rows import Weights, bytes_of
from metaleader.tasks import Batch, num_rows, rows


def within_limits(
    entries: Entries, weights: Weights | None, limits: Limits, batch: Batch, task: str | None
) -> tuple[Entry | None, Kept, Batch]:
    """Drop other tasks until there is room for new datapoints of a task, or of the open round for None.

    Returns the entry that they belong to, None for a new one, which datapoints it keeps, and those of the new ones that
    are stored. `begin` has made room for the open round among the tasks.
    """
    row_bytes = bytes_of(batch)
    most, in_all = limits.in_task(row_bytes), limits.in_all(row_bytes)
    counts, observed = entries.parts(task)
    entry = entries.target(task)
    number = entries.seen if entry is None else entry.number
    positions = limits.merged(number, counts, observed, most)
    if entry is not None and positions is not None:
        entries.keep(entry, positions)
    kept = limits.kept(number, 0 if entry is None else entry.count, sum(observed), num_rows(batch), most)
    growth = len(kept.added) - kept.dropped
    num_tasks = 0
    if limits.max_tasks is not None and entry is None and task is not None:
        num_tasks = len(entries) + int(entries.open is not None) + 1 - limits.max_tasks

    def is_too_large() -> bool:
        return in_all is not None and entries.total + growth > in_all

    if num_tasks > 0 or is_too_large():
        others = droppable(entries, weights, [entry, entries.round])
        while (num_tasks > 0 or is_too_large()) and (other := next(others, None)) is not None:
            entries.drop(other)
            num_tasks -= 1
    stores_all = np.array_equal(kept.stored, range(kept.num))
    return entry, kept, batch if stores_all else rows(batch, torch.from_numpy(kept.stored))


def droppable(entries: Entries, weights: Weights | None, kept: Sequence[Entry | None] = ()) -> Iterator[Entry]:
    """The tasks in the order in which they are dropped, without those kept; each one taken must be dropped."""
    some = [] if weights is None else [entry for entry in entries.all() if entry not in kept]
    by_task = weights_of(entries, weights, some, "all") if some else None
    if by_task is None:  # or all have the weight zero
        yield from entries.oldest(kept)
    else:
        yield from (some[i] for i in np.argsort(by_task, kind="stable"))
