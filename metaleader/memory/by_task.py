"""Memory by task: everything observed so far, and meta-batches drawn from it (the paper's buffer and nu^t)."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metaleader.distributed.shards import Shard, Sharding
from metaleader.memory.entries import Entries, index_of
from metaleader.memory.limits import Limits
from metaleader.memory.pools import choose_tasks, draw_rows, masses_of_shards
from metaleader.memory.room import droppable, within_limits
from metaleader.memory.rows import Draw, Rows, Weights, Which, checked_data
from metaleader.memory.saved import entries_from_tree, entries_tree
from metaleader.memory.sharded import ShardedRows
from metaleader.tasks import Batch, rng

# The storage is regrouped when this fraction of its rows belongs to no task.
_MAX_HOLES = 0.25


class TaskBuffer:
    """All datapoints observed so far, by task, or as many as limits allow.

    If a new task exceeds the limit of tasks, or new datapoints that of bytes, the task with the smallest weight is
    dropped; without weights, the task whose last datapoint is the oldest. The open round is never dropped.

    Args:
        device: the device that computes.
        weights: nu^t, the distribution over the tasks seen, in the order of their first datapoints; uniform if None.
        limits: of the tasks, the open one among them, and of their datapoints.
        sharding: the shards of the tasks, of which every process keeps its own; None if they are not divided.
        folder: a folder on the disk for the data; None stores it in the memory of the device.
    """

    kind = "tasks"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        weights: Weights | None = None,
        limits: Limits | None = None,
        sharding: Sharding | None = None,
        folder: Path | None = None,
    ) -> None:
        self.device, self.folder = torch.device(device), folder
        self.weights, self.limits = weights, Limits() if limits is None else limits
        self._is_limited = self.limits != Limits(seed=self.limits.seed)
        self._sharding = Sharding(1) if sharding is None else sharding
        self.store = self._new_store()
        self._entries = Entries()

    def _new_store(self) -> Rows | ShardedRows:
        is_divided = self._sharding.group.size > 1
        return ShardedRows(self.device, self._sharding, self.folder) if is_divided else Rows(self.device, self.folder)

    # One round: begin, append, draw.

    def begin(self, name: str, classes: Sequence[int] | None = None, num_classes: int | None = None) -> None:
        """Open a new task, which enters the buffer with its first datapoint, and drop tasks that exceed the bound."""
        if classes is not None:
            raise ValueError(f"task {name!r} has classes, earlier tasks have none; use a new learner")
        num = 0 if self.limits.max_tasks is None else len(self) + 1 - self.limits.max_tasks
        dropped = list(itertools.islice(droppable(self._entries, self.weights), num)) if num > 0 else []
        self._entries.begin(name)
        for entry in dropped:
            self._entries.drop(entry)
        if dropped:
            self._regroup()

    def append(self, batch: Batch, ids: Sequence[int] | Tensor | None = None, task: str | None = None) -> None:
        """Store datapoints of the open task, or of the task with a name, whether or not it is new."""
        if ids is not None:
            raise ValueError("observe: ids belong to n-way tasks; open the task with begin(name, classes=[...])")
        entries = self._entries
        if task is not None:
            self._check_name(task)
        elif entries.round is None and entries.open is None:
            raise ValueError("observe before begin: call begin(name) to open a task first, or pass task=name")
        kept = None
        if self._is_limited:
            entry, kept, batch = within_limits(entries, self.weights, self.limits, batch, task)
        else:
            entry = entries.target(task)
        number = entries.seen if entry is None else entry.number
        stores = kept is None or len(kept.stored) > 0
        added = self.store.append(batch, number, task is None) if stores else range(0)
        entries.add(entry, task, added, kept)

    def current(self) -> Batch | None:
        """D_t: all datapoints of the open task, None before the first."""
        return None if self._entries.round is None else self.store.take(index_of([self._entries.round]))

    def current_classes(self) -> None:
        """None: the tasks have no classes."""

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
        """Draw meta-batches for some steps, with tasks drawn with replacement from nu^t; see `Memory.draw`."""
        width = support + query
        uniforms = self._uniforms(seed, steps, tasks, width, shard)
        drawn = draw_rows(self._entries, self.weights, uniforms, support, query, which, without, shard)
        if drawn is None:
            return None
        index = self.store.own_index(drawn.reshape(len(steps), tasks, width))
        return Draw(index[..., :support], index[..., support:])

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
        """The names of the tasks that `draw` draws, step by step, for support and query of this width.

        None stands for the open round.
        """
        uniforms = self._uniforms(seed, steps, tasks, width, shard)[:, 0]
        chosen = choose_tasks(self._entries, self.weights, uniforms, which, without, shard)
        return [None if entry is self._entries.round else entry.name for entry in chosen]

    def shard_masses(self, total: int, which: Which, without: Collection[str]) -> np.ndarray | None:
        """The weight of the tasks of each of `total` shards under nu^t; None if all draw from the open round."""
        return None if which == "current" else masses_of_shards(self._entries, self.weights, total, which, without)

    def _uniforms(self, seed: int, steps: Sequence[int], tasks: int, width: int, shard: Shard | None) -> np.ndarray:
        """Uniform numbers, (steps x tasks, 1 + 2 width): of the task, and of its datapoints."""
        shape, key = (tasks, 1 + 2 * width), () if shard is None else (shard.number,)
        return np.concatenate([rng("draw", seed, step, *key).random(shape) for step in steps])

    def gather(self, draw: Draw) -> tuple[Batch, Batch]:
        """The support and query batches of a draw, each (..., tasks, datapoints, ...)."""
        return self.store.own.take(draw.support), self.store.own.take(draw.query)

    def mark(self) -> tuple[Any, ...]:
        """Make all changes so far permanent, and return this point for `rollback`."""
        for freed in self._entries.mark():
            self.store.release(freed)
        self._regroup()
        return self.point()

    def point(self) -> tuple[Any, ...]:
        """This point for `rollback`, within the changes since the latest mark."""
        return self.store, self.store.point(), self._entries, self._entries.point()

    def rollback(self, mark: tuple[Any, ...]) -> None:
        """Undo all changes since a point."""
        store, start, entries, point = mark
        entries.rollback(point)
        store.cut(start)
        self.store, self._entries = store, entries

    # Tasks by name.

    def _check_name(self, name: str) -> None:
        """Reject a name that the limits or the shards do not allow."""
        entries = self._entries
        if self.limits.max_tasks == 1 and (entries.round is not None or entries.open is not None):
            raise ValueError("max_tasks=1 keeps the open round alone: do not use begin together with observe(task=)")
        if len({entry.number % self._sharding.count for entry in entries.closed(name)}) > 1:
            raise ValueError(
                f"task {name!r} has rounds in several shards, and data under a name belongs to one; with"
                f" shards={self._sharding.count}, use either begin or observe(task=) for all data of a name"
            )

    def size(self, name: str) -> int:
        """The number of datapoints of a name; 0 if it has none."""
        return sum(entry.count for entry in self._entries.by_name.get(name, ()))

    def number(self, name: str) -> int:
        """The number of tasks seen before the first one of a name; for a name without data, the number seen so far."""
        return min((entry.number for entry in self._entries.by_name.get(name, ())), default=self.seen)

    def sizes(self) -> dict[str, int]:
        """The number of datapoints by name, over all rounds of a name."""
        return {name: sum(entry.count for entry in entries) for name, entries in self._entries.by_name.items()}

    def named(self, name: str) -> Batch | None:
        """All datapoints of the tasks with a name, round by round; None for an open task without data.

        Raises:
            ValueError: for a name without data.
        """
        entries = self._entries.named(name)
        if entries:
            return self.store.take(index_of(entries))
        if name == self._entries.open:
            return None
        raise self._unknown(name)

    def of_names(self, names: Sequence[str]) -> tuple[Batch, np.ndarray]:
        """All datapoints of some names, one name after the other, and the number of each; all names have data."""
        entries = [self._entries.named(name) for name in names]
        for name, found in zip(names, entries, strict=True):
            if not found:
                raise self._unknown(name)
        index = np.concatenate([entry.rows() for found in entries for entry in found])
        sizes = [sum(entry.count for entry in found) for found in entries]
        return self.store.take(index), np.array(sizes, dtype=np.int64)

    def latest(self, num: int) -> Batch | None:
        """The last datapoints, task by task."""
        index: list[np.ndarray] = []
        for entry in reversed(self._entries.all()):
            if num <= 0:
                break
            index.insert(0, entry.rows()[-num:])
            num -= entry.count
        return self.store.take(np.concatenate(index)) if index else None

    @property
    def aside(self) -> dict[str, str]:
        """The names that are not drawn, with the reason; see `set_aside`."""
        return dict(self._entries.aside)

    def set_aside(self, name: str, reason: str) -> None:
        """Keep the data of a name, and draw it no more; an open round of that name is drawn until it closes."""
        if name not in self._entries.by_name:
            raise self._unknown(name)
        self._entries.set_aside(name, reason)

    def readmit(self, name: str) -> None:
        """Draw a name again that was set aside."""
        if name not in self._entries.aside:
            raise ValueError(f"task {reprlib.repr(name)} is not set aside; {len(self._entries.aside)} tasks are")
        self._entries.readmit(name)

    def forget(self, name: str) -> None:
        """Delete all data of a name; an open round of that name stays open, without data. `scrub` overwrites it."""
        if name not in self._entries.by_name:
            raise self._unknown(name)
        self._entries.forget(name)
        self._regroup()

    def scrub(self) -> None:
        """Make all changes so far permanent, and overwrite the rows that belong to no task."""
        self.mark()
        if isinstance(self.store, ShardedRows):
            self._regroup(always=True)
        else:
            self.store.scrub()

    def _unknown(self, name: str) -> ValueError:
        dropped = self.seen - len(self) - self._entries.removed
        set_limits = [f"{n}={v}" for n in ("max_tasks", "max_bytes") if (v := getattr(self.limits, n)) is not None]
        note = f"; {dropped} tasks were dropped by {' or '.join(set_limits)}" if dropped else ""
        return self._entries.unknown(name, note)

    # Counts.

    def __len__(self) -> int:
        """The number of tasks kept, each with at least one datapoint."""
        return len(self._entries)

    @property
    def seen(self) -> int:
        """The number of tasks so far."""
        return self._entries.seen

    @property
    def num_datapoints(self) -> int:
        """The number of datapoints kept."""
        return self._entries.total

    @property
    def num_bytes(self) -> int:
        """The bytes of the datapoints kept; of all processes together."""
        return self._entries.total * self.store.row_bytes

    @property
    def num_new(self) -> int:
        """The size of D_t."""
        return 0 if self._entries.round is None else self._entries.round.count

    @property
    def names(self) -> list[str]:
        """The names of the tasks kept."""
        return [entry.name for entry in self._entries.all()]

    @property
    def numbers(self) -> list[int]:
        """The number of tasks seen before each task kept."""
        return [entry.number for entry in self._entries.all()]

    def counts(self) -> np.ndarray:
        """The number of datapoints of each task."""
        return np.array([entry.count for entry in self._entries.all()], dtype=np.int64)

    # State.

    def state_dict(self, data: bool = True, here: bool = True) -> dict[str, Any]:
        """Everything stored, task by task; data that is divided between processes is collected on those with `here`."""
        tree = {"kind": self.kind} | entries_tree(self._entries)
        return tree | self.store.state_dict(data, index_of(self._entries.all()), here)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; if it has no data, the stored data must be that of the state."""
        entries, store = entries_from_tree(state, self._entries), self.store
        if "data" in state:
            if isinstance(self.store, ShardedRows):
                tasks = [(entry.number, entry.count, entry is entries.round) for entry in entries.all()]
                store = self.store.of(checked_data(state), tasks)
            else:
                store = Rows(self.device, self.folder)
                store.load_state_dict(state)
        self.store, self._entries = store, entries

    def _regroup(self, always: bool = False) -> None:
        """Copy the rows in use to a new storage if many are not; batches taken from the old one stay valid.

        A file on the disk keeps its rows, which are used again.
        """
        before, holes = self._entries, self.store.length - self._entries.total
        reuses = isinstance(self.store, Rows) and self.folder is not None and before.total > 0
        if not holes or reuses or not (always or holes >= _MAX_HOLES * self.store.length):
            return
        kept = before.all()
        store, entries = self.store.copy_of(index_of(kept)) if kept else self._new_store(), before.compacted()
        self.store, self._entries = store, entries  # one statement: an interrupt comes before or after it
