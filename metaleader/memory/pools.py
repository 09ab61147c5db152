"""The choices of a draw: its tasks, by their weights, and the datapoints of each.

A task of n datapoints gives disjoint support and query sets. If n is smaller than support + query, its datapoints are
divided between the two and repeated in turn to fill the sets; a single datapoint is both. They are divided in
proportion, at least one each, but a large query set leaves the support set half of them or all that it needs: the
gradient after steps on copies of very few datapoints can be a million times longer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from metaleader.distributed.shards import Shard
from metaleader.memory.entries import Entries
from metaleader.memory.entry import Entry
from metaleader.memory.rows import Weights, Which


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
    drawn = [] if which == "current" else entries.drawn if shard is None else entries.drawn_in(shard)
    if without:
        drawn = [entry for entry in drawn if entry.name not in without]
    last = entries.round
    if last is None or which == "past" or (shard is not None and which == "all" and not shard.has(last.number)):
        return drawn, []
    return drawn, [last]


def draw_rows(
    entries: Entries,
    weights: Weights | None,
    uniforms: np.ndarray,
    support: int,
    query: int,
    which: Which,
    without: Collection[str],
    shard: Shard | None,
) -> np.ndarray | None:
    """Draw tasks from nu^t and datapoints of each: row numbers, (draws, support + query); None without tasks.

    The draws depend on uniform numbers, (draws, 1 + 2 (support + query)); the other arguments are those of `pool_of`.
    """
    chosen = choose_tasks(entries, weights, uniforms[:, 0], which, without, shard)
    if not chosen:
        return None
    # Only the chosen tasks are read, so that the cost does not grow with the number of tasks.
    counts = np.array([entry.count for entry in chosen], dtype=np.int64)
    index = split(distinct(uniforms[:, 1:], counts, support + query), counts, support, query)
    drawn = np.array([entry.start for entry in chosen], dtype=np.int64)[:, None] + index
    for i, entry in enumerate(chosen):
        if entry.scattered is not None:
            drawn[i] = entry.rows()[index[i]]
    return drawn


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


def checked_weights(weights: Weights, num: int) -> np.ndarray:
    """The weights of tasks 0 .. num-1, checked."""
    given = np.asarray(weights(num), dtype=np.float64)
    if given.shape != (num,) or not np.isfinite(given).all() or (given < 0).any() or given.sum() <= 0:
        raise ValueError(f"the task weights must be {num} numbers, none negative and not all zero; got {given}")
    return given


def choose(uniform: np.ndarray, num: int, weights: np.ndarray | None) -> np.ndarray:
    """Choose tasks 0 .. num-1 by weight, from uniform numbers."""
    if weights is None:
        return np.minimum((uniform * num).astype(np.int64), num - 1)
    cumulative = np.cumsum(weights)
    return np.minimum(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"), num - 1)


def arrival_times(uniform: np.ndarray, weights: np.ndarray, needed: int) -> np.ndarray:
    """Exponential arrival times with rates `weights`: the earliest ones are a weighted draw without replacement."""
    if (weights > 0).sum() < needed:
        raise ValueError(f"the weights leave {(weights > 0).sum()} classes to draw from; a task needs {needed}")
    with np.errstate(divide="ignore"):
        return np.where(weights > 0, -np.log1p(-uniform) / weights, np.inf)


def distinct(uniform: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """Up to `width` distinct numbers below each count, in random order (Floyd's sampling, then a shuffle).

    Args:
        uniform: (rows, 2 width) uniform numbers.
        counts: (rows,), one or more.
        width: numbers wanted; rows with a smaller count repeat their numbers in turn.
    """
    take, columns = np.minimum(counts, width), np.arange(width)
    tops = counts - take + columns[:, None]  # (width, rows), as `chosen`: the loop reads whole lines of memory
    chosen = np.minimum((uniform[:, :width].T * (tops + 1)).astype(np.int64), tops)
    if counts.max(initial=0) < 2**15:  # narrow numbers are compared faster
        chosen, tops = chosen.astype(np.int16), tops.astype(np.int16)
    # A candidate that was chosen before is replaced by its top.
    for j in range(1, width):
        np.copyto(chosen[j], tops[j], where=(chosen[:j] == chosen[j]).any(axis=0))
    keys, is_short = uniform[:, width:], bool((take < width).any())
    if is_short:
        keys = np.where(columns < take[:, None], keys, 2.0)
    order, rows = np.argsort(keys, axis=1, kind="stable"), np.arange(len(counts))[:, None]
    if is_short:
        # Columns from `take` on are sorted behind the others and are not read.
        order = order[rows, columns % take[:, None]]
    return chosen[order, rows].astype(np.int64)


def split(numbers: np.ndarray, counts: np.ndarray, support: int, query: int) -> np.ndarray:
    """Columns for the support set, then for the query set; short rows are divided and repeated."""
    width = support + query
    if support == 0 or (counts >= width).all():
        return numbers
    have = np.minimum(counts, width)
    shares = np.maximum(have * support // width, np.minimum(support, have // 2))
    for_support = np.clip(shares, 1, np.maximum(have - 1, 1))
    for_query = np.maximum(have - for_support, 1)
    first = np.arange(support) % for_support[:, None]
    second = (np.where(have > 1, for_support, 0))[:, None] + np.arange(query) % for_query[:, None]
    return np.take_along_axis(numbers, np.concatenate([first, second], axis=1), axis=1)
