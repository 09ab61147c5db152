"""The run folder: configuration, records and checkpoints of a run, and how a run continues after a kill.

    config.json      everything that determines the run, written first
    records.csv      one row per measured reveal; no wall-clock times, so that the same run gives the same bytes
    checkpoint/      METHOD.safetensors: the learners of a method after their last finished round
    times.csv        seconds and peak memory of each round
    .lock            locked by the process that runs

The records of a round are appended and synced first; then the checkpoint, which stores the length of the records in
bytes, is renamed into place. After a kill the records are truncated to the length in the last checkpoint, and the run
continues from there. A checkpoint does not contain observed data: the stream provides it again.
"""

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Required, Self, TypedDict, get_args, get_origin, get_type_hints

from metaleader.evaluate import Record
from metaleader.system.files import load_tree, save_tree, write_atomic

FORMAT = 1
Schedule = Literal["standard", "paper", "quick"]
COLUMNS = ("method", "seed", "protocol", "round", "task", "datapoints", "loss", "accuracy", "needed")
_TIMES = ("method", "round", "seconds", "peak_mb")
_CHECKPOINT = "metaleader-checkpoint"
_TEXT, _INTEGERS = ("method", "protocol", "task"), ("seed", "round", "datapoints", "needed", "new_datapoints")


class Config(TypedDict, total=False):
    """The values of `config.json`; a file may hold others too.

    `read_config` checks the types. Keys that are not required are needed to resume a run, not to report it.
    """

    format: Required[int]
    preset: Required[str]
    methods: Required[list[str]]
    seeds: Required[int]
    schedule: Required[Schedule]
    tasks: int
    device: str
    engine: str
    data: str | None
    tensorboard: bool
    engines: dict[str, str]
    threads: int
    settings: dict[str, Any]
    panels: list[int]
    error_name: str
    statistics: str
    hardware: Any  # one value, or one per method in a run that was joined
    versions: Any
    commit: Any


class Cost(NamedTuple):
    """The seconds that a method took, all rounds and seeds together, and the peak memory in MB if recorded."""

    seconds: float
    peak_mb: float | None


