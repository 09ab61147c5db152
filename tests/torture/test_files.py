"""Values of records, times and configuration that no run writes: one line, status 2, in little time."""

import csv
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torture.files import refused, tiny_run

CELLS = {
    "seed": ("", "-1", "9" * 5000, "1_0", "\x00"),
    "round": ("", " ", "99999999", "9" * 30, "0x1"),
    "datapoints": ("", "1e3", "-5"),
    "loss": ("", "one", "1_0"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copied"))


def with_cell(path: Path, column: str, value: str) -> None:
    rows = list(csv.reader(io.StringIO(path.read_text())))
    rows[1][rows[0].index(column)] = value
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    path.write_text(text.getvalue())


@pytest.mark.parametrize(("column", "value"), [(column, value) for column, values in CELLS.items() for value in values])
def test_records_of_a_run_without_checkpoints(copied: Path, column: str, value: str) -> None:
    shutil.rmtree(copied / "checkpoint")
    with_cell(copied / "records.csv", column, value)
    assert "records.csv" in refused("report", copied)


@pytest.mark.parametrize("value", ["", "inf", "1e400", "-1", "9" * 30])
def test_times(copied: Path, value: str) -> None:
    with_cell(copied / "times.csv", "seconds", value)
    assert "times.csv" in refused("report", copied)


@pytest.mark.parametrize("value", [0, -1, 100_000, 2**63, True, None, 1.5])
def test_numbers_of_threads(copied: Path, value: Any) -> None:
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": value}))
    assert "threads" in refused("resume", copied)


@pytest.mark.parametrize("name", ["config.json", "records.csv", ".lock", "checkpoint/toe.safetensors"])
def test_fifos_and_endless_files(copied: Path, name: str) -> None:
    path = copied / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    refused("resume", copied)
    path.unlink()
    path.symlink_to("/dev/zero")
    refused("resume", copied)
