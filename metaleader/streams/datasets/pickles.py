"""Pickles of byte arrays, read without running code: CIFAR-100's official files are such pickles.

Every name in a pickle is a function that it may call. Here the three names that rebuild a numpy array give stand-ins of
ours, and every other name is refused.
"""

from __future__ import annotations

import pickle
import struct
from typing import IO, Any, ClassVar

import numpy as np

# What makes objects in other ways than the files do, or reserves memory before it reads.
_REFUSED = (
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
    pickle.PERSID,
    pickle.BINPERSID,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.INST,
    pickle.OBJ,
    pickle.NEWOBJ,
    pickle.NEWOBJ_EX,
)


def load_pickle(file: IO[bytes], size: int, where: str) -> Any:
    """Load a pickle of plain values and byte arrays; a name of anything else is refused before anything is called.

    Args:
        file: open at the beginning.
        size: of the file, in bytes.
        where: what messages name.

    Raises:
        ValueError: for a pickle that names anything else, or that is damaged.
    """
    try:
        return _ArrayUnpickler(_Bounded(file, size), encoding="bytes").load()
    except _RefusedError as error:
        raise ValueError(f"{where} is hostile or damaged: {error}; use the official file") from None
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise ValueError(f"{where} is damaged ({error!r}); use an intact copy") from error


class _RefusedError(Exception):
    """A pickle asked for what no data file needs."""


class _Bounded:
    """A file of which no more is asked for than there is: a length in a damaged pickle reserves no memory."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size = file, size
        self.readline = file.readline

    def read(self, size: int) -> bytes:
        """Read so many bytes."""
        if size > self.size:
            raise EOFError(f"{size} bytes are asked for, the file has {self.size}")
        return self.file.read(size)


class _ArrayUnpickler(pickle._Unpickler):
    """An unpickler that knows three names of numpy's, and stand-ins for them.

    It is the one written in Python: the other one's memory grows with the numbers in a file, not with the file.
    """

    dispatch: ClassVar = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code not in {operation[0] for operation in _REFUSED}
    }

    def find_class(self, module: str, name: str) -> Any:
        """Give a stand-in of ours, never numpy's own object."""
        stand_in = {"_reconstruct": _ByteArray, "ndarray": "ndarray", "dtype": _DataType}.get(name)
        if stand_in is None or module not in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray"):
            raise _RefusedError(f"it names {module}.{name}")
        return stand_in


class _DataType:
    """Stands in for numpy's dtype in a pickle."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Nothing in the state matters to bytes."""


class _ByteArray:
    """Stands in for an array in a pickle: made empty, then filled."""

    __slots__ = ("array",)

    def __init__(self, *_: Any) -> None:
        self.array = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        """Fill the array from (version, shape, dtype, column order, bytes)."""
        _, shape, dtype, column_order, content = state
        if not isinstance(dtype, _DataType) or dtype.code not in ("u1", b"u1") or column_order:
            raise _RefusedError("an array in it is not of bytes, row by row")
        self.array = np.frombuffer(content, np.uint8).reshape(shape)
