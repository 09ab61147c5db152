"""Growing storage of one tensor of datapoints, in a file on disk that is mapped into memory; see `InMemory` too.

A mapped file holds data that is larger than the memory: the system reads the pages that are used, and drops them again
when memory is short. The file has no name, so that its space is free again when the process ends, however it ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

# Rows, as a slice or as their numbers
At = slice | np.ndarray | Tensor
# Bytes copied at once
_CHUNK = 2**24


class Column(Protocol):
    """Growing storage of one tensor."""

    @property
    def values(self) -> Tensor:
        """The rows, (capacity, ...); those that were not written have any values."""
        ...

    def reserve(self, length: int, capacity: int) -> None:
        """Make room for some rows, and keep the first `length`."""
        ...

    def write(self, at: slice | np.ndarray, new: Tensor) -> None:
        """Replace rows."""
        ...

    def take(self, at: At) -> Tensor:
        """The rows at an index, on the device that computes; of a slice it may be a view."""
        ...


class OnDisk:
    """A column in a file that is mapped into memory.

    Rows are written by system calls into space that was reserved before, so that a full disk is an error of Python: a
    write to mapped memory would end the process.

    Args:
        like: a tensor of such rows.
        device: the device that the rows are moved to when they are taken.
        folder: a folder on the disk.

    Attributes:
        file: the descriptor of the file.

    Raises:
        OSError: if the folder cannot be written.
    """

    def __init__(self, like: Tensor, device: torch.device, folder: Path) -> None:
        self._device, self._folder = device, folder
        self._bytes = like.shape[1:].numel() * like.element_size()
        try:
            self.file, name = tempfile.mkstemp(dir=folder, prefix=".metaleader-")
            weakref.finalize(self, os.close, self.file)
            os.unlink(name)
        except OSError as error:
            raise _explained(error, folder) from error
        self.values = torch.empty((0, *like.shape[1:]), dtype=like.dtype)

    def reserve(self, length: int, capacity: int) -> None:
        """Make room for some rows on the disk; the rows of before stay."""
        size = max(1, capacity * self._bytes)
        try:
            os.posix_fallocate(self.file, 0, size)
            mapped = mmap.mmap(self.file, size)
        except OSError as error:
            raise _explained(error, self._folder, size) from error
        if hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_RANDOM)  # rows are drawn at random: the system need not read ahead
        shape, dtype = (capacity, *self.values.shape[1:]), self.values.dtype
        empty = torch.empty(shape, dtype=dtype) if self._bytes == 0 else None
        count = torch.Size(shape).numel()
        self.values = torch.frombuffer(mapped, dtype=dtype, count=count).view(shape) if empty is None else empty

    def write(self, at: slice | np.ndarray, new: Tensor) -> None:
        """Replace rows."""
        if self._bytes == 0:
            return
        content = new.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        if isinstance(at, slice):
            self._write(at.start, content)
            return
        ends = np.flatnonzero(np.diff(at) != 1) + 1  # of rows that follow each other
        for start, stop in zip([0, *ends.tolist()], [*ends.tolist(), len(at)], strict=True):
            self._write(int(at[start]), content[start * self._bytes : stop * self._bytes])

    def _write(self, row: int, content: memoryview) -> None:
        place = row * self._bytes
        try:
            while content:
                written = os.pwrite(self.file, content[:_CHUNK], place)
                place, content = place + written, content[written:]
        except OSError as error:
            raise _explained(error, self._folder) from error

    def take(self, at: At) -> Tensor:
        """The rows at an index; of a slice it may be a view of the file."""
        index = at if isinstance(at, slice) else torch.as_tensor(at, device="cpu")
        return self.values[index].to(self._device)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"data on the disk of {self._folder} belongs to one process, and is not copied or pickled; save the learner"
            " and load it instead"
        )


def _explained(error: OSError, folder: Path, size: int | None = None) -> OSError:
    """The error of a file in a folder, and the remedy."""
    number = error.errno or errno.EIO
    what = "" if size is None else f" {size} bytes"
    return OSError(
        number,
        f"cannot store{what} data in {folder} ({os.strerror(number)}); free some space, or choose another data_folder",
    )
