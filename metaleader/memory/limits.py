"""Limits of memory: of tasks, of the datapoints of a task, and of bytes; and which datapoints of a task are kept.

A reservoir keeps a uniform random sample of all datapoints of a task (algorithm R): datapoint j, counted from 0, is
kept if a uniform number times j + 1 is below the size of the reservoir, in place of the datapoint at that position. The
random number of a datapoint depends on the seed, the task and j. The sample is therefore the same however the
datapoints are divided into calls: a run that is resumed observes those of a task at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from metaleader.tasks import rng

# A task takes at most this part of max_bytes, so that the open round and a task observed by name fit together.
_TASKS_IN_BYTES = 2
# An update needs two datapoints of a task.
_FEWEST = 2
# The numbers that one step of Philox makes
_PHILOX = 4


class Kept(NamedTuple):
    """Which datapoints a task keeps when others arrive.

    Attributes:
        num: the number of datapoints that arrive.
        dropped: the number of its first datapoints that are dropped.
        replaced: the positions of datapoints that new ones replace.
        replacing: the positions among the new datapoints of those that replace them.
        added: the positions among the new datapoints of those that are added at the end.
    """

    num: int
    dropped: int
    replaced: np.ndarray
    replacing: np.ndarray
    added: np.ndarray

    @property
    def stored(self) -> np.ndarray:
        """The positions among the new datapoints of those that are stored."""
        return np.concatenate([self.replacing, self.added])


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of memory; None is no limit.

    Attributes:
        max_tasks: the number of tasks kept.
        max_datapoints: the number of datapoints kept of each task.
        max_bytes: the number of bytes of all datapoints kept. A task takes at most half of them.
        reservoir: whether a task keeps a uniform random sample of its datapoints, or the newest.
        seed: of the sample.
    """

    max_tasks: int | None = None
    max_datapoints: int | None = None
    max_bytes: int | None = None
    reservoir: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("max_tasks", 1), ("max_datapoints", _FEWEST), ("max_bytes", 1)):
            value: Any = getattr(self, name)
            is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if value is not None and not (is_integer and value >= low):
                raise ValueError(f"{name} must be an integer of at least {low}, or None to keep all; got {value!r}")
        if not isinstance(self.reservoir, bool):
            raise ValueError(f"reservoir must be True or False, got {self.reservoir!r}")
        if self.reservoir and self.max_datapoints is None and self.max_bytes is None:
            raise ValueError("reservoir=True has no effect without max_datapoints or max_bytes; set one of them")

    def in_all(self, row_bytes: int) -> int | None:
        """The number of datapoints kept of all tasks, each of some bytes."""
        return None if self.max_bytes is None else self.max_bytes // row_bytes

    def in_task(self, row_bytes: int, tasks: int = _TASKS_IN_BYTES) -> int | None:
        """The number of datapoints kept of a task, if max_bytes is to hold some tasks.

        Raises:
            ValueError: if max_bytes is too small.
        """
        total = self.in_all(row_bytes)
        if total is None:
            return self.max_datapoints
        if total < tasks * _FEWEST:
            raise ValueError(
                f"max_bytes={self.max_bytes} holds {total} datapoints of {row_bytes} bytes; set it to"
                f" {tasks * _FEWEST * row_bytes} or more"
            )
        return min(self.max_datapoints or total, total // tasks)

    def kept(self, number: int, count: int, observed: int, new: int, most: int | None) -> Kept:
        """Which datapoints a task keeps when `new` ones arrive.

        Args:
            number: of the task.
            count: the datapoints that it keeps so far, at most `most`.
            observed: the datapoints that it had so far.
            new: the datapoints that arrive.
            most: the datapoints that it may keep; None for all.
        """
        none = np.empty(0, dtype=np.int64)
        if most is None or (count + new <= most and (not self.reservoir or count == observed)):
            return Kept(new, 0, none, none, np.arange(new))
        if not self.reservoir:
            dropped = min(count, count + new - most)
            return Kept(new, dropped, none, none, np.arange(max(0, new - most), new))
        # Algorithm R; a datapoint that arrives later replaces one of the same call at the same position.
        room = most - count if count == observed else 0
        added = list(range(min(room, new)))
        size, replaced = count + len(added), dict[int, int]()
        arriving = np.arange(len(added), new)
        places = self.places(number, observed, new)[arriving]
        for j, place in zip(arriving.tolist(), places.tolist(), strict=True):
            if place < count:
                replaced[place] = j
            elif place < size:
                added[place - count] = j
        positions, replacing = (
            np.array(list(replaced), dtype=np.int64),
            np.array(list(replaced.values()), dtype=np.int64),
        )
        return Kept(new, 0, positions, replacing, np.array(added, dtype=np.int64))

    def kept_in_order(self, number: int, count: int, observed: int, new: int, most: int) -> np.ndarray:
        """The positions, among those of before and then the new ones, of what a class keeps; a new one is the last."""
        if not self.reservoir:
            return np.arange(max(0, count + new - most), count + new)
        kept = list(range(count))
        for j, place in enumerate(self.places(number, observed, new).tolist()):
            if len(kept) < most and len(kept) == observed + j:
                kept.append(count + j)
            elif place < len(kept):
                del kept[place]
                kept.append(count + j)
        return np.array(kept, dtype=np.int64)

    def places(self, number: int, observed: int, new: int) -> np.ndarray:
        """For each of the datapoints after the first `observed`, a uniform integer up to the number of those before."""
        words = np.random.SeedSequence([*b"reservoir", self.seed, number])
        stream = np.random.Philox(words)
        stream.advance(observed // _PHILOX)
        skipped = observed % _PHILOX
        uniform = np.random.Generator(stream).random(skipped + new)[skipped:]
        return (uniform * np.arange(observed + 1, observed + new + 1)).astype(np.int64)

    def merged(
        self, number: int, counts: Sequence[int], observed: Sequence[int], most: int | None
    ) -> np.ndarray | None:
        """The positions kept of several parts of a task, one part after the other; None for all.

        A reservoir of all datapoints takes from each part as many as a uniform draw from all datapoints observed would.
        """
        total = sum(counts)
        if most is None or (total <= most and (not self.reservoir or total == sum(observed))):
            return None
        if not self.reservoir:
            return np.arange(total - most, total)
        generator = rng("reservoir", self.seed, number, *observed, len(counts))
        numbers = generator.multivariate_hypergeometric(observed, min(most, sum(observed)))
        starts = np.cumsum(counts) - counts
        parts = [
            start + generator.permutation(count)[: min(num, count)]
            for start, count, num in zip(starts.tolist(), counts, numbers.tolist(), strict=True)
        ]
        return np.sort(np.concatenate(parts))
