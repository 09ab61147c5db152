"""The SQLite file of a journal: its connection, settings and format version."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

FORMAT = 1
# Of new files. Rows of a few hundred bytes fill such pages to 99 %, and pages of half the size to 96 %.
_PAGE = 16384


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
