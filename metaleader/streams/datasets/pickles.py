"""A restricted reader for pickles of byte arrays, such as CIFAR-100's official files.

A pickle may call any function that it names. This reader resolves the three names that rebuild a NumPy array to local
substitutes, and refuses all other names.
"""

from __future__ import annotations

import pickle
import struct
from typing import IO, Any, ClassVar

import numpy as np

# Opcodes that create objects by other means than the official files do, or allocate memory before reading.
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
    """Load a pickle of plain values and byte arrays; other names are refused before anything is called.

    Args:
        file: the pickle, open at the beginning.
        size: the size of the file in bytes.
        where: the name of the file in error messages.

    Raises:
        ValueError: if the pickle names anything else, or is damaged.
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
    """A pickle uses an operation that no official file uses."""


class _Bounded:
    """A file that refuses reads longer than itself, so that a damaged length allocates no memory."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size = file, size
        self.readline = file.readline

    def read(self, size: int) -> bytes:
        """Read `size` bytes."""
        if size > self.size:
            raise EOFError(f"the pickle requests {size} bytes, the file has {self.size}")
        return self.file.read(size)


class _ArrayUnpickler(pickle._Unpickler):
    """An unpickler that resolves three names of NumPy to substitutes.

    It derives from the pure-Python unpickler: the C unpickler may allocate memory for a memo index in the file, however
    small the file is.
    """

    dispatch: ClassVar = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code not in {operation[0] for operation in _REFUSED}
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a substitute, never NumPy's object."""
        substitute = {"_reconstruct": _ByteArray, "ndarray": "ndarray", "dtype": _DataType}.get(name)
        if substitute is None or module not in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray"):
            raise _RefusedError(f"it names {module}.{name}")
        return substitute


class _DataType:
    """The substitute for NumPy's dtype."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Ignore the state, which does not affect bytes."""


class _ByteArray:
    """The substitute for a NumPy array, created empty and then filled."""

    __slots__ = ("array",)

    def __init__(self, *_: Any) -> None:
        self.array = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        """Fill the array from (version, shape, dtype, column order, bytes)."""
        _, shape, dtype, column_order, content = state
        if not isinstance(dtype, _DataType) or dtype.code not in ("u1", b"u1") or column_order:
            raise _RefusedError("it has an array that is not of unsigned bytes in C order")
        self.array = np.frombuffer(content, np.uint8).reshape(shape)