class Run:
    """A run folder, locked by this process until the end of the `with` block.

    Args:
        folder: the run folder.
        config: for a new run, the content of `config.json` without `format`. The folder is created; one that holds
            records is refused. None opens an existing run.
    """

    def __init__(self, folder: str | os.PathLike[str], config: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.records_path = self.folder / "records.csv"
        self._checkpoints = self.folder / "checkpoint"
        if config is None:
            read_config(self.folder)
        try:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "a")  # noqa: SIM115
        except OSError as error:
            raise OSError(f"cannot write the run folder {self.folder}: {error.strerror}; choose another") from error
        try:
            self._acquire()
            if config is not None:
                self._create(config)
            self.config = read_config(self.folder)
            for stray in (*self.folder.glob(".*.part"), *self._checkpoints.glob(".*.part")):
                stray.unlink()
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self.folder} is in use by another process; wait for it, or stop it first") from error

    def _create(self, config: dict[str, Any]) -> None:
        if self.records_path.exists():
            raise ValueError(
                f"{self.folder} already holds a run: continue it with `metaleader resume {self.folder}`, or choose"
                " another folder with --out"
            )
        if (self.folder / "config.json").exists():
            # A run that stopped before its first record may be replaced, another file of that name may not.
            read_config(self.folder)
        write_atomic(self.folder / "config.json", json.dumps({"format": FORMAT, **config}, indent=2).encode() + b"\n")

    def checkpoint(self, method: str) -> dict[str, Any] | None:
        """The last checkpoint of a method, with `rounds_played` and `state` as saved; None before the first."""
        return read_checkpoint(self.folder, method)

    def finished(self) -> bool:
        """Whether every method has played all its rounds."""
        return all(is_finished(self.checkpoint(method)) for method in self.config["methods"])

    def rewind(self, rounds: int, more: Iterable[str] = ()) -> None:
        """Truncate the records to the last checkpoint; without a checkpoint, to the header.

        Args:
            rounds: number of rounds of each method.
            more: additional columns of the records.
        """
        self._rounds, self._columns = rounds, (*COLUMNS, *more)
        checkpoints = self._all_checkpoints()
        length = self._check_length(checkpoints)
        if length == 0:
            # A run that was killed in its first round may have records of that round.
            if self.records_path.exists() and self._has_later_rounds():
                raise ValueError(
                    f"{self.folder} has records but no checkpoint, so it cannot be resumed and is left unchanged;"
                    " `metaleader report` and `verify` read it, a new run needs another folder"
                )
            write_atomic(self.records_path, csv_lines([self._columns]))
        else:
            os.truncate(self.records_path, length)
        played = {method: tree["rounds_played"] for method, tree in checkpoints.items()}
        self._times = [row for row in read_times(self.folder) if row["round"] < played.get(row["method"], 0)]

    def check_records(self) -> None:
        """Raise ValueError if the records are shorter than the last checkpoint states."""
        self._check_length(self._all_checkpoints())

    def _all_checkpoints(self) -> dict[str, dict[str, Any]]:
        trees = {method: self.checkpoint(method) for method in self.config["methods"]}
        return {method: tree for method, tree in trees.items() if tree is not None}

    def _check_length(self, checkpoints: dict[str, dict[str, Any]]) -> int:
        """The length of the records in bytes according to the checkpoints."""
        expected = max((tree["records_bytes"] for tree in checkpoints.values()), default=0)
        length = self.records_path.stat().st_size if self.records_path.exists() else 0
        if length < expected:
            raise ValueError(
                f"{self.records_path} was truncated: it has {length} bytes, but had {expected} when its checkpoint was"
                " written; restore it, or start a new run in another folder"
            )
        return expected

    def _has_later_rounds(self) -> bool:
        complete = self.records_path.read_bytes().rpartition(b"\n")[0].decode()
        return any(row["round"] != "0" for row in csv.DictReader(complete.splitlines()))

    def save(
        self,
        method: str,
        played: int,
        records: Iterable[Sequence[Record]],
        state: dict[str, Any],
        seconds: float,
        peak_mb: float,
    ) -> None:
        """Save a finished round; after this returns, a kill cannot lose it.

        Args:
            method: the method that played the round.
            played: number of rounds that the method has played, including this one.
            records: for each reveal of the round, one record per seed.
            state: the state of the learners, a tree as `save_tree` takes it.
            seconds: duration of the round.
            peak_mb: peak memory so far.
        """
        lines = []
        for reveal in records:
            for seed, record in enumerate(reveal):
                row = {"method": method, "seed": seed, **vars(record), **record.more}
                lines.append([row.get(name) for name in self._columns])
        try:
            with open(self.records_path, "ab") as file:
                file.write(csv_lines(lines))
                file.flush()
                os.fsync(file.fileno())
                length = file.tell()
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot write {self.records_path} ({error.strerror}); free disk space, then continue with"
                f" `metaleader resume {self.folder}`",
            ) from error
        row = (method, played - 1, round(seconds, 3), round(peak_mb, 1))
        self._times.append(dict(zip(_TIMES, row, strict=True)))
        write_times(self.folder, self._times)
        tree = {"rounds_played": played, "rounds": self._rounds, "records_bytes": length, "state": state}
        write_checkpoint(self.folder, method, tree)


def read_config(folder: str | os.PathLike[str]) -> Config:
    """Read the configuration of a run folder.

    Raises:
        FileNotFoundError: if the folder holds no run.
        ValueError: if the file is not the configuration of a run, is damaged, or was written by a newer release.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no run in {folder}: {path} is missing; name a folder that `metaleader run` wrote")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a run ({error}); use an intact copy") from error
    if not isinstance(config, dict) or "format" not in config:
        raise ValueError(f"{path} is not the configuration of a run: it has no format")
    if not isinstance(config["format"], int) or config["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {config['format']!r}, this release reads up to {FORMAT}; upgrade metaleader"
        )
    if missing := Config.__required_keys__ - config.keys():
        raise ValueError(f"{path} is damaged: it has no {', '.join(sorted(missing))}; use an intact copy")
    for name, hint in get_type_hints(Config).items():
        if name in config and not _has_type(config[name], hint):
            raise ValueError(f"{path} is damaged: its {name} is {config[name]!r}; use an intact copy")
    return config  # pyright: ignore[reportReturnType]


def _has_type(value: Any, hint: Any) -> bool:
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value in arguments
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, arguments[0]) for item in value)
    return hint is Any or isinstance(value, dict if kind is dict else hint)


def read_records(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a run folder, numbers as numbers and missing values as None.

    Raises:
        FileNotFoundError: if the folder holds no records.
        ValueError: if the file is not a table of records, or ends in the middle of a line.
    """
    path = Path(folder) / "records.csv"
    if not path.is_file():
        raise FileNotFoundError(f"no records in {folder}: {path} is missing")
    return _read_csv(path, COLUMNS, f"`metaleader resume {folder}` repairs it if the run was killed")


