"""Arrays in npz files, which are read in memory that is bounded by what the file holds, and run no code."""

from __future__ import annotations

import math
import sys
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from metaleader.system.files import open_regular

_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DEFLATE_RATIO = 1032  # deflate cannot compress more


class Header(NamedTuple):
    """The form of an array in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype


def npz_headers(path: Path) -> dict[str, Header]:
    """The forms of all arrays in a file, by name.

    Raises:
        ValueError: if the file is damaged or hostile; the message does not name it.
        OSError: if it cannot be read.
    """
    with open_regular(path) as file, _Archive(file) as archive:
        return {name: archive.header(name) for name in archive.names}


def npz_arrays(path: Path, names: Collection[str], limit: int | None = None) -> dict[str, np.ndarray]:
    """Read arrays of a file.

    Args:
        path: the file.
        names: the names of the arrays.
        limit: the largest number of bytes of one array.

    Raises:
        ValueError: if the file is damaged or hostile, or lacks a name; the message does not name the file.
        OSError: if it cannot be read.
    """
    with open_regular(path) as file, _Archive(file) as archive:
        absent = [name for name in names if name not in archive.names]
        if absent:
            raise ValueError(f"it has no {', '.join(absent)}")
        return {name: archive.array(name, limit) for name in names}


class _Archive:
    """A zip file of arrays; errors of zipfile, zlib, NumPy, tokenize and ast become ValueErrors."""

    def __init__(self, file: IO[bytes]) -> None:
        try:
            self._zip = zipfile.ZipFile(file)
        except Exception as error:
            raise ValueError(_reason(error)) from error
        self._members = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}
        self.names = [name for name, info in self._members.items() if info.filename.endswith(".npy")]

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def header(self, name: str) -> Header:
        """The form of an array, whose size must be that of its member."""
        try:
            with self._open(name) as file:
                return self._header(name, file)
        except Exception as error:
            raise ValueError(f"{name}: {_reason(error)}") from error

    def array(self, name: str, limit: int | None) -> np.ndarray:
        """An array."""
        try:
            with self._open(name) as file:
                header = self._header(name, file)
                size = math.prod(header.shape) * header.dtype.itemsize
                if limit is not None and size > limit:
                    raise ValueError(f"it announces {size} bytes, more than {limit}")
            with self._open(name) as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:
            raise ValueError(f"{name}: {_reason(error)}") from error

    def _open(self, name: str) -> IO[bytes]:
        info = self._members[name]
        if info.flag_bits & 1:
            raise ValueError("it is encrypted")
        if info.compress_type not in _COMPRESSIONS:
            raise ValueError(f"its compression, number {info.compress_type}, is not that of np.savez_compressed")
        if info.file_size > _DEFLATE_RATIO * info.compress_size:
            raise ValueError(f"it announces {info.file_size} bytes, but has {info.compress_size} compressed ones")
        return self._zip.open(info)

    def _header(self, name: str, file: IO[bytes]) -> Header:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"the version {version} of the npy format is not supported")
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"it has dtype {dtype}, which is not numeric; save numbers")
        announced, size = math.prod(shape) * dtype.itemsize, self._members[name].file_size - file.tell()
        fits = all(0 <= length <= sys.maxsize for length in (*shape, math.prod(length or 1 for length in shape)))
        if not fits or announced != size:
            raise ValueError(f"its header announces {shape} of {dtype}, {announced} bytes, but it has {size}")
        return Header(shape, dtype)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0] or type(error).__name__
