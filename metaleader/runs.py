"""The books: a run folder with its configuration and its records.

`config.json` holds everything that determines the run; `records.csv` has one row for each measured reveal, and no
wall-clock times, so that the same run gives the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from metaleader.evaluate import Record
from metaleader.store import write_atomic

FORMAT = 1
COLUMNS = ("method", "seed", "protocol", "round", "task", "datapoints", "loss", "accuracy", "needed")


class Run:
    """A run folder.

    Args:
        folder: made if it is not there; a folder that already holds records is refused.
        config: plain values, written to `config.json` before anything else.
        more: further columns of the records.
    """

    def __init__(self, folder: str | os.PathLike[str], config: dict[str, Any], more: Iterable[str] = ()) -> None:
        self.folder = Path(folder)
        self.records_path = self.folder / "records.csv"
        self._columns = (*COLUMNS, *more)
        if self.records_path.exists():
            raise ValueError(f"{self.folder} already holds a run; choose another folder, or remove it")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / "config.json", json.dumps({"format": FORMAT, **config}, indent=2).encode() + b"\n")
        self._append([list(self._columns)])

    def append(self, method: str, records: Iterable[tuple[int, Record]]) -> None:
        """Add records of a method, each with its seed; they are on disk when this returns."""
        lines = []
        for seed, record in records:
            row = {"method": method, "seed": seed, **vars(record), **record.more}
            lines.append(["" if row.get(name) is None else row[name] for name in self._columns])
        self._append(lines)

    def _append(self, lines: list[list[Any]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        with open(self.records_path, "ab") as file:
            file.write(text.getvalue().encode())
            file.flush()
            os.fsync(file.fileno())


def read_records(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a run folder, numbers as numbers and None where a value is missing.

    Raises:
        FileNotFoundError: when the folder holds no records.
        ValueError: for a file that is not one of records.
    """
    path = Path(folder) / "records.csv"
    if not path.is_file():
        raise FileNotFoundError(f"no records in {folder}: {path} is missing")
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if not set(COLUMNS) <= set(reader.fieldnames or ()):
            raise ValueError(f"{path} is not a file of records: its columns are {reader.fieldnames}")
        return [{name: _value(name, text) for name, text in row.items()} for row in reader]


def _value(name: str, text: str) -> Any:
    if name in ("method", "protocol", "task"):
        return text
    if text == "":
        return None
    return int(text) if name in ("seed", "round", "datapoints", "needed") else float(text)
