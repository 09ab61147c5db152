"""Virtual shards: the parts into which the tasks of a learner are divided, whatever the number of processes.

Task t belongs to shard t mod V. Process r of W has the shards r V/W .. (r+1) V/W - 1. Nothing that a learner computes
depends on W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from metaleader.distributed.group import ALONE, Group, current_group


class Shard(NamedTuple):
    """One of several shards.

    Attributes:
        number: from 0.
        total: the number of shards.
    """

    number: int
    total: int

    def has(self, task: int) -> bool:
        """Whether the task with this number belongs to the shard."""
        return task % self.total == self.number


class Sharding:
    """The shards of a learner, and those of this process. With one shard, the processes have nothing in common.

    Args:
        count: the number of shards.
        group: the processes; by default those of the process group that is initialised.

    Attributes:
        own: the shards of this process.
    """

    def __init__(self, count: int, group: Group | None = None) -> None:
        self.count, self.group = count, ALONE if count == 1 else current_group() if group is None else group
        if count % self.group.size:
            raise ValueError(
                f"the number of processes must divide the number of shards, got {self.group.size} processes and"
                f" shards={count}; use shards={-(-count // self.group.size) * self.group.size}, or another number of"
                " processes"
            )
        width = count // self.group.size
        self.own = [Shard(number, count) for number in range(self.group.rank * width, (self.group.rank + 1) * width)]

    def rank_of(self, task: int) -> int:
        """The rank of the process that has the task with this number."""
        return task % self.count // (self.count // self.group.size)

    def shares(self, num: int) -> list[int]:
        """How many of `num` draws each shard makes: as equal as possible."""
        return [num // self.count + int(number < num % self.count) for number in range(self.count)]


def shard_weights(masses: Sequence[float] | np.ndarray) -> np.ndarray:
    """The weight of the mean over the draws of each shard, from the weight of the tasks in it under nu^t.

    A shard draws its tasks from nu^t restricted to it. With these weights, the sum over shards has the expectation
    under nu^t, whatever the number of draws of each.
    """
    total = np.asarray(masses, dtype=np.float64)
    return total / total.sum()
