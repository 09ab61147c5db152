"""The books: a run folder with its configuration, records and checkpoints, and how a run goes on after any kill.

    config.json      everything that determines the run, written first
    records.csv      a row for each measured reveal; no wall-clock times, so that the same run gives the same bytes
    checkpoint/      METHOD.safetensors: the learners of a method after their last finished round
    times.csv        seconds and peak memory of each round
    .lock            locked by the process that runs

A round's records are appended and synced first; then the checkpoint that holds their byte length is renamed into place.
Whatever a kill leaves, the records are cut back to the length in the last checkpoint, and the run goes on from there.
Observed data is not in a checkpoint: the stream gives it again.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from metaleader.evaluate import Record
from metaleader.system.files import load_tree, save_tree, write_atomic

FORMAT = 1
COLUMNS = ("method", "seed", "protocol", "round", "task", "datapoints", "loss", "accuracy", "needed")
_TIMES = ("method", "round", "seconds", "peak_mb")
_CHECKPOINT = "metaleader-checkpoint"
_TEXT, _INTEGERS = ("method", "protocol", "task"), ("seed", "round", "datapoints", "needed", "new_datapoints")


class Run:
    """A run folder, locked by this process from here to the end of the `with` block.

    Args:
        folder: of the run.
        config: plain values, `methods` among them, for a new run: the folder is made, and refused where it already
            holds records. None opens the run that is there.
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
                f"{self.folder} already holds a run: go on with `metaleader resume {self.folder}`, or choose another"
                " folder with --out"
            )
        if (self.folder / "config.json").exists():
            # A run that stopped before its first record may be replaced, a file of the user's own may not.
            read_config(self.folder)
        write_atomic(self.folder / "config.json", json.dumps({"format": FORMAT, **config}, indent=2).encode() + b"\n")

    def checkpoint(self, method: str) -> dict[str, Any] | None:
        """The last checkpoint of a method, None before its first: `rounds_played` and `state`, as `save` got them."""
        return read_checkpoint(self.folder, method)

    def finished(self) -> bool:
        """Whether every method has played all its rounds."""
        return all(is_finished(self.checkpoint(method)) for method in self.config["methods"])

    def rewind(self, rounds: int, more: Iterable[str] = ()) -> None:
        """Make the records those of the last checkpoint; for a run without one, the head of the table alone.

        Args:
            rounds: how many each method plays.
            more: columns of the records beyond those of every run.
        """
        self._rounds, self._columns = rounds, (*COLUMNS, *more)
        found = self._found()
        length = self._records_length(found)
        if length == 0:
            # A run that was killed in its first round may have records of that round.
            if self.records_path.exists() and self._has_later_rounds():
                raise ValueError(
                    f"{self.folder} has records but no checkpoint, so it cannot be resumed and is left as it is;"
                    " `metaleader report` and `verify` read it, a new run needs another folder"
                )
            write_atomic(self.records_path, csv_lines([self._columns]))
        else:
            os.truncate(self.records_path, length)
        played = {method: tree["rounds_played"] for method, tree in found.items()}
        self._times = [row for row in read_times(self.folder) if row["round"] < played.get(row["method"], 0)]

    def check_records(self) -> None:
        """Refuse records that are shorter than by the last checkpoint."""
        self._records_length(self._found())

    def _found(self) -> dict[str, dict[str, Any]]:
        trees = {method: self.checkpoint(method) for method in self.config["methods"]}
        return {method: tree for method, tree in trees.items() if tree is not None}

    def _records_length(self, found: dict[str, dict[str, Any]]) -> int:
        length = max((tree["records_bytes"] for tree in found.values()), default=0)
        here = self.records_path.stat().st_size if self.records_path.exists() else 0
        if here < length:
            raise ValueError(
                f"{self.records_path} was cut: it has {here} bytes, and {length} when its checkpoint was written;"
                " restore it, or start the run anew in another folder"
            )
        return length

    def _has_later_rounds(self) -> bool:
        whole = self.records_path.read_bytes().rpartition(b"\n")[0].decode()
        return any(row["round"] != "0" for row in csv.DictReader(whole.splitlines()))

    def save(
        self,
        method: str,
        played: int,
        records: Iterable[Sequence[Record]],
        state: dict[str, Any],
        seconds: float,
        peak_mb: float,
    ) -> None:
        """Keep a finished round; once this returns, no kill can lose it.

        Args:
            method: whose round it is.
            played: rounds of the method, with this one.
            records: of the round's reveals, one for each seed.
            state: what the method needs to go on: a tree as `save_tree` takes it.
            seconds: that the round took.
            peak_mb: the largest memory so far.
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
                f"cannot write {self.records_path} ({error.strerror}); make room, then go on with"
                f" `metaleader resume {self.folder}`",
            ) from error
        row = (method, played - 1, round(seconds, 3), round(peak_mb, 1))
        self._times.append(dict(zip(_TIMES, row, strict=True)))
        write_times(self.folder, self._times)
        tree = {"rounds_played": played, "rounds": self._rounds, "records_bytes": length, "state": state}
        write_checkpoint(self.folder, method, tree)


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration of a run folder.

    Raises:
        FileNotFoundError: when the folder holds no run.
        ValueError: for a file that is not a run's configuration, or of a newer release.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no run in {folder}: {path} is missing")
    try:
        config = json.loads(path.read_bytes())
        found, methods = config["format"], config["methods"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a run ({error!r}); use an intact copy") from error
    if not isinstance(found, int) or found > FORMAT:
        raise ValueError(f"{path} has format {found!r}, this release reads up to {FORMAT}; upgrade metaleader")
    if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
        raise ValueError(f"{path} is not the configuration of a run: its methods are {methods!r}")
    return config


def read_records(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a run folder, numbers as numbers and None where a value is missing.

    Raises:
        FileNotFoundError: when the folder holds no records.
        ValueError: for a file that is not one of records, or is cut in the middle of a line.
    """
    path = Path(folder) / "records.csv"
    if not path.is_file():
        raise FileNotFoundError(f"no records in {folder}: {path} is missing")
    return _read_csv(path, COLUMNS, f"`metaleader resume {folder}` mends it if the run was killed, and else says so")


