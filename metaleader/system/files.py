"""Atomic file writes, and folders that survive a power failure."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

# Anything with the buffer protocol
Content = bytes | memoryview


def write_atomic(
    path: str | os.PathLike[str], *content: Content, check: Callable[[Path], object] = lambda path: None
) -> None:
    """Write a file atomically: after a kill at any moment the file has the old content or the new.

    Partial files that killed processes left behind under the same name are removed.

    Args:
        path: the file.
        content: the pieces of its new content.
        check: called with the path of the new file, complete and synced, before it replaces the old one.

    Raises:
        OSError: if the folder cannot be written or the disk is full; the old file is unchanged.
    """
    # A symbolic link is kept, and its target is written.
    path = Path(os.path.realpath(path))
    check_target(path)
    temporary = None
    try:
        _remove_stale(path)
        handle, temporary = _locked_temporary(path)
        with os.fdopen(handle, "wb") as file:
            for piece in content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            check(Path(temporary))
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        hint = "an existing file is unchanged; free some space, or choose another path"
        raise OSError(error.errno, f"cannot write {path} ({error.strerror}); {hint}") from error
    sync_folder(path.parent)


def _locked_temporary(path: Path) -> tuple[int, str]:
    """Create a temporary file beside a path; returns its handle and name. The lock shows that a process writes it."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        try:
            if _lock(handle) is not False and os.path.samestat(os.fstat(handle), os.stat(name)):
                return handle, name
        except FileNotFoundError:
            pass  # another process removed it before it was locked
        os.close(handle)


def _remove_stale(path: Path) -> None:
    """Remove temporary files of a path that no process is writing."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}\.part")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for name in [entry.name for entry in entries if pattern.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                handle = os.open(path.parent / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    if stat.S_ISREG(os.fstat(handle).st_mode) and _lock(handle):
                        os.unlink(path.parent / name)
                finally:
                    os.close(handle)


def _lock(handle: int) -> bool | None:
    """Lock a file; False if another process has locked it, None if its file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def write_drawn(path: str | os.PathLike[str], draw: Callable[[IO[bytes]], object]) -> None:
    """Write atomically the bytes that `draw` writes to a binary file object, such as a figure."""
    buffer = io.BytesIO()
    draw(buffer)
    write_atomic(path, buffer.getvalue())


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise an OSError if the folder of a path does not exist, or the path is not a regular file."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if path.exists() and not path.is_file():
        raise OSError(
            f"cannot write {path}: it is {'a folder' if path.is_dir() else 'not a regular file'}; name a file"
        )


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file for reading; a FIFO or a device, which may never end, is refused.

    Raises:
        OSError: if the file cannot be opened or is not a regular file.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = os.fstat(handle).st_mode
        if not stat.S_ISREG(kind):
            raise OSError(f"{path} is {'a folder' if stat.S_ISDIR(kind) else 'not a regular file'}; remove it")
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file."""
    with open_regular(path) as file:
        return file.read()


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, which makes a rename in it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, durably."""
    missing, path = [], folder.absolute()
    while not path.exists():
        missing.append(path)
        path = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_folder(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
