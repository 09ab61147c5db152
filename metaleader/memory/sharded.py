"""Rows of datapoints that are divided between processes.

Every process numbers the rows of all tasks alike, and knows which process has them. It stores the rows of the tasks in
its own shards, and those of the open round, which every process needs in order to adapt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.distributed.shards import Sharding
from metaleader.memory.rows import Index, Rows, bytes_of
from metaleader.tasks import Batch, check_alike, num_rows, rows

# The own storage is regrouped when this fraction of its rows belongs to no segment.
_MAX_HOLES = 0.25
_ELSEWHERE = -1
# Bytes sent at once by processes that save their rows
_SENT = 2**22
# Rows of the table of segments
_START, _RANK, _PLACE, _OPEN = range(4)


class ShardedRows:
    """Growing storage of datapoints, of which this process has a part.

    All processes make the same calls. `take`, `copy_of` and `state_dict` send rows that not every process has.

    Args:
        device: the device that computes.
        shards: of the learner.
        folder: a folder on the disk for the data; None stores it in the memory of the device.

    Attributes:
        length: the number of rows of all processes.
        own: the storage of this process.
        data: a datapoint of the form of those stored; None before the first.
    """

    def __init__(self, device: torch.device, shards: Sharding, folder: Path | None = None) -> None:
        self.device, self.shards, self.folder = device, shards, folder
        self.own = Rows(device, folder)
        self.data: Batch | None = None
        self.length = self._holes = 0
        self._open_task = -1
        # Of each segment of rows: the first row, the rank that has it, the first row in `own`, and whether all have it.
        self._table = np.empty((4, 8), dtype=np.int64)
        self._num = 0

    def append(self, batch: Batch, task: int, is_open: bool) -> range:
        """Add rows of a task, of the open round or not, at the end; returns their numbers."""
        if self.data is not None:
            check_alike(batch, self.data, "observe")
        else:
            self.data = tree_map(lambda leaf: leaf[:1].to(self.device, copy=True), batch)
        if is_open and task != self._open_task:
            self._close()
            self._open_task = task
        num, rank, place = num_rows(batch), self.shards.rank_of(task), _ELSEWHERE
        if is_open or rank == self.shards.group.rank:
            place = self.own.length
            self.own.append(batch)
        self._add(self.length, rank, place, int(is_open))
        self.length += num
        return range(self.length - num, self.length)

    def _add(self, start: int, rank: int, place: int, is_open: int) -> None:
        """Add a segment, or lengthen the last one."""
        if self._num:
            last, *others = self._table[:, self._num - 1].tolist()
            follows = _ELSEWHERE if others[1] == _ELSEWHERE else others[1] + start - last
            if [others[0], follows, others[2]] == [rank, place, is_open]:
                return
        if self._num == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.empty_like(self._table)], axis=1)
        self._table[:, self._num] = start, rank, place, is_open
        self._num += 1

    @property
    def _segments(self) -> np.ndarray:
        return self._table[:, : self._num]

    def _sizes(self) -> np.ndarray:
        return np.diff(self._segments[_START], append=self.length)

    def _close(self) -> None:
        """Close the round before: its rows stay with the process that has its shard."""
        segments, sizes = self._segments, self._sizes()
        for i in reversed(np.flatnonzero(segments[_OPEN]).tolist()):
            segments[_OPEN, i] = 0
            if segments[_RANK, i] == self.shards.group.rank:
                continue
            if segments[_PLACE, i] + sizes[i] == self.own.length:
                self.own.cut((int(segments[_PLACE, i]), 0))
            else:
                self._holes += int(sizes[i])
            segments[_PLACE, i] = _ELSEWHERE
        if self._holes and self._holes >= _MAX_HOLES * self.own.length:
            self._regroup()

    def _regroup(self) -> None:
        """Copy the rows in use to a new storage; batches taken from the old one stay valid."""
        segments, sizes = self._segments, self._sizes()
        kept = segments[_PLACE] != _ELSEWHERE
        places = [
            np.arange(place, place + size) for place, size in zip(segments[_PLACE, kept], sizes[kept], strict=True)
        ]
        own = self.own.copy_of(np.concatenate(places)) if places else Rows(self.device, self.folder)
        segments[_PLACE, kept] = np.cumsum(sizes[kept]) - sizes[kept]
        self.own, self._holes = own, 0

    @property
    def row_bytes(self) -> int:
        """The bytes of a datapoint; 0 before the first."""
        return 0 if self.data is None else bytes_of(self.data)

    def release(self, rows: np.ndarray) -> None:
        """Nothing: rows have numbers that all processes know, and are removed when the storage is regrouped."""

    def point(self) -> int:
        """This point, for `cut`."""
        return self.length

    def cut(self, length: int) -> None:
        """Remove the rows from `length` on, which are those added last."""
        starts = self._segments[_START]
        removed = np.maximum(starts + self._sizes() - np.maximum(starts, length), 0)
        self.own.cut((self.own.length - int(removed[self._segments[_PLACE] != _ELSEWHERE].sum()), 0))
        self._num = int(np.searchsorted(starts, length))
        self.length = length
        if length == 0:  # the next rows may have any shape
            self.data = None

    def own_index(self, index: np.ndarray) -> Tensor:
        """Row numbers as those in `own`, where they are used."""
        return self.own.own_index(self.places(index))

    def places(self, index: np.ndarray) -> np.ndarray:
        """The row numbers in `own` of rows that this process has."""
        found = self._find(index)
        assert (found[_PLACE] != _ELSEWHERE).all(), "rows of another process"
        return found[_PLACE] + index - found[_START]

    def _find(self, index: np.ndarray) -> np.ndarray:
        """The segments of rows, (4, ...)."""
        return self._segments[:, np.searchsorted(self._segments[_START], index, side="right") - 1]

    def take(self, index: Index, y: Tensor | None = None) -> Batch:
        """The rows at an index, on every process."""
        assert y is None, "n-way tasks are on every process"
        numbers = self._numbers(index)
        found = self._find(numbers)
        if found[_OPEN].all():
            return self.own.take(self.places(numbers))
        result = tree_map(lambda leaf: leaf.new_empty((len(numbers), *leaf.shape[1:])), self.data)
        self._fill(result, numbers, found[_OPEN] == 1, None)
        for rank in range(self.shards.group.size):
            self._fill(result, numbers, (found[_OPEN] == 0) & (found[_RANK] == rank), rank)
        return result

    def _fill(self, result: Batch, numbers: np.ndarray, chosen: np.ndarray, rank: int | None) -> None:
        """Fill in chosen rows, which the process with a rank sends, or which all processes have."""
        if not chosen.any():
            return
        group, at = self.shards.group, torch.from_numpy(np.flatnonzero(chosen)).to(self.device)
        if rank is None or rank == group.rank:
            part = self.own.take(self.places(numbers[chosen]))
        else:
            part = tree_map(lambda leaf: leaf.new_empty((len(at), *leaf.shape[1:])), result)
        if rank is not None:
            part = tree_map(lambda leaf: group.broadcast(leaf, rank, "the rows of a task"), part)
        tree_map(lambda leaf, rows: leaf.index_copy_(0, at, rows), result, part)

    def _numbers(self, index: Index) -> np.ndarray:
        if isinstance(index, slice):
            return np.arange(*index.indices(self.length))
        return index.cpu().numpy() if isinstance(index, Tensor) else index

    def copy_of(self, index: Index) -> ShardedRows:
        """A copy of the rows at an index, each on the processes that have it."""
        copied, numbers = ShardedRows(self.device, self.shards, self.folder), self._numbers(index)
        copied.data, copied._open_task = self.data, self._open_task
        found = self._find(numbers)
        is_own = found[_PLACE] != _ELSEWHERE
        if is_own.any():
            copied.own = self.own.copy_of(self.places(numbers[is_own]))
        places = np.where(is_own, np.cumsum(is_own) - 1, _ELSEWHERE)
        firsts = np.ones(len(numbers), dtype=bool)
        firsts[1:] = (found[:, 1:] != found[:, :-1])[[_RANK, _OPEN]].any(0)
        for start in np.flatnonzero(firsts).tolist():
            copied._add(start, int(found[_RANK, start]), int(places[start]), int(found[_OPEN, start]))
        copied.length = len(numbers)
        return copied

    def state_dict(self, data: bool, index: Index | None = None, here: bool = True) -> dict[str, Any]:
        """The rows at an index, by default all, on the processes with `here`; with `data=False` only their number.

        The processes that have the rows send them a few at a time.
        """
        numbers = self._numbers(slice(0, self.length) if index is None else index)
        state: dict[str, Any] = {"length": len(numbers)}
        if not data:
            return state
        kept, step = Rows(self.device, self.folder), max(1, _SENT // max(1, self.row_bytes))
        for start in range(0, len(numbers), step):
            some = self.take(numbers[start : start + step])
            if here:
                kept.append(some)
        found = kept.take(slice(0, kept.length)) if kept.length else None
        state["data"] = None if found is None else {"x": found.x, "y": found.y}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check a state without data, as `Rows` does."""
        checked = Rows(self.device)
        checked.length = self.length
        checked.load_state_dict({"length": state["length"]})

    def of(self, batch: Batch | None, tasks: Sequence[tuple[int, int, bool]]) -> ShardedRows:
        """The rows of a state, with number, size and openness of the task of each stretch of rows.

        Only those that this process stores are copied.
        """
        stored, start = ShardedRows(self.device, self.shards, self.folder), 0
        for task, size, is_open in tasks:
            stored.append(rows(batch, slice(start, start + size)), task, is_open)
            start += size
        return stored
