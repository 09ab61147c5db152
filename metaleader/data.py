"""Data sets on this machine: where they are looked for, whether they are what they should be, and how to fetch them.

A data set is a folder of the data folder; a file counts as verified when its SHA-256 is the published file's. Fetching
writes to a `.part` file, which a later call resumes, and gives it its name only when it is whole and verified.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from metaleader.store import sync_folder

Folder = str | os.PathLike[str] | None
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


@dataclass(frozen=True)
class DataSet:
    """A data set.

    Attributes:
        files: the published files; empty where there is nothing to fetch.
        instead: the name of one file that serves in their place and has no published checksum.
        offline: the stream to use while the data is missing.
    """

    files: tuple[DataFile, ...]
    instead: str | None
    offline: str


def _mnist(name: str, size: int, sha256: str) -> DataFile:
    hosts = ("https://storage.googleapis.com/cvdf-datasets/mnist", "https://ossci-datasets.s3.amazonaws.com/mnist")
    return DataFile(name, size, sha256, tuple(f"{host}/{name}" for host in hosts))


DATA_SETS: dict[str, DataSet] = {
    "mnist": DataSet(
        files=(
            _mnist(
                "train-images-idx3-ubyte.gz",
                9912422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            _mnist(
                "train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
            ),
            _mnist(
                "t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
            ),
            _mnist(
                "t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
            ),
        ),
        instead=None,
        offline="rainbow-digits",
    ),
    "cifar100": DataSet(
        files=(
            DataFile(
                "cifar-100-python.tar.gz",
                169001437,
                "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
                (
                    "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                    "https://cave.cs.toronto.edu/kriz/cifar-100-python.tar.gz",
                ),
            ),
        ),
        instead="cifar100.npz",
        offline="rainbow-digits",
    ),
    "pascal3d": DataSet(files=(), instead="pascal3d_cad.npz", offline="pose with its built-in objects"),
}


@dataclass(frozen=True)
class Status:
    """What is known of a data set here.

    Attributes:
        folder: where it is looked for.
        state: "verified", "present" (there is no checksum to compare with), "missing", or "damaged".
        detail: which files, in words.
    """

    folder: Path
    state: Literal["verified", "present", "missing", "damaged"]
    detail: str


def data_folder(data: Folder = None) -> Path:
    """The folder with the data sets: the one given, or METALEADER_DATA, or metaleader/data in the user's cache."""
    chosen = data or os.environ.get("METALEADER_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "metaleader" / "data"


def find(name: str, data: Folder = None) -> list[Path]:
    """The files of a data set, the published ones verified.

    Raises:
        FileNotFoundError: when files are missing; says how to get them, and what works without.
        ValueError: when a file is not the published one.
    """
    data_set, folder = _data_set(name), data_folder(data) / name
    present = [(folder / file.name).is_file() for file in data_set.files]
    if present and all(present):
        for file in data_set.files:
            problem = _problem(folder / file.name, file)
            if problem:
                raise ValueError(f"{folder / file.name} {problem}; remove it and run `metaleader data fetch {name}`")
        return [folder / file.name for file in data_set.files]
    if data_set.instead is not None and (folder / data_set.instead).is_file():
        return [folder / data_set.instead]
    raise FileNotFoundError(
        f"{name} is not in {folder} (missing: {_missing(data_set, present)});"
        + (f" run `metaleader data fetch {name}`," if data_set.files else "")
        + f" name its folder with --data or METALEADER_DATA, or use {data_set.offline}, which needs no data"
    )


def status(name: str, data: Folder = None) -> Status:
    """Where a data set is looked for, and whether it is there and verified."""
    data_set, folder = _data_set(name), data_folder(data) / name
    present = [(folder / file.name).is_file() for file in data_set.files]
    for file, is_here in zip(data_set.files, present, strict=True):
        problem = _problem(folder / file.name, file) if is_here else None
        if problem:
            return Status(folder, "damaged", f"{file.name} {problem}")
    if present and all(present):
        total = sum(file.size for file in data_set.files)
        names = data_set.files[0].name if len(present) == 1 else f"{len(present)} files"
        return Status(folder, "verified", f"{names}, {megabytes(total)}")
    if data_set.instead is not None and (folder / data_set.instead).is_file():
        size = megabytes((folder / data_set.instead).stat().st_size)
        return Status(folder, "present", f"{data_set.instead}, {size}, no published checksum")
    return Status(folder, "missing", _missing(data_set, present))


def fetch(name: str, data: Folder = None, progress: Progress | None = None) -> Path:
    """Download a data set; files that are here and verified stay, a broken-off download is resumed.

    Args:
        name: of the data set.
        data: the data folder.
        progress: called after each piece that arrived.

    Returns:
        The data set's folder.

    Raises:
        ValueError: for a data set that is unknown or cannot be fetched.
        OSError: when a file cannot be had; the message says why. No file has its name before it is whole and verified.
    """
    data_set, folder = _data_set(name), data_folder(data) / name
    if not data_set.files:
        raise ValueError(f"{name} cannot be fetched: put {data_set.instead} into {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    for file in data_set.files:
        target = folder / file.name
        if not (target.is_file() and _problem(target, file) is None):
            with _locked(target.with_name(f"{file.name}.part"), target) as part:
                _fetch_file(file, part, progress or (lambda *_: None))
                os.replace(part.name, target)
                sync_folder(folder)
    return folder


def megabytes(size: int) -> str:
    """A size in words."""
    return f"{size / 1e6:.1f} MB"


def _data_set(name: str) -> DataSet:
    if name not in DATA_SETS:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(DATA_SETS)}")
    return DATA_SETS[name]


def _missing(data_set: DataSet, present: list[bool]) -> str:
    absent = [file.name for file, is_here in zip(data_set.files, present, strict=True) if not is_here]
    return ", ".join(absent) + (f"{' or ' if absent else ''}{data_set.instead}" if data_set.instead else "")


def _problem(path: Path, file: DataFile) -> str | None:
    size = path.stat().st_size
    if size != file.size:
        return f"has {size} bytes, the published file has {file.size}"
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    return None if found == file.sha256 else f"is not the published file (SHA-256 {found}, expected {file.sha256})"


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


def _fetch_file(file: DataFile, part: IO[bytes], progress: Progress) -> None:
    failures: list[str] = []
    for url in file.urls:
        resumed = part.seek(0, os.SEEK_END) > 0
        try:
            _download(url, file, part, progress)
            problem = _problem(Path(part.name), file)
            if problem and resumed:
                # The part may have been of another file: once more, all of it.
                part.truncate(0)
                _download(url, file, part, progress)
                problem = _problem(Path(part.name), file)
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


def _download(url: str, file: DataFile, part: IO[bytes], progress: Progress) -> None:
    """Bring the part file to the size of the whole, going on where a transfer breaks off."""
    failure = ""
    for attempt in range(_ATTEMPTS):
        here = part.seek(0, os.SEEK_END)
        if here > file.size:
            here = part.truncate(0)
        progress(file.name, here, file.size)
        if here == file.size:
            os.fsync(part.fileno())
            return
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
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _BrokenTransferError(f"no connection or a broken one ({error})") from error
