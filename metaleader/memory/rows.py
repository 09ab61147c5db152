"""Rows of datapoints: growing storage, and draws as row numbers.

The rows of all tasks lie one after the other in one tensor, images as uint8 if they arrived so. A draw is a set of row
numbers, made on the CPU from (seed, step) for a whole reveal at once and moved to the device once, so that every device
sees the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.memory.columns import At, Column, OnDisk
from metaleader.memory.fields import integer, mapping
from metaleader.tasks import Batch, check_alike, check_batch, num_rows, rows, shapes, tensors_of

# nu^t: the weights of tasks 0 .. t-1, given t
Weights = Callable[[int], np.ndarray]
Which = Literal["all", "past", "current"]
# Row numbers; those of a draw have a step and a task dimension
Index = slice | np.ndarray | Tensor
# Bytes copied, and rows overwritten, at once
_COPIED, _SCRUBBED = 2**22, 2**16


def recency(half_life: float) -> Weights:
    """Weights that halve with every `half_life` tasks of age.

    >>> recency(1.0)(3)
    array([0.25, 0.5 , 1.  ])
    """
    return Recency(half_life)


@dataclass(frozen=True)
class Recency:
    """The weights of `recency`; a dataclass, so that the configuration of a run has the half-life."""

    half_life: float

    def __post_init__(self) -> None:
        if isinstance(self.half_life, bool) or not self.half_life > 0:
            raise ValueError(f"half_life must be positive, got {self.half_life}")

    def __call__(self, num_tasks: int) -> np.ndarray:
        """The weights of tasks 0 .. num_tasks-1."""
        return 0.5 ** (np.arange(num_tasks - 1, -1, -1) / self.half_life)


class Draw(NamedTuple):
    """Meta-batches as row numbers: a leading step dimension, then tasks, then datapoints.

    Attributes:
        support: (steps, tasks, support) row numbers.
        query: (steps, tasks, query) row numbers.
        support_y: the same shape as `support`: labels that replace the stored ones (n-way), or None.
        query_y: likewise for `query`.
        classes: (steps, tasks, n) the global class behind each label of a task (n-way), or None.
    """

    support: Tensor
    query: Tensor
    support_y: Tensor | None = None
    query_y: Tensor | None = None
    classes: Tensor | None = None

    def with_support(self, sizes: np.ndarray, groups: int = 1) -> Draw:
        """A draw whose support sets consist of their first datapoints, repeated in turn.

        Args:
            sizes: (steps, tasks) the number of different datapoints of each support set.
            groups: the number of groups, one after the other, of which a support set has as many datapoints each.
        """
        if (sizes % groups).any():
            raise ValueError(
                f"support must be a multiple of the {groups} classes of a task, got {sizes[sizes % groups > 0].min()}"
            )
        width = self.support.shape[-1] // groups
        columns = np.arange(width) % (sizes // groups)[..., None]
        columns = columns[..., None, :] + width * np.arange(groups)[:, None]
        index = torch.from_numpy(columns.reshape(*sizes.shape, -1)).to(self.support.device)
        y = self.support_y
        support_y = None if y is None else y.take_along_dim(index.to(y.device), -1)
        return self._replace(support=self.support.take_along_dim(index, -1), support_y=support_y)

    def to(self, device: torch.device | str) -> Draw:
        """A copy of the draw on a device."""
        return Draw(*(None if index is None else index.to(device) for index in self))  # pyright: ignore[reportArgumentType]

    def at(self, step: int | slice) -> Draw:
        """The draw of one step, or of a slice of steps."""
        return Draw(*(None if index is None else index[step] for index in self))  # pyright: ignore[reportArgumentType]


class InMemory:
    """A column in the memory of a device.

    Args:
        like: a tensor of such rows.
        device: the device.
    """

    def __init__(self, like: Tensor, device: torch.device) -> None:
        self.values = torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=device)

    def reserve(self, length: int, capacity: int) -> None:
        """Make room for some rows, and keep the first `length`."""
        larger = torch.empty((capacity, *self.values.shape[1:]), dtype=self.values.dtype, device=self.values.device)
        larger[:length].copy_(self.values[:length])
        self.values = larger

    def write(self, at: slice | np.ndarray, new: Tensor) -> None:
        """Replace rows."""
        self.values[self._index(at)] = new.to(self.values.device)

    def take(self, at: At) -> Tensor:
        """The rows at an index; of a slice it is a view."""
        return self.values[self._index(at)]

    def _index(self, at: At) -> slice | Tensor:
        return at if isinstance(at, slice) else torch.as_tensor(at, device=self.values.device)


class Rows:
    """Growing storage of datapoints: one column per tensor, rows in the order of arrival.

    Rows that were released are used again, the latest first.

    Args:
        device: the device that computes.
        folder: a folder on the disk for the data; None stores it in the memory of the device.

    Attributes:
        length: the number of rows, used or released.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self.device, self.folder = device, folder
        self.length = 0
        self._columns: Any = None
        self._capacity = 0
        # A stack of released rows; the first ones are known to be overwritten by zeros.
        self._released = np.empty(0, dtype=np.int64)
        self._num_released = self._num_clean = 0

    @property
    def own(self) -> Rows:
        """The storage of this process, which is all of it; see `ShardedRows`."""
        return self

    @property
    def data(self) -> Batch | None:
        """The columns, with spare capacity; None before the first row. Data on the disk is on the CPU."""
        return None if self._columns is None else _map(lambda column: column.values, self._columns)

    @property
    def index_device(self) -> torch.device:
        """The device on which row numbers are used."""
        return self.device if self.folder is None else torch.device("cpu")

    @property
    def row_bytes(self) -> int:
        """The bytes of a datapoint; 0 before the first."""
        return 0 if self._columns is None else bytes_of(self.data)

    def own_index(self, index: np.ndarray) -> Tensor:
        """Row numbers as those in `own`, where they are used."""
        return torch.from_numpy(index).to(self.index_device)

    def append(self, batch: Batch, task: int = 0, is_open: bool = False) -> range | np.ndarray:
        """Add rows of any task; returns their numbers."""
        num = num_rows(batch)
        columns, stored = self._columns, self.data
        if stored is None:
            columns = tree_map(self._column, batch)
        else:
            check_alike(batch, stored, "observe")
        reused = min(num, self._num_released)
        length = self.length + num - reused
        if length > self._capacity:
            # A quarter more than needed, which keeps appending cheap and memory close to the size of the data.
            capacity = length * 5 // 4 if self.length else length
            _map(lambda column: column.reserve(self.length, capacity), columns)
            self._columns, self._capacity = columns, capacity
        added: range | np.ndarray = range(self.length, length)
        if reused:
            top = self._released[self._num_released - reused : self._num_released]
            added = np.concatenate([top, np.arange(self.length, length)])
        at = added if isinstance(added, np.ndarray) else slice(self.length, length)
        self._num_clean = min(self._num_clean, self._num_released - reused)
        _map(lambda column, new: column.write(at, new), columns, batch)
        self.length, self._num_released = length, self._num_released - reused
        return added

    def _column(self, leaf: Tensor) -> Column:
        return InMemory(leaf, self.device) if self.folder is None else OnDisk(leaf, self.device, self.folder)

    def release(self, rows: np.ndarray) -> None:
        """Use rows again for others."""
        self._released = np.concatenate([self._released[: self._num_released], rows])
        self._num_released = len(self._released)

    def scrub(self) -> None:
        """Overwrite the released rows by zeros."""
        dirty = np.sort(self._released[self._num_clean : self._num_released])
        for start in range(0, len(dirty), _SCRUBBED):
            at = dirty[start : start + _SCRUBBED]
            for column in tree_leaves(self._columns):
                column.write(at, column.values.new_zeros(len(at), *column.values.shape[1:]))
        self._num_clean = self._num_released

    def point(self) -> tuple[int, int]:
        """This point, for `cut`; rows must not be released before that."""
        return self.length, self._num_released

    def cut(self, point: tuple[int, int]) -> None:
        """Remove the rows added since a point."""
        self.length, self._num_released = point
        if self.length == 0:  # the next rows may have any shape
            self._columns, self._capacity = None, 0

    def copy_of(self, index: Index) -> Rows:
        """A copy of the rows at an index; batches taken from this storage stay valid."""
        copied = Rows(self.device, self.folder)
        length = len(range(*index.indices(self.length))) if isinstance(index, slice) else len(index)
        if length:
            assert self._columns is not None
            copied._columns = tree_map(lambda column: copied._column(column.values), self._columns)
            tree_map(lambda column: column.reserve(0, length), copied._columns)
            copied.length = copied._capacity = length
            numbers = range(self.length)[index] if isinstance(index, slice) else _numpy(index)
            tree_map(lambda column, new: _copy(column, new, numbers), self._columns, copied._columns)
        return copied

    def take(self, index: Index, y: Tensor | None = None) -> Batch:
        """The rows at an index of a storage that is not empty, with the given targets in place of the stored ones.

        Rows of a slice may be a view, which is valid until the next change.
        """
        assert self._columns is not None
        at = torch.from_numpy(index).to(self.index_device) if isinstance(index, np.ndarray) else index
        if y is not None:
            return Batch(tree_map(lambda column: column.take(at), self._columns.x), y)
        return _map(lambda column: column.take(at), self._columns)

    def state_dict(self, data: bool, index: Index | None = None, here: bool = True) -> dict[str, Any]:
        """A copy of the rows at an index, by default all; with `data=False` only their number. See `ShardedRows`."""
        index = slice(0, self.length) if index is None else index
        length = len(range(*index.indices(self.length))) if isinstance(index, slice) else len(index)
        state: dict[str, Any] = {"length": length}
        if data:
            kept = None if self._columns is None or not here else self.copy_of(index).data
            state["data"] = None if kept is None else {"x": kept.x, "y": kept.y}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; if it has no data, the same number of rows must be present."""
        integer(state, "length")
        if "data" in state:
            batch, stored = checked_data(state), Rows(self.device, self.folder)
            if batch is not None:
                stored.append(batch)
            vars(self).update(vars(stored))
        elif state["length"] != self.length:
            raise ValueError(
                f"the state was saved without its data of {state['length']} datapoints, but {self.length} are present;"
                " observe the same data (update=False) before loading"
            )
        self.length = state["length"]


def checked_data(state: Mapping[str, Any]) -> Batch | None:
    """The datapoints of a state, checked a few at a time: they may be mapped from a file larger than the memory."""
    data, length = None if state["data"] is None else mapping(state, "data"), integer(state, "length")
    batch = None if data is None else Batch(data["x"], data["y"])
    if batch is not None and not all(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)):
        batch = check_batch(batch, "the data of the state")
    sizes = set() if batch is None else {leaf.shape[0] if leaf.ndim else None for leaf in tree_leaves(batch)}
    if sizes != ({length} if batch is not None else set()) or (batch is None and length > 0):
        raise ValueError(f"the state has no data of {length} datapoints; its shapes are {shapes(batch)}")
    if batch is not None:
        step = max(1, _COPIED // max(1, bytes_of(batch)))
        for start in range(0, max(1, length), step):
            check_batch(rows(batch, slice(start, start + step)), "the data of the state")
    return batch


def bytes_of(batch: Batch | None) -> int:
    """The bytes of a datapoint."""
    return sum(leaf.shape[1:].numel() * leaf.element_size() for leaf in tensors_of(batch))


def _map(function: Callable[..., Any], columns: Batch, *batches: Batch) -> Batch:
    """`tree_map` over columns, faster if x and y are one column each."""
    if isinstance(columns.x, InMemory | OnDisk) and isinstance(columns.y, InMemory | OnDisk):
        return Batch(function(columns.x, *(b.x for b in batches)), function(columns.y, *(b.y for b in batches)))
    return tree_map(function, columns, *batches)


def _copy(source: Column, target: Column, numbers: range | np.ndarray) -> None:
    """Copy rows to the start of another column, a few at a time."""
    step = max(1, _COPIED // max(1, bytes_of(Batch(source.values, ()))))
    for start in range(0, len(numbers), step):
        some = numbers[start : start + step]
        at = slice(some.start, some.stop) if isinstance(some, range) else some
        target.write(slice(start, start + len(some)), source.take(at))


def _numpy(index: np.ndarray | Tensor) -> np.ndarray:
    return index.cpu().numpy() if isinstance(index, Tensor) else index
