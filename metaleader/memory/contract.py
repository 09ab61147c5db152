"""The contract of a learner's memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from metaleader.distributed.shards import Shard
from metaleader.memory.rows import Draw, Rows, Which
from metaleader.memory.sharded import ShardedRows
from metaleader.tasks import Batch


class Memory(Protocol):
    """All data observed, as a learner sees it: `TaskBuffer`, or `ClassBuffer` for n-way tasks.

    Attributes:
        kind: names the form of `state_dict`.
    """

    kind: str

    @property
    def store(self) -> Rows | ShardedRows:
        """The datapoints."""
        ...

    def begin(self, name: str, classes: Sequence[int] | None = None, num_classes: int | None = None) -> None:
        """Open a new task; D_t is empty."""
        ...

    def append(self, batch: Batch, ids: Sequence[int] | Tensor | None = None, task: str | None = None) -> None:
        """Store datapoints of the open task, or of the task with a name."""
        ...

    def current(self) -> Batch | None:
        """D_t, or None before its first datapoint."""
        ...

    def current_classes(self) -> Tensor | None:
        """The global class behind each label of the open task; None without classes."""
        ...

    def named(self, name: str) -> Batch | None:
        """All datapoints observed under a name."""
        ...

    def of_names(self, names: Sequence[str]) -> tuple[Batch, np.ndarray]:
        """All datapoints of some names, one name after the other, and the number of each."""
        ...

    def sizes(self) -> dict[str, int]:
        """The number of datapoints by name."""
        ...

    def forget(self, name: str) -> None:
        """Delete all data of a name; `scrub` overwrites it."""
        ...

    def latest(self, num: int) -> Batch | None:
        """A few of the latest datapoints, with valid labels."""
        ...

    def scrub(self) -> None:
        """Make all changes so far permanent, and overwrite data that is no longer kept."""
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes of the datapoints kept."""
        ...

    @property
    def num_new(self) -> int:
        """The number of datapoints of D_t that no earlier task had."""
        ...

    def draw(
        self,
        seed: int,
        steps: Sequence[int],
        tasks: int,
        support: int,
        query: int,
        which: Which = "all",
        without: Collection[str] = (),
        shard: Shard | None = None,
    ) -> Draw | None:
        """Draw meta-batches for some steps; a draw depends on (seed, step, shard) and the memory alone.

        Args:
            seed: of the learner.
            steps: the numbers of the meta-updates to draw for.
            tasks: the number of tasks per step.
            support: datapoints in a task's support set; may be 0.
            query: datapoints in a task's query set.
            which: all tasks, those other than the open round, or the open round only.
            without: names to leave out, as if they were set aside.
            shard: draw from the tasks of a shard only, if this memory divides its tasks.

        Returns:
            Row numbers on the memory's device, or None if there is nothing to draw from.
        """
        ...

    def names_drawn(
        self,
        seed: int,
        steps: Sequence[int],
        tasks: int,
        width: int,
        which: Which,
        without: Collection[str],
        shard: Shard | None = None,
    ) -> list[str | None]:
        """The names of the tasks that `draw` draws; None stands for the open round."""
        ...

    def shard_masses(self, total: int, which: Which, without: Collection[str]) -> np.ndarray | None:
        """The weight of the tasks of each of `total` shards under nu^t; None if each shard draws from all data."""
        ...

    @property
    def aside(self) -> dict[str, str]:
        """The names that are not drawn, with the reason."""
        ...

    def set_aside(self, name: str, reason: str) -> None:
        """Keep the data of a name, and draw it no more."""
        ...

    def readmit(self, name: str) -> None:
        """Draw a name again that was set aside."""
        ...

    def gather(self, draw: Draw) -> tuple[Batch, Batch]:
        """The support and query batches of a draw, each (..., tasks, datapoints, ...)."""
        ...

    def mark(self) -> tuple[Any, ...]:
        """Make all changes so far permanent; returns a point for `rollback`."""
        ...

    def point(self) -> tuple[Any, ...]:
        """A point for `rollback`, within the changes since the latest mark."""
        ...

    def rollback(self, mark: tuple[Any, ...]) -> None:
        """Undo all changes since a point."""
        ...

    def state_dict(self, data: bool = True, here: bool = True) -> dict[str, Any]:
        """Everything stored; with `data=False` only the bookkeeping, and with `here=False` no data on this process."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        ...
