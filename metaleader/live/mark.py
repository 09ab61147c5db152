"""The file `journal.mark`: the number and the checksum of the last record of a journal, stated outside SQLite."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from pathlib import Path

from metaleader.system.files import write_atomic

MARK = "journal.mark"
# The size of a checksum, and the checksum before the first record.
CHECK = 8
START = bytes(CHECK)
# A number, the checksum of that record, and a checksum of both.
_FORM = struct.Struct("<Q8s8s")


class Mark:
    """The mark of a folder.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / MARK
        self._file: int | None = None

    def create(self) -> None:
        """Write a mark that accepts a journal at whatever record it ends."""
        write_atomic(self.path, _packed(0, START))

    def open(self) -> None:
        """Open the file for writing."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def check(self) -> None:
        """Raise an OSError if the open file was deleted, and the journal probably with it.

        The system would write on without an error, and discard the files when they are closed.
        """
        assert self._file is not None
        if os.fstat(self._file).st_nlink == 0:
            raise OSError(
                errno.ENOENT, f"{self.path} was deleted while it was in use; restore the folder from a backup"
            )

    def read(self) -> tuple[int, bytes] | None:
        """The number and the checksum; None if the file is damaged."""
        stored = self.path.read_bytes()
        if len(stored) != _FORM.size:
            return None
        number, checksum, _ = _FORM.unpack(stored)
        return (number, checksum) if stored == _packed(number, checksum) else None

    def write(self, number: int, checksum: bytes) -> None:
        """Write a number and a checksum, which the system may keep in memory for a while."""
        assert self._file is not None
        os.pwrite(self._file, _packed(number, checksum), 0)

    def sync(self) -> None:
        """Flush the file to disk."""
        assert self._file is not None
        os.fsync(self._file)


def checksum_of(before: bytes, number: int, content: bytes) -> bytes:
    """The checksum of a record, which covers the one before."""
    return hashlib.blake2b(before + number.to_bytes(8, "little") + content, digest_size=CHECK).digest()


def _packed(number: int, checksum: bytes) -> bytes:
    return _FORM.pack(number, checksum, checksum_of(checksum, number, b"mark"))
