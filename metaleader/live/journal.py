"""A durable sequence of records in a SQLite file that detects every record that is damaged or missing.

A record is a string of bytes with a number, from 1. Its checksum covers the record and the checksum before it. After a
kill, SQLite recovers its write-ahead log, but it takes a damaged frame in that log for the end: all later commits
disappear, and `PRAGMA integrity_check` reports no error. The file `journal.mark` therefore states, outside SQLite, the
number and the checksum of the last record written.

Records are stored in pieces of at most 500 bytes, because SQLite starts a new page for a row that does not fit the rest
of the current one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from metaleader.live.mark import CHECK, START, Mark, checksum_of
from metaleader.live.sqlite import check_format, connect, disk_errors, errno_of, primary_code, truncate_log
from metaleader.system.files import sync_folder

NAME = "journal.sqlite"
_PIECE = 500
# Piece p of record n is the row n * 2**24 + p.
_PIECES = 24
_LARGE_GAP = 1_000_000
REMEDY = "restore a backup, or open it with repair=True, which keeps all that is intact"


class Record(NamedTuple):
    """A record as it was read.

    Attributes:
        number: its number.
        content: its bytes, or None if it is damaged or missing.
    """

    number: int
    content: bytes | None


class Journal:
    """The journal of a folder. Its methods may be called from several threads.

    Args:
        folder: the folder, which exists. A journal is created in it if there is none.
        first: the number of the first record of a new journal.
        repair: accept a journal that ends before the last record written.
        readonly: only read; another process may write at the same time.

    Attributes:
        first: the number of the first record.
        last: the number of the last record; `first - 1` if there is none.

    Raises:
        ValueError: if the file is not a journal, is of a newer format, or ends before the last record written.
        OSError: if the disk is full or fails, which is not damage; also with `repair`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, first: int = 1, repair: bool = False, readonly: bool = False
    ) -> None:
        self.path, self._mark = Path(folder) / NAME, Mark(Path(folder))
        self._lock, self._start = threading.Lock(), first
        self._failure: str | None = None
        # The mark exists before the journal, so that a journal without a mark has lost it.
        if not readonly and not self.path.exists() and not self._mark.path.exists():
            self._mark.create()
        self._connection = connect(self.path, readonly)
        try:
            if not readonly:
                self._mark.open()
                sync_folder(self.path.parent)
            self._open(repair, readonly)
        except BaseException:
            self.close()
            raise

    def _open(self, repair: bool, readonly: bool) -> None:
        # Another process may write between the two: the mark is read first.
        mark = self._mark.read()
        if mark is None and not repair:
            raise ValueError(f"{self._mark.path} is damaged, so that a loss of records could not be seen; {REMEDY}")
        marked, checksum = (0, START) if mark is None else mark
        try:
            with disk_errors(self.path):
                check_format(self._connection, self.path, readonly)
                self.first, self.last = self._ends(repair)
                self._chain = self._checksum(self.last) or START
                at_mark = self._checksum(marked)
        except sqlite3.DatabaseError as error:
            if not repair:
                raise ValueError(f"{self.path} is damaged ({error}); {REMEDY}") from error
            self.first, self.last, self._chain, at_mark = 1, marked, START, None
        if repair:
            self.last = max(self.last, marked)
        elif self.last < marked:
            raise ValueError(
                f"{self.path} is damaged: it ends at record {self.last}, but record {marked} was written; {REMEDY}"
            )
        elif marked >= self.first and at_mark != checksum:
            raise ValueError(f"{self.path} is damaged: record {marked} is not the one that was written; {REMEDY}")

    def _ends(self, repair: bool) -> tuple[int, int]:
        """The numbers of the first and the last record."""
        if not repair:
            first, last = self._connection.execute("SELECT min(id), max(id) FROM journal").fetchone()
            return (self._start, self._start - 1) if first is None else (first >> _PIECES, last >> _PIECES)
        # Damage may change the number of a row. The records are the longest run without a large gap.
        numbers: list[int] = []
        # If the rest is unreadable, the mark states the last record.
        with contextlib.suppress(sqlite3.DatabaseError), disk_errors(self.path):
            numbers += (n for (n,) in self._connection.execute("SELECT DISTINCT id >> ? FROM journal", (_PIECES,)))
        numbers = sorted(n for n in numbers if n > 0)
        gaps = [i for i in range(1, len(numbers)) if numbers[i] - numbers[i - 1] > _LARGE_GAP]
        runs = [numbers[start:stop] for start, stop in zip([0, *gaps], [*gaps, len(numbers)], strict=True)]
        run = max(runs, key=len)
        return (run[0], run[-1]) if run else (1, 0)

    def refresh(self) -> None:
        """Read the numbers of the first and the last record again; another process may have written.

        Raises:
            ValueError: if the journal is damaged.
        """
        self._open(repair=False, readonly=True)

    def append(self, contents: Iterable[bytes]) -> int:
        """Write records in one transaction; they are on disk when this returns.

        Returns:
            The number of the last record.

        Raises:
            OSError: if the disk is full or fails. If it is full, none of the records is written.
        """
        with self._lock:
            return self._write(contents, replace=False)

    def replace(self, contents: Iterable[bytes]) -> int:
        """Write records in one transaction and delete all earlier ones, whose bytes are overwritten; numbers continue.

        Returns:
            The number of the last record.
        """
        with self._lock:
            before = self.last
            last = self._write(contents, replace=True)
            self.first = before + 1
            truncate_log(self._connection, self.path)
            return last

    def read(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Read the records from a number on, as pairs of number and content.

        Raises:
            ValueError: at the first record that is damaged or missing.
        """
        for number, content in self._scan(start, salvage=False):
            if content is None:
                raise ValueError(f"{self.path} is damaged: record {number} of {self.last} is not intact; {REMEDY}")
            yield number, content

    def salvage(self, start: int = 0) -> Iterator[Record]:
        """Read the records from a number on, also past damaged and missing ones."""
        return self._scan(start, salvage=True)

    def get(self, number: int) -> bytes:
        """Read one record.

        Raises:
            ValueError: if it is damaged or missing.
        """
        with self._lock:
            return next(self.read(number))[1]

    def sync(self) -> None:
        """Write the mark and flush it to disk; without it, a power failure may leave an older mark."""
        with self._lock:
            self._mark.write(self.last, self._chain)
        self._mark.sync()

    def backup(self, path: str | os.PathLike[str]) -> int:
        """Write a copy into a folder while the journal is in use; returns the number of its last record."""
        source, target = connect(self.path, readonly=True), sqlite3.connect(Path(path) / NAME)
        try:
            source.backup(target)
        except sqlite3.Error as error:
            raise OSError(
                errno_of(error), f"cannot write the backup {path} ({error}); free some space if the disk is full"
            ) from error
        finally:
            target.close()
            source.close()
        with open(Path(path) / NAME, "rb") as file:
            os.fsync(file.fileno())
        Mark(Path(path)).create()
        copy = Journal(path)
        try:
            copy.sync()
            return copy.last
        finally:
            copy.close()

    @property
    def bytes(self) -> int:
        """The size on disk, write-ahead log included."""
        files = [self.path, self.path.with_name(f"{NAME}-wal")]
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Close the files."""
        self._connection.close()
        self._mark.close()

    # Writing.

    def _write(self, contents: Iterable[bytes], replace: bool) -> int:
        if self._failure is not None:
            raise OSError(
                errno.EIO, f"{self.path} could not be written before ({self._failure}); close it and open it again"
            )
        self._mark.check()
        number, chain = self.last, START if replace else self._chain

        def rows() -> Iterator[tuple[int, bytes]]:
            nonlocal number, chain
            for content in contents:
                number += 1
                chain = checksum_of(chain, number, content)
                data = chain + content
                for piece, start in enumerate(range(0, len(data), _PIECE)):
                    yield (number << _PIECES) + piece, data[start : start + _PIECE]

        run = self._connection.execute
        try:
            run("BEGIN IMMEDIATE")
            if replace:
                run("DELETE FROM journal")
            self._connection.executemany("INSERT INTO journal VALUES (?, ?)", rows())
            run("COMMIT")
            self.last, self._chain = number, chain
            self._mark.write(number, chain)
        except BaseException as error:
            self._roll_back(error, primary_code(error) if isinstance(error, sqlite3.Error) else None)
            if not isinstance(error, sqlite3.Error):
                raise
            raise OSError(
                errno_of(error), f"cannot write {self.path} ({error}); free some space if the disk is full"
            ) from error
        return number

    def _roll_back(self, error: BaseException, code: int | None) -> None:
        """Undo a transaction. Where that is not certain, refuse to write until the journal is opened again."""
        certain = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)
        try:
            if self._connection.in_transaction:
                # An error of the caller's own, before the commit.
                certain = certain or code is None
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            certain = False
        if not certain:
            self._failure = str(error) or type(error).__name__

    # Reading.

    def _scan(self, start: int, salvage: bool) -> Iterator[Record]:
        number, last = max(start, self.first), self.last
        before = [START if number == self.first else self._checksum(number - 1)]
        for found, data in self._stored(number, last, salvage):
            if found < number:  # a row with a damaged number
                continue
            while number < found:
                yield Record(number, None)
                number, before = number + 1, []
            stored, content = _parsed(data)
            checks = [checksum_of(one, number, content) for one in before if one is not None and content is not None]
            intact = stored in checks
            yield Record(number, content if intact else None)
            # After a damaged record, the checksum stored in it may be intact, or its content.
            number, before = number + 1, [stored] if intact else [stored, *checks]
        while number <= last:
            yield Record(number, None)
            number += 1

    def _stored(self, start: int, stop: int, salvage: bool) -> Iterator[tuple[int, bytes]]:
        """The stored bytes of the records from `start` to `stop`, up to the first unreadable one or without those."""
        number = start
        try:
            with disk_errors(self.path):
                for number, data in self._query(start, stop):
                    yield number, data
                    number += 1
        except sqlite3.DatabaseError:
            # SQLite cannot read on: try each of the rest.
            for single in range(number, stop + 1) if salvage else ():
                with contextlib.suppress(sqlite3.DatabaseError), disk_errors(self.path):
                    yield from self._query(single, single)

    def _query(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        rows = self._connection.execute(
            "SELECT id >> ?, bytes FROM journal WHERE id >= ? AND id < ? ORDER BY id",
            (_PIECES, start << _PIECES, (stop + 1) << _PIECES),
        )
        for number, pieces in groupby(rows, lambda row: row[0]):
            # A flipped bit may change the type of a value.
            yield number, b"".join(piece for _, piece in pieces if isinstance(piece, bytes))

    def _checksum(self, number: int) -> bytes | None:
        """The checksum stored in a record."""
        row = self._connection.execute("SELECT bytes FROM journal WHERE id = ?", (number << _PIECES,)).fetchone()
        return _parsed(row[0])[0] if row is not None and isinstance(row[0], bytes) else None


def _parsed(data: bytes) -> tuple[bytes | None, bytes | None]:
    """The checksum and the content of a stored record; None for those that cannot be read."""
    return (data[:CHECK], data[CHECK:]) if len(data) >= CHECK else (None, None)
