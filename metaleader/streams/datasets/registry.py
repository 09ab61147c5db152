"""The data sets: their location on this machine, their verification and their download.

A data set is a subfolder of the data folder. A file is verified if it has the SHA-256 of the published file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from metaleader.system.download import DataFile, Progress, download, file_sha256, megabytes
from metaleader.system.machine import cache_folder

Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class DataSet:
    """A data set.

    Attributes:
        files: the published files; empty if there is no download.
        alternative: the name of a single file that can replace `files`.
        offline: the stream to use if the data is missing.
        sha256: the checksum of the file `alternative`, if known; a file with another checksum is read but not verified.
        pattern: a glob pattern of files that can also replace `files`.
        source: instructions for getting a data set that has no download.
    """

    files: tuple[DataFile, ...]
    alternative: str | None
    offline: str
    sha256: str | None = None
    pattern: str | None = None
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
        alternative=None,
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
        alternative="cifar100.npz",
        offline="rainbow-digits",
    ),
    "pascal3d": DataSet(
        files=(),
        alternative="pascal3d_cad.npz",
        offline="pose with its built-in objects (no --data, or objects='builtin')",
        sha256="5426b2230b58467d59506e775436a5b28ea4b9c0ce76543bd19ed222f920bee6",
        pattern="**/*.off",
        source="put the folder CAD of the PASCAL3D+ release (https://cvgl.stanford.edu/projects/pascal3d.html) there",
    ),
}


@dataclass(frozen=True)
class Status:
    """The state of a data set on this machine.

    Attributes:
        folder: the folder of the data set.
        state: "verified", "present" (without a matching checksum), "missing" or "damaged".
        detail: a description of the files.
    """

    folder: Path
    state: Literal["verified", "present", "missing", "damaged"]
    detail: str


def data_folder(data: Folder = None) -> Path:
    """Return the folder with the data sets: `data`, METALEADER_DATA, or a folder in the cache, in this order."""
    chosen = data or os.environ.get("METALEADER_DATA")
    return Path(chosen).expanduser() if chosen else cache_folder() / "data"


def find(name: str, data: Folder = None) -> list[Path]:
    """Return the files of a data set, after verifying the published ones.

    Raises:
        FileNotFoundError: if files are missing; the message says how to get them, and which stream needs none.
        ValueError: if a file is not the published one.
    """
    data_set, folder = _data_set(name), data_folder(data) / name
    present = [(folder / file.name).is_file() for file in data_set.files]
    if present and all(present):
        for file in data_set.files:
            problem = file.problem(folder / file.name)
            if problem:
                raise ValueError(f"{folder / file.name} {problem}; remove it and run `metaleader data fetch {name}`")
        return [folder / file.name for file in data_set.files]
    alternatives = _alternatives(data_set, folder)
    if alternatives:
        return alternatives
    raise FileNotFoundError(
        f"{name} is not in {folder} (missing: {_missing(data_set, present)});"
        f" {how_to_get(name)}, name the data folder with --data or METALEADER_DATA,"
        f" or use {data_set.offline}, which needs no data"
    )


def how_to_get(name: str) -> str:
    """Return instructions for getting a data set, as a clause that begins with a verb."""
    data_set = _data_set(name)
    return f"run `metaleader data fetch {name}`" if data_set.files else data_set.source


def status(name: str, data: Folder = None) -> Status:
    """Return the folder and the state of a data set."""
    data_set, folder = _data_set(name), data_folder(data) / name
    present = [(folder / file.name).is_file() for file in data_set.files]
    for file, exists in zip(data_set.files, present, strict=True):
        problem = file.problem(folder / file.name) if exists else None
        if problem:
            return Status(folder, "damaged", f"{file.name} {problem}")
    if present and all(present):
        total = sum(file.size for file in data_set.files)
        names = data_set.files[0].name if len(present) == 1 else f"{len(present)} files"
        return Status(folder, "verified", f"{names}, {megabytes(total)}")
    alternatives = _alternatives(data_set, folder)
    if not alternatives:
        return Status(folder, "missing", _missing(data_set, present))
    path = alternatives[0]
    if path.name != data_set.alternative:
        return Status(folder, "present", f"{len(alternatives)} {path.suffix} files, no published checksum")
    detail = f"{path.name}, {megabytes(path.stat().st_size)}"
    if data_set.sha256 is None:
        return Status(folder, "present", f"{detail}, no published checksum")
    sha256 = file_sha256(path)
    if sha256 == data_set.sha256:
        return Status(folder, "verified", detail)
    return Status(folder, "present", f"{detail}, not the known file (SHA-256 {sha256})")


def fetch(name: str, data: Folder = None, progress: Progress | None = None) -> Path:
    """Download a data set, resuming an interrupted download; verified files are kept.

    A file gets its final name only when it is complete and verified.

    Args:
        name: the name of the data set.
        data: the data folder.
        progress: called after each chunk.

    Returns:
        The folder of the data set.

    Raises:
        ValueError: if the data set is unknown or has no download.
        OSError: if a file cannot be downloaded; the message gives the reason.
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


def _alternatives(data_set: DataSet, folder: Path) -> list[Path]:
    """Return the files that replace the published ones: the file `alternative` or the matches of `pattern`."""
    if data_set.alternative is not None and (folder / data_set.alternative).is_file():
        return [folder / data_set.alternative]
    return sorted(folder.glob(data_set.pattern)) if data_set.pattern else []


def _missing(data_set: DataSet, present: list[bool]) -> str:
    names = [file.name for file, exists in zip(data_set.files, present, strict=True) if not exists]
    options = [", ".join(names), data_set.alternative, data_set.pattern and f"{Path(data_set.pattern).suffix} files"]
    return " or ".join(filter(None, options))
