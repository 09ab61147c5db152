"""A run that is being written, and how it continues after a kill.

The records of a round are appended and synced first; then the checkpoint, which stores the length of the records in
bytes, is renamed into place. After a kill the records are truncated to the length in the last checkpoint, and the run
continues from there. A checkpoint does not contain observed data: the stream provides it again.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from metaleader.evaluate import Record
from metaleader.runs.folder import (
    COLUMNS,
    FORMAT,
    TIMES,
    csv_lines,
    is_finished,
    read_checkpoint,
    read_config,
    read_times,
    write_checkpoint,
    write_times,
)
from metaleader.system.files import write_atomic


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
        self._times.append(dict(zip(TIMES, row, strict=True)))
        write_times(self.folder, self._times)
        tree = {"rounds_played": played, "rounds": self._rounds, "records_bytes": length, "state": state}
        write_checkpoint(self.folder, method, tree)
