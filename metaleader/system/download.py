"""Download of a published file, with resume and verification.

The data goes to a `.part` file, which a later call resumes; the file gets its final name when it is complete and
verified. The `.part` file is removed if its checksum is wrong or the disk is full.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from metaleader.system.files import sync_folder

# Called with the name of a file, the number of bytes so far, and the total.
Progress = Callable[[str, int, int], None]

_CHUNK = 1 << 18
_ATTEMPTS = 5
_PAUSE = 1.0
_TIMEOUT = 30.0


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
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def download(file: DataFile, folder: Path, progress: Progress) -> None:
    """Download a file into a folder, resuming an interrupted download.

    Raises:
        OSError: if no address provides the file; the message gives the reason for each.
    """
    target = folder / file.name
    with _locked(target.with_name(f"{file.name}.part"), target) as part:
        _fetch(file, part, progress)
        os.replace(part.name, target)
        sync_folder(folder)


def megabytes(size: int) -> str:
    """Format a size in bytes as megabytes."""
    return f"{size / 1e6:.1f} MB"


@contextlib.contextmanager
def _locked(part: Path, target: Path) -> Iterator[IO[bytes]]:
    """Open and lock the part file; on an error, remove it if a later call cannot resume it."""
    # Unbuffered: on a full disk, closing a buffered file would fail again.
    with part.open("a+b", buffering=0) as opened:
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


def _fetch(file: DataFile, part: IO[bytes], progress: Progress) -> None:
    failures: list[str] = []
    for url in file.urls:
        resumed = part.seek(0, os.SEEK_END) > 0
        try:
            _complete(url, file, part, progress)
            problem = file.problem(Path(part.name))
            if problem and resumed:
                # The resumed part may belong to another file: start again from the beginning.
                part.truncate(0)
                _complete(url, file, part, progress)
                problem = file.problem(Path(part.name))
            if not problem:
                return
            part.truncate(0)
            failures.append(f"{url}: the download {problem}, and was removed")
        except _NetworkError as error:
            failures.append(f"{url}: {error}")
    kept = part.seek(0, os.SEEK_END)
    raise OSError(
        f"could not fetch {file.name}: "
        + "; ".join(failures)
        + (f". {megabytes(kept)} of {megabytes(file.size)} are kept: run the command again to resume" if kept else "")
    )


class _NetworkError(Exception):
    """The server or the connection failed."""


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
            for start, chunk in _chunks(url, size):
                if start != size:
                    part.truncate(start)
                _write(part, chunk)
                size = start + len(chunk)
                progress(file.name, min(size, file.size), file.size)
                if size > file.size:
                    part.truncate(0)
                    raise _NetworkError(f"the server sends more than the {file.size} bytes of the published file")
            failure = f"the transfer was interrupted at {size} of {file.size} bytes"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                part.truncate(0)
            raise _NetworkError(str(error)) from error
        except _BrokenTransferError as error:
            failure = str(error)
    raise _NetworkError(f"{failure}, after {_ATTEMPTS} attempts")


def _write(part: IO[bytes], chunk: bytes) -> None:
    while chunk:
        chunk = chunk[part.write(chunk) :]


class _BrokenTransferError(Exception):
    """A failure after which another attempt may succeed."""


def _chunks(url: str, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield chunks of a file with their offsets, starting at `offset`, or at 0 if the server cannot resume."""
    request = urllib.request.Request(url, headers={"User-Agent": "metaleader", "Range": f"bytes={offset}-"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            position = offset if response.status == http.HTTPStatus.PARTIAL_CONTENT else 0
            while chunk := response.read(_CHUNK):
                yield position, chunk
                position += len(chunk)
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenTransferError(f"the connection failed ({error})") from error