def read_times(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Seconds and peak memory (MB) of each round of each method: method, round, seconds, peak_mb."""
    path = Path(folder) / "times.csv"
    return _read_csv(path, _TIMES, "remove it: only times are lost") if path.is_file() else []


def read_checkpoint(folder: Path, method: str) -> dict[str, Any] | None:
    """The last checkpoint of a method, None before its first.

    Raises:
        ValueError: for a file that is not a checkpoint.
    """
    path = _checkpoint_path(folder, method)
    if not path.exists():
        return None
    tree = load_tree(path, _CHECKPOINT, FORMAT)
    if not {"rounds_played", "rounds", "records_bytes", "state"} <= tree.keys():
        raise ValueError(f"{path} is not the checkpoint of a run; use an intact copy")
    return tree


def write_checkpoint(folder: Path, method: str, tree: dict[str, Any]) -> None:
    """Write what `read_checkpoint` reads, atomically."""
    save_tree(_checkpoint_path(folder, method), tree, _CHECKPOINT, FORMAT)


def is_finished(checkpoint: dict[str, Any] | None) -> bool:
    """Whether a method with this checkpoint has played all its rounds."""
    return checkpoint is not None and checkpoint["rounds_played"] == checkpoint["rounds"]


def write_times(folder: Path, times: Iterable[dict[str, Any]]) -> None:
    """Write what `read_times` reads, atomically."""
    write_atomic(folder / "times.csv", csv_lines([_TIMES, *(row.values() for row in times)]))


def _checkpoint_path(folder: Path, method: str) -> Path:
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
        raise ValueError(f"{path} is cut in the middle of its last line; {hint}")
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
    """Lines of a table as bytes; None is an empty field."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
