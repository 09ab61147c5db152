"""A run that is being written, and how it continues after a kill.

The records of a round are appended and synced first; then the checkpoint, which stores the length and the digest of the
records, is renamed into place. After a kill the records are compared with the last checkpoint and truncated to its
length, and the run continues from there. A checkpoint does not contain observed data: the stream provides it again.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from metaleader.evaluate import Record
from metaleader.runs.digest import Digest, committed
from metaleader.runs.folder import (
    COLUMNS,
    FORMAT,
    TIMES,
    check_config,
    csv_lines,
    is_finished,
    read_checkpoint,
    read_checkpoints,
    read_config,
    read_times,
    write_checkpoint,
    write_times,
)
from metaleader.system.files import make_folder, write_atomic
from metaleader.system.lock import FolderLock

_log = logging.getLogger("metaleader")


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
            make_folder(self._checkpoints)
            self._lock = FolderLock(self.folder)
        except BlockingIOError as error:
            raise ValueError(f"{self.folder} is in use by another process; wait for it, or stop it first") from error
        except OSError as error:
            raise OSError(f"cannot write the run folder {self.folder}: {error.strerror}; choose another") from error
        try:
            if config is not None:
                self._create(config)
            self.config = read_config(self.folder)
            self._config_text = (self.folder / "config.json").read_text()
            for stray in (*self.folder.glob(".*.part"), *self._checkpoints.glob(".*.part")):
                stray.unlink()
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

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
        checkpoints = read_checkpoints(self.folder, self.config["methods"])
        if checkpoints:
            content = self._committed(checkpoints)
            if self._starts_with(content):
                os.truncate(self.records_path, len(content))
            else:
                copy = self._keep_copy()
                write_atomic(self.records_path, content)
                _log.warning("%s had other line ends; they are restored, %s is a copy", self.records_path, copy)
        else:
            # A run that was killed in its first round may have records of that round.
            if self.records_path.exists() and not self._has_first_round_only():
                raise ValueError(
                    f"{self.folder} has records but no checkpoint, so it cannot be resumed and is left unchanged;"
                    " `metaleader report` and `verify` read it, a new run needs another folder"
                )
            content = csv_lines([self._columns])
            write_atomic(self.records_path, content)
        self._digest = Digest(content)
        played = {method: tree["rounds_played"] for method, tree in checkpoints.items()}
        self._times = [row for row in read_times(self.folder) if row["round"] < played.get(row["method"], 0)]

    def check_records(self) -> None:
        """Raise ValueError if the records are not those that the last checkpoint states."""
        checkpoints = read_checkpoints(self.folder, self.config["methods"])
        if checkpoints:
            self._committed(checkpoints)

    def _committed(self, checkpoints: dict[str, dict[str, Any]]) -> bytes:
        """The records of the rounds in the checkpoints."""
        check_config(self.folder, checkpoints)
        finished = all(is_finished(checkpoints.get(method)) for method in self.config["methods"])
        return committed(self.records_path, checkpoints, finished)

    def _starts_with(self, content: bytes) -> bool:
        with open(self.records_path, "rb") as file:
            return file.read(len(content)) == content

    def _keep_copy(self) -> Path:
        """Copy the records to a new file beside them."""
        number = 1
        while (copy := self.folder / f"records-before-resume-{number}.csv").exists():
            number += 1
        shutil.copyfile(self.records_path, copy)
        return copy

    def _has_first_round_only(self) -> bool:
        complete = self.records_path.read_bytes().rpartition(b"\n")[0]
        try:
            rows = list(csv.DictReader(io.StringIO(complete.decode(), newline="")))
        except (UnicodeDecodeError, csv.Error):
            return False
        return all((row.get("method"), row.get("round")) == (self.config["methods"][0], "0") for row in rows)

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
            for seed, record in enumerate(reveal, self.config["first_seed"]):
                row = {"method": method, "seed": seed, **vars(record), **record.more}
                lines.append([row.get(name) for name in self._columns])
        content = csv_lines(lines)
        self._append(content)
        digest = self._digest.extended(content)
        row = (method, played - 1, round(seconds, 3), round(peak_mb, 1))
        times = [*self._times, dict(zip(TIMES, row, strict=True))]
        write_times(self.folder, times)
        tree = {"rounds_played": played, "rounds": self._rounds, "state": state}
        write_checkpoint(self.folder, method, tree | self.seal(digest))
        self._digest, self._times = digest, times

    def seal(self, digest: Digest) -> dict[str, Any]:
        """The part of a checkpoint by which later readers recognise the records and the configuration."""
        return {"config": self._config_text} | digest.tree()

    def _append(self, content: bytes) -> None:
        """Write records after those of the last checkpoint."""
        self._lock.check()
        length = self._digest.length
        try:
            with open(self.records_path, "r+b") as file:
                if file.seek(0, os.SEEK_END) < length:
                    raise ValueError(f"{self.records_path} was truncated during the run; restore it, then resume")
                # There is more if writing a round failed before.
                file.truncate(length)
                file.seek(length)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot write {self.records_path} ({error.strerror}); free disk space, then continue with"
                f" `metaleader resume {self.folder}`",
            ) from error
