"""The SQLite file of a journal: its connection, settings and format version."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path

FORMAT = 1
# Of new files. Rows of a few hundred bytes fill such pages to 99 %, and pages of half the size to 96 %.
_PAGE = 16384
# Primary codes of errors that say nothing of the content of the file.
_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EIO,
    sqlite3.SQLITE_IOERR: errno.EIO,
}


def primary_code(error: sqlite3.Error) -> int:
    """The code of an error without its details; 0 if it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def errno_of(error: sqlite3.Error) -> int:
    """The errno for an error of SQLite."""
    return _ERRNO.get(primary_code(error), errno.EIO)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise an OSError for an error of the disk or the system, which is not damage of the file."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = primary_code(error)
        # A file that ends too early is damaged.
        if code not in _ERRNO or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHORT_READ:
            raise
        remedy = {
            sqlite3.SQLITE_FULL: "free some space",
            sqlite3.SQLITE_BUSY: "wait until no other process uses it",
        }.get(code, "check its disk, the free space and the permissions of its folder")
        raise OSError(
            errno_of(error),
            f"{path} cannot be read or written ({error}), which is not damage: {remedy}, then open it again without"
            " repair=True",
        ) from error


def connect(path: Path, readonly: bool) -> sqlite3.Connection:
    """Open the file of a journal; text is returned as bytes."""
    try:
        if readonly:
            connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
        else:
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise OSError(errno.EIO, f"cannot open {path} ({error}); is its folder there and writable?") from error
    connection.text_factory = bytes
    return connection


def check_format(connection: sqlite3.Connection, path: Path, readonly: bool) -> None:
    """Configure a journal; create the table of a new one."""
    run = connection.execute
    ((version,),) = run("PRAGMA user_version")
    tables = [name for (name,) in run("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if version > FORMAT:
        raise ValueError(f"{path} has format {version}, this release reads up to {FORMAT}; upgrade metaleader")
    if (version == 0 and (tables or readonly)) or (version > 0 and tables != [b"journal"]):
        raise ValueError(f"{path} is not a journal of metaleader; choose another folder")
    if readonly:
        return
    # The first two are fixed when the file is created.
    for setting in (f"page_size = {_PAGE}", "auto_vacuum = FULL", "journal_mode = WAL", "synchronous = FULL"):
        run(f"PRAGMA {setting}").fetchall()
    run("PRAGMA secure_delete = ON").fetchall()
    if version == 0:
        run("BEGIN IMMEDIATE")
        run("CREATE TABLE journal (id INTEGER PRIMARY KEY, bytes BLOB)")
        run(f"PRAGMA user_version = {FORMAT}")
        run("COMMIT")


def truncate_log(connection: sqlite3.Connection, path: Path) -> None:
    """Move the write-ahead log into the file, so that no old page remains in it."""
    busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise OSError(errno.EBUSY, f"{path} is being read by another process; try again when it has finished")