def read_times(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read method, round, seconds and peak_mb of each round; empty if the run has no `times.csv`."""
    path = Path(folder) / "times.csv"
    return _read_csv(path, _TIMES, "delete it: only times are lost") if path.is_file() else []


def read_costs(folder: str | os.PathLike[str]) -> dict[str, Cost]:
    """Read the total time and the peak memory of each method."""
    costs: dict[str, Cost] = {}
    for row in read_times(folder):
        seconds, peak = costs.get(row["method"], Cost(0.0, None))
        peaks = [value for value in (peak, row["peak_mb"]) if value is not None]
        costs[row["method"]] = Cost(seconds + row["seconds"], max(peaks, default=None))
    return costs


def read_checkpoint(folder: Path, method: str) -> dict[str, Any] | None:
    """Read the last checkpoint of a method; None before the first.

    Raises:
        ValueError: if the file is not a checkpoint.
    """
    path = _checkpoint_path(folder, method)
    if not path.exists():
        return None
    tree = load_tree(path, _CHECKPOINT, FORMAT)
    if not {"rounds_played", "rounds", "records_bytes", "state"} <= tree.keys():
        raise ValueError(f"{path} is not the checkpoint of a run; use an intact copy")
    return tree


def write_checkpoint(folder: Path, method: str, tree: dict[str, Any]) -> None:
    """Write a checkpoint for `read_checkpoint`, atomically."""
    save_tree(_checkpoint_path(folder, method), tree, _CHECKPOINT, FORMAT)


def is_finished(checkpoint: dict[str, Any] | None) -> bool:
    """Whether a method with this checkpoint has played all its rounds."""
    return checkpoint is not None and checkpoint["rounds_played"] == checkpoint["rounds"]


def write_times(folder: Path, times: Iterable[dict[str, Any]]) -> None:
    """Write times for `read_times`, atomically."""
    write_atomic(folder / "times.csv", csv_lines([_TIMES, *(row.values() for row in times)]))


def _checkpoint_path(folder: Path, method: str) -> Path:
    if Path(method).name != method:
        raise ValueError(f"{folder} has a method named {method!r}; a name of a method is also a file name")
    return folder / "checkpoint" / f"{method}.safetensors"


def _read_csv(path: Path, columns: Sequence[str], hint: str) -> list[dict[str, Any]]:
    try:
        text = path.read_bytes().decode()
        names, *lines = csv.reader(io.StringIO(text, newline="")) if text else ([],)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a table ({error})") from error
    if not set(columns) <= set(names):
        raise ValueError(f"{path} is not a table with the columns {', '.join(columns)}: its columns are {names}")
    if not text.endswith("\n"):
        raise ValueError(f"{path} ends in the middle of a line; {hint}")
    rows = []
    for number, line in enumerate(lines, 2):
        try:
            rows.append({name: _value(name, field) for name, field in zip(names, line, strict=True)})
        except ValueError as error:
            raise ValueError(f"row {number} of {path} is damaged ({error}); {hint}") from error
    return rows


def _value(name: str, text: str) -> Any:
    if name in _TEXT:
        return text
    if text == "":
        return None
    return int(text) if name in _INTEGERS else float(text)


def csv_lines(lines: Iterable[Iterable[Any]]) -> bytes:
    """Encode the lines of a table; None becomes an empty field."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
