"""Grids: cells are runs, are continued after kills, and end in one table, figure and report."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import tiny

from metaleader import cli
from metaleader.report.records import estimate, record_error, third, where
from metaleader.runner import RunOptions, run_experiment
from metaleader.runs.folder import read_records

FILE = """
import os, pathlib, signal
import torch
import metaleader as ml

HERE = pathlib.Path(__file__).parent

def stream(seed, tasks=2, noise=0.0):
    return ml.streams.SinusoidStream(tasks=tasks, train=8, test=5, noise=noise, seed=seed)

class Mean:
    def __init__(self, scale=1.0):
        self.scale = scale
    def begin(self, name):
        self.y = torch.zeros(0, 1)
        if self.scale == 2.0 and (HERE / "kill").exists():
            (HERE / "kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.scale == 3.0 and (HERE / "fail").exists():
            raise ValueError("this scale fails")
    def observe(self, x, y, update=True):
        self.y = torch.cat([self.y, y])
    def adapt(self, steps, statistics):
        return [lambda x: self.scale * self.y.mean().expand(len(x), 1)] * len(steps)

experiment = ml.Experiment(
    stream=stream, network=lambda: ml.models.mlp(1, 1, [8]), loss=ml.losses.squared_error,
    methods={"toe": {"query": 3}, "mean": Mean},
    reveal=4, reveals=2, meta_steps=2, steps=(2, 1), threads=1,
)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def status(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        return caught.value.code, *capsys.readouterr()

    return run


def plain_run(file, folder, *settings):
    run_experiment(RunOptions(str(file), seeds=2, set=settings), folder)
    return tiny.results(folder)


def test_cells_are_runs_that_survive_kills_and_end_in_one_report(file, status, tmp_path):
    folder = tmp_path / "grid"
    (tmp_path / "kill").touch()
    (tmp_path / "fail").touch()
    command = ("grid", file, "--seeds", 2, "--set", "mean.scale=2.0,3.0", "--set", "noise=0.1", "--out", folder)
    code, out, _ = status(*command, "--jobs", 2)
    assert code == 1
    assert "mean.scale=2.0: continues after its process was killed" in out
    assert "mean.scale=3.0: failed: method 'mean' fails in round 0: " in out
    assert "mine.py:20: this scale fails; see" in out
    assert "1 of 2 cells failed; `metaleader resume" in out
    assert status(*command)[0] == 2  # it holds a grid
    (tmp_path / "fail").unlink()
    code, out, _ = status("resume", folder)
    assert code == 0
    assert out.splitlines()[-1] == str(folder / "report.html")
    for scale in ("2.0", "3.0"):
        cell = folder / f"mean.scale={scale}"
        assert tiny.results(cell) == plain_run(file, tmp_path / scale, "noise=0.1", f"mean.scale={scale}")
    check_table(folder)
    page = (folder / "report.html").read_text()
    assert all(name in page for name in ("mean.scale=2.0", "mean.scale=3.0"))
    assert (folder / "grid.png").stat().st_size > 1000
    assert "there is nothing to resume" in status("resume", folder)[1]
    assert status("report", folder)[1].splitlines()[-1] == str(folder / "report.html")
    file.write_text(FILE + "# changed\n")
    (folder / "mean.scale=2.0" / "report.html").unlink()
    code, _, error = status("resume", folder)
    assert (code, error.count("\n")) == (2, 1)
    assert "the code of mine.py does" in error


def check_table(folder):
    """Compare the table with the records of each cell; the setting of one method gives another no further rows."""
    rows = list(csv.DictReader((folder / "grid.csv").read_text().splitlines()))
    assert [(row["method"], row["mean.scale"], row["datapoints"]) for row in rows] == [
        *(("toe", "", size) for size in "48"),
        *(("mean", scale, size) for scale in ("2.0", "3.0") for size in "48"),
    ]
    for row in rows:
        records = where(read_records(folder / row["cell"]), method=row["method"], datapoints=int(row["datapoints"]))
        for which in ("first", "last"):
            expected = estimate(third(records, which), record_error)
            found = [float(row[f"{which}_third{suffix}"]) for suffix in ("", "_standard_error")]
            assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "mean.scale=1,1"], "1 is there twice"),
        (["--set", "meta_steps=1,-1"], "meta_steps must be an integer of at least 0"),
        (["--set", "toe.meta_lr=0.1,many"], "toe.meta_lr is a number"),
        (["--methods", "toe,men"], "did you mean 'mean'?"),
        (["--jobs", 0], "--jobs must be at least 1, got 0"),
        (["--retries", -1], "--retries must be at least 0, got -1"),
        (["--gpus", 1], "--gpus is for --on ray"),
        (["--on", "ray", "--jobs", 2], "--jobs is for --on local"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(file, status, tmp_path, arguments, message):
    code, _, error = status("grid", file, *arguments, "--out", tmp_path / "grid")
    assert (code, error.count("\n")) == (2, 1)
    assert message in error
    assert not (tmp_path / "grid").exists()


def test_ray_that_is_not_installed(file, status, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, error = status("grid", file, "--on", "ray", "--out", tmp_path / "grid")
    assert code == 2
    assert "install metaleader[ray]" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "its format is 2, this release reads 1"),
        ({"cells": {"../x": []}}, "it has a cell '../x'"),
        ({"workers": {"on": "moon"}}, "cells run on local or ray, got 'moon'"),
        ({"options": {}}, "is not the configuration of a grid"),
        ({"file": "evil.py"}, "from which nothing is executed unless it is named"),
    ],
)
def test_damaged_grids_are_refused(file, status, tmp_path, change, message):
    folder = tmp_path / "grid"
    folder.mkdir()
    options = {"experiment": str(file), "methods": ["toe"], "set": [], "seeds": 1}
    config = {
        "format": 1, "experiment": "mine", "file": str(file), "sha256": "0", "imports": {}, "options": options,
        "axes": {}, "cells": {"all": []}, "workers": {}, "threads": 1,
    }  # fmt: skip
    (folder / "grid.json").write_text(json.dumps(config | change))
    code, _, error = status("resume", folder)
    assert (code, error.count("\n")) == (2, 1)
    assert message in error


@pytest.mark.torture
def test_a_grid_whose_process_is_killed_resumes(file, status, tmp_path):
    folder = tmp_path / "grid"
    settings = ["--set", "stream.tasks=30", "--set", "toe.meta_lr=0.01,0.02,0.03", "--jobs", "2", "--seeds", "2"]
    command = [sys.executable, "-m", "metaleader", "grid", str(file), *settings, "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not any(path.stat().st_size > 200 for path in folder.glob("*/records.csv")):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # The cells end with their parent, and `resume` waits for them.
    assert status("resume", folder)[0] == 0
    for lr in ("0.01", "0.02", "0.03"):
        found = tiny.results(folder / f"toe.meta_lr={lr}")
        assert found == plain_run(file, tmp_path / lr, "stream.tasks=30", f"toe.meta_lr={lr}")
