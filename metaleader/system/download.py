"""A published file: downloaded with resume, verified, and given its name only when it is whole.

What arrives goes to a `.part` file, which a later call resumes. It is removed where it is of no use: when its checksum
is wrong, or the disk is full.
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

# Called with a file's name, the bytes that are here, and the bytes of the whole.
Progress = Callable[[str, int, int], None]

_CHUNK = 1 << 18
_ATTEMPTS = 5
_PAUSE = 1.0
_TIMEOUT = 30.0


@dataclass(frozen=True)
class DataFile:
    """A published file.

    Attributes:
        name: in the data set's folder.
        size: in bytes.
        sha256: of the content, in hexadecimal digits.
        urls: where it is fetched from, tried in this order.
    """

    name: str
    size: int
    sha256: str
    urls: tuple[str, ...]

    def problem(self, path: Path) -> str | None:
        """What tells a file here from the published one, in words; None when it is the same."""
        size = path.stat().st_size
        if size != self.size:
            return f"has {size} bytes, the published file has {self.size}"
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        return None if found == self.sha256 else f"is not the published file (SHA-256 {found}, expected {self.sha256})"


def download(file: DataFile, folder: Path, progress: Progress) -> None:
    """Download a file into a folder, going on where an earlier call broke off.

    Raises:
        OSError: when it cannot be had; the message says why, from every address.
    """
    target = folder / file.name
    with _locked(target.with_name(f"{file.name}.part"), target) as part:
        _fetch(file, part, progress)
        os.replace(part.name, target)
        sync_folder(folder)


def megabytes(size: int) -> str:
    """A size in words."""
    return f"{size / 1e6:.1f} MB"


@contextlib.contextmanager
def _locked(part: Path, target: Path) -> Iterator[IO[bytes]]:
    """The part file, open for this process alone; removed when it is of no use to a later call."""
    # Unbuffered: on a full disk a buffer would fail once more when the file is closed.
    with part.open("a+b", buffering=0) as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(f"another process is fetching {target}; wait for it") from error
        # Between open and lock, another process may have finished and renamed or removed the file.
        if not part.exists() or not os.path.samestat(os.fstat(opened.fileno()), part.stat()):
            raise OSError(f"another process has just fetched {target}; look again")
        try:
            yield opened
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                part.unlink(missing_ok=True)
                raise OSError(
                    error.errno, f"no space left for {target.name} in {target.parent}; what had arrived was removed"
                ) from error
            if part.exists() and part.stat().st_size == 0:
                part.unlink()
            raise


def _fetch(file: DataFile, part: IO[bytes], progress: Progress) -> None:
    failures: list[str] = []
    for url in file.urls:
        resumed = part.seek(0, os.SEEK_END) > 0
        try:
            _bring(url, file, part, progress)
            problem = file.problem(Path(part.name))
            if problem and resumed:
                # The part may have been of another file: once more, all of it.
                part.truncate(0)
                _bring(url, file, part, progress)
                problem = file.problem(Path(part.name))
            if not problem:
                return
            part.truncate(0)
            failures.append(f"{url}: what arrived {problem}, and was removed")
        except _NetworkError as error:
            failures.append(f"{url}: {error}")
    kept = part.seek(0, os.SEEK_END)
    raise OSError(
        f"could not fetch {file.name}: "
        + "; ".join(failures)
        + (f". {megabytes(kept)} of {megabytes(file.size)} are kept: run the command again to resume" if kept else "")
    )


class _NetworkError(Exception):
    """The other side, or the way to it, failed."""


def _bring(url: str, file: DataFile, part: IO[bytes], progress: Progress) -> None:
    """Bring the part file to the size of the whole, going on where a transfer breaks off."""
    failure = ""
    for attempt in range(_ATTEMPTS + 1):
        here = part.seek(0, os.SEEK_END)
        if here > file.size:
            here = part.truncate(0)
        progress(file.name, here, file.size)
        if here == file.size:
            os.fsync(part.fileno())
            return
        if attempt == _ATTEMPTS:
            break
        if attempt:
            time.sleep(_PAUSE)
        try:
            for start, chunk in _chunks(url, here):
                if start != here:
                    part.truncate(start)
                _write(part, chunk)
                here = start + len(chunk)
                progress(file.name, min(here, file.size), file.size)
                if here > file.size:
                    part.truncate(0)
                    raise _NetworkError(f"sends more than the {file.size} bytes of the published file")
            failure = f"the transfer broke off at {here} of {file.size} bytes"
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
    """A failure that another attempt may get over."""


def _chunks(url: str, offset: int) -> Iterator[tuple[int, bytes]]:
    """The pieces of a file from an offset on, each with its own offset: 0 where the server cannot resume."""
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
        raise _BrokenTransferError(f"no connection or a broken one ({error})") from error
