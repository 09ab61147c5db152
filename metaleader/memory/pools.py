"""The tasks that a draw chooses from, and their weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from metaleader.distributed.shards import Shard
from metaleader.memory.entries import Entries
from metaleader.memory.entry import Entry
from metaleader.memory.rows import Weights, Which, checked_weights, choose


def pool_of(
    entries: Entries, which: Which, without: Collection[str], shard: Shard | None
) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """The closed tasks to draw from, and the open round if it is drawn from.

    Args:
        entries: all tasks.
        which: all tasks, those other than the open round, or the open round only.
        without: names to leave out.
        shard: that the tasks belong to; from the open round only, every shard draws.
    """
    drawn = [] if which == "current" else entries.drawn_in(shard)
    if without:
        drawn = [entry for entry in drawn if entry.name not in without]
    last = entries.round
    if last is None or which == "past" or (shard is not None and which == "all" and not shard.has(last.number)):
        return drawn, []
    return drawn, [last]


def choose_tasks(
    entries: Entries,
    weights: Weights | None,
    uniform: np.ndarray,
    which: Which,
    without: Collection[str],
    shard: Shard | None,
) -> list[Entry]:
    """The tasks of draws, chosen from nu^t by one uniform number each; none if there is nothing to draw from."""
    drawn, last = pool_of(entries, which, without, shard)
    num = len(drawn) + len(last)
    if num == 0:
        return []
    by_task = None
    if weights is not None and which != "current":
        by_task = weights_of(entries, weights, [*drawn, *last], which)
    return [drawn[i] if i < len(drawn) else last[0] for i in choose(uniform, num, by_task).tolist()]


def weights_of(entries: Entries, weights: Weights | None, some: Sequence[Entry], which: Which) -> np.ndarray | None:
    """The weights of some tasks under nu^t; None if they are uniform."""
    if weights is None:
        return None
    # Weights over all tasks seen, without the open round if it is the latest task and is not sampled.
    latest, seen = entries.round, entries.seen
    without = which == "past" and latest is not None and latest.number == seen - 1
    chosen = checked_weights(weights, seen - int(without))[[entry.number for entry in some]]
    return chosen if chosen.sum() > 0 else None


def masses_of_shards(
    entries: Entries, weights: Weights | None, total: int, which: Which, without: Collection[str]
) -> np.ndarray:
    """The weight of the tasks of each shard under nu^t."""
    if weights is None:
        pools = (pool_of(entries, which, without, Shard(number, total)) for number in range(total))
        return np.array([len(drawn) + len(last) for drawn, last in pools], dtype=np.float64)
    some = [entry for part in pool_of(entries, which, without, None) for entry in part]
    by_task = weights_of(entries, weights, some, which) if some else None
    return np.bincount([entry.number % total for entry in some], by_task, minlength=total).astype(np.float64)
