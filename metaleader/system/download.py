"""Download of a published file, with resume and verification.

The data goes to a `.part` file, which a later call resumes; the file gets its final name when it is complete and
verified. The `.part` file is removed if its checksum is wrong or the disk is full.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from metaleader.system.files import open_regular, sync_folder
from metaleader.system.http import BrokenTransferError, NetworkError, RangeError, chunks

# Called with the name of a file, the number of bytes so far, and the total.
Progress = Callable[[str, int, int], None]

_ATTEMPTS = 5
_PAUSE = 1.0


@dataclass(frozen=True)
class DataFile:
    """A published file.

    Attributes:
        name: the file name in the data set's folder.
        size: the size in bytes.
        sha256: the checksum in hexadecimal digits.
        urls: the addresses, tried in this order.
    """

    name: str
    size: int
    sha256: str
    urls: tuple[str, ...]

    def problem(self, path: Path) -> str | None:
        """Describe how a local file differs from the published one; None if they are the same."""
        size = path.stat().st_size
        if size != self.size:
            return f"has {size} bytes, the published file has {self.size}"
        sha256 = file_sha256(path)
        if sha256 != self.sha256:
            return f"is not the published file (SHA-256 {sha256}, expected {self.sha256})"
        return None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open_regular(path) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def download(file: DataFile, folder: Path, progress: Progress) -> None:
    """Download a file into a folder, resuming an interrupted download.

    Raises:
        OSError: if no address provides the file; the message gives the reason for each.
    """
    target = folder / file.name
    part = target.with_name(f"{file.name}.part")
    with _locked(part, target) as opened:
        _fetch(file, part, opened, progress)
        os.replace(part, target)
        sync_folder(folder)


def megabytes(size: int) -> str:
    """Format a size in bytes as megabytes."""
    return f"{size / 1e6:.1f} MB"


@contextlib.contextmanager
def _locked(part: Path, target: Path) -> Iterator[IO[bytes]]:
    """Open and lock the part file; on an error, remove it if a later call cannot resume it."""
    # Unbuffered: on a full disk, closing a buffered file would fail again.
    with os.fdopen(_open_part(part), "a+b", buffering=0) as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(f"another process is fetching {target}; wait for it") from error
        # Between open and lock, another process may have renamed or removed the file.
        if not part.exists() or not os.path.samestat(os.fstat(opened.fileno()), part.stat()):
            raise OSError(f"another process has just fetched {target}; run the command again")
        try:
            yield opened
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                part.unlink(missing_ok=True)
                raise OSError(
                    error.errno, f"no space left for {target.name} in {target.parent}; the partial file was removed"
                ) from error
            if part.exists() and part.stat().st_size == 0:
                part.unlink()
            raise


def _open_part(part: Path) -> int:
    """Open a file for appending; links, FIFOs and devices, which somebody else may have put there, are refused."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(part, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise OSError(f"{part} is not a regular file; remove it") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{part} is not a regular file; remove it")
    return handle


def _fetch(file: DataFile, path: Path, part: IO[bytes], progress: Progress) -> None:
    failures: list[str] = []
    for url in file.urls:
        resumed = part.seek(0, os.SEEK_END) > 0
        try:
            _complete(url, file, part, progress)
            problem = file.problem(path)
            if problem and resumed:
                # The resumed part may belong to another file: start again from the beginning.
                part.truncate(0)
                _complete(url, file, part, progress)
                problem = file.problem(path)
            if not problem:
                return
            part.truncate(0)
            failures.append(f"{url}: the download {problem}, and was removed")
        except NetworkError as error:
            failures.append(f"{url}: {error}")
    kept = part.seek(0, os.SEEK_END)
    raise OSError(
        f"could not fetch {file.name}: "
        + "; ".join(failures)
        + (f". {megabytes(kept)} of {megabytes(file.size)} are kept: run the command again to resume" if kept else "")
    )


def _complete(url: str, file: DataFile, part: IO[bytes], progress: Progress) -> None:
    """Download the rest of the part file, resuming interrupted transfers."""
    failure = ""
    for attempt in range(_ATTEMPTS + 1):
        size = part.seek(0, os.SEEK_END)
        if size > file.size:
            size = part.truncate(0)
        progress(file.name, size, file.size)
        if size == file.size:
            os.fsync(part.fileno())
            return
        if attempt == _ATTEMPTS:
            break
        if attempt:
            time.sleep(_PAUSE)
        try:
            for start, chunk in chunks(url, size, file.size):
                if start != size:
                    part.truncate(start)
                _write(part, chunk)
                size = start + len(chunk)
                progress(file.name, min(size, file.size), file.size)
                if size > file.size:
                    part.truncate(0)
                    raise NetworkError(f"the server sends more than the {file.size} bytes of the published file")
            failure = f"the transfer was interrupted at {size} of {file.size} bytes"
        except RangeError:
            part.truncate(0)
            raise
        except BrokenTransferError as error:
            failure = str(error)
    raise NetworkError(f"{failure}, after {_ATTEMPTS} attempts")


def _write(part: IO[bytes], chunk: bytes) -> None:
    while chunk:
        chunk = chunk[part.write(chunk) :]
