"""Data sets on this machine: where they are looked for, whether they are what they should be, and how to fetch them.

A data set is a folder of the data folder; a file counts as verified when its SHA-256 is the published file's.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from metaleader.system.download import DataFile, Progress, download, megabytes
from metaleader.system.machine import cache_folder

Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class DataSet:
    """A data set.

    Attributes:
        files: the published files; empty where there is nothing to fetch.
        instead: the name of one file that serves in their place.
        offline: the stream to use while the data is missing.
        sha256: of the file `instead`, where it is known; another one is read too, but is not called verified.
        loose: a pattern of files that serve as well, one by one.
        source: where to get what cannot be fetched, in words.
    """

    files: tuple[DataFile, ...]
    instead: str | None
    offline: str
    sha256: str | None = None
    loose: str | None = None
    source: str = ""


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
    "pascal3d": DataSet(
        files=(),
        instead="pascal3d_cad.npz",
        offline="pose with its built-in objects (no --data, or objects='builtin')",
        sha256="5426b2230b58467d59506e775436a5b28ea4b9c0ce76543bd19ed222f920bee6",
        loose="**/*.off",
        source="put the folder CAD of the PASCAL3D+ release (https://cvgl.stanford.edu/projects/pascal3d.html) there",
    ),
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
    """The folder with the data sets: the one given, or METALEADER_DATA, or the one in the project's cache."""
    chosen = data or os.environ.get("METALEADER_DATA")
    return Path(chosen).expanduser() if chosen else cache_folder() / "data"


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
            problem = file.problem(folder / file.name)
            if problem:
                raise ValueError(f"{folder / file.name} {problem}; remove it and run `metaleader data fetch {name}`")
        return [folder / file.name for file in data_set.files]
    if data_set.instead is not None and (folder / data_set.instead).is_file():
        return [folder / data_set.instead]
    loose = _loose(data_set, folder)
    if loose:
        return loose
    raise FileNotFoundError(
        f"{name} is not in {folder} (missing: {_missing(data_set, present)});"
        f" {how_to_get(name)}, name the data folder with --data or METALEADER_DATA,"
        f" or use {data_set.offline}, which needs no data"
    )


def how_to_get(name: str) -> str:
    """What to do to have a data set, in words that begin with a verb."""
    data_set = _data_set(name)
    return f"run `metaleader data fetch {name}`" if data_set.files else data_set.source


def status(name: str, data: Folder = None) -> Status:
    """Where a data set is looked for, and whether it is there and verified."""
    data_set, folder = _data_set(name), data_folder(data) / name
    present = [(folder / file.name).is_file() for file in data_set.files]
    for file, is_here in zip(data_set.files, present, strict=True):
        problem = file.problem(folder / file.name) if is_here else None
        if problem:
            return Status(folder, "damaged", f"{file.name} {problem}")
    if present and all(present):
        total = sum(file.size for file in data_set.files)
        names = data_set.files[0].name if len(present) == 1 else f"{len(present)} files"
        return Status(folder, "verified", f"{names}, {megabytes(total)}")
    if data_set.instead is not None and (folder / data_set.instead).is_file():
        return _status_instead(data_set, folder / data_set.instead)
    loose = _loose(data_set, folder)
    if loose:
        return Status(folder, "present", f"{len(loose)} {loose[0].suffix} files, no published checksum")
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
        raise ValueError(f"{name} cannot be fetched into {folder}: {data_set.source}")
    folder.mkdir(parents=True, exist_ok=True)
    for file in data_set.files:
        if not (folder / file.name).is_file() or file.problem(folder / file.name):
            download(file, folder, progress or (lambda *_: None))
    return folder


def _data_set(name: str) -> DataSet:
    if name not in DATA_SETS:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(DATA_SETS)}")
    return DATA_SETS[name]


def _status_instead(data_set: DataSet, path: Path) -> Status:
    detail = f"{path.name}, {megabytes(path.stat().st_size)}"
    if data_set.sha256 is None:
        return Status(path.parent, "present", f"{detail}, no published checksum")
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found == data_set.sha256:
        return Status(path.parent, "verified", detail)
    return Status(path.parent, "present", f"{detail}, not the known file (SHA-256 {found})")


def _loose(data_set: DataSet, folder: Path) -> list[Path]:
    return sorted(folder.glob(data_set.loose)) if data_set.loose else []


def _missing(data_set: DataSet, present: list[bool]) -> str:
    names = [file.name for file, is_here in zip(data_set.files, present, strict=True) if not is_here]
    alternatives = [", ".join(names), data_set.instead, data_set.loose and f"{Path(data_set.loose).suffix} files"]
    return " or ".join(filter(None, alternatives))
