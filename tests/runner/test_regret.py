"""The regret of runs: that of `metaleader.regret` for the same streams, in a file and in the report."""

import csv
import warnings

import numpy as np
import pytest
import torch

import metaleader as ml
from metaleader import cli
from metaleader.regret import hindsight
from metaleader.runs.folder import read_checkpoint, read_records
from metaleader.streams import QuadraticStream

FILE = """
import torch
import metaleader as ml

def stream(seed, tasks=2):
    return ml.streams.QuadraticStream(tasks=tasks, train=20, test=20, seed=seed)

class Mean:
    def begin(self, name): pass
    def observe(self, x, y, update=True): pass
    def update(self): pass
    def adapt(self, steps, statistics):
        return [lambda x: torch.zeros(len(x), 1)] * len(steps)

experiment = ml.Experiment(
    stream=stream, network=lambda: torch.nn.Linear(4, 1, bias=False), loss=ml.losses.squared_error,
    methods={
        "ftml": {"inner_lr": 0.05}, "ftl": {"inner_lr": 0.05}, "toe": {}, "scratch": {}, "ftml-rates": {}, "mean": Mean,
    },
    reveal=10, reveals=2, meta_steps=2, steps=(1,), threads=1,
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


def test_static_and_dynamic_regret_of_a_run(file, status, tmp_path):
    folder = tmp_path / "run"
    code, out, _ = status("run", file, "--first-seed", 3, "--seeds", 1, "--regret", "--out", folder)
    assert code == 0
    assert f"metaleader regret {folder}" in out
    code, out, _ = status("regret", folder, "--dynamic", "--max-evaluations", 30)
    assert code == 0
    for method, reason in (("scratch", "no w_t"), ("ftml-rates", "are learned"), ("mean", "not a metaleader.Learner")):
        assert f"note: {method} has no comparator: " in out
        assert reason in out
    rows = list(csv.DictReader((folder / "regret.csv").read_text().splitlines()))
    assert [(row["method"], row["seed"], row["datapoints"]) for row in rows[::2]] == [
        (method, "3", "20") for method in ("ftml", "ftl", "toe")
    ]
    losses = {name: losses_of(folder, name) for name in ("ftml", "ftl", "toe")}
    best = min(("ftml", "ftl"), key=lambda name: sum(losses[name]))
    for method, starts_from, inner_steps in (("ftml", best, 1), ("ftl", best, 1), ("toe", "toe", 0)):
        comparator = comparator_of(folder, starts_from, inner_steps)
        assert comparator.static is not None
        chosen = [row for row in rows if row["method"] == method]
        for kind, found in (("static", comparator.static), ("dynamic", comparator)):
            expected = np.cumsum(np.array(losses[method]) - found.losses)
            np.testing.assert_allclose([float(row[f"{kind}_regret"]) for row in chosen], expected, rtol=1e-6)
            assert [row[f"{kind}_converged"] for row in chosen] == ["0", "0"]
        assert float(chosen[-1]["dynamic_regret"]) >= float(chosen[-1]["static_regret"])
    page = (folder / "report.html").read_text()
    assert "Regret after the last round" in page
    assert "dynamic regret after 20 datapoints" in page
    assert status("regret", folder, "--at", 7)[2].endswith("no measurements at 7 datapoints, but at 10, 20\n")
    (folder / "regret.csv").write_text("method\nftml\n")
    code, _, error = status("report", folder)
    assert code == 2
    assert "regret.csv is damaged" in error


def losses_of(folder, method):
    return [r["loss"] for r in read_records(folder) if (r["method"], r["datapoints"]) == (method, 20)]


def comparator_of(folder, method, inner_steps):
    checkpoint = read_checkpoint(folder, method)
    assert checkpoint is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hindsight(
            lambda: torch.nn.Linear(4, 1, bias=False),
            ml.losses.squared_error,
            QuadraticStream(tasks=2, train=20, test=20, seed=3),
            inner_lr=0.05,
            inner_steps=inner_steps,
            start=checkpoint["state"]["learners"][0]["params"],
            dynamic=True,
            max_evaluations=30,
        )


def test_runs_without_regret_are_refused(file, status, tmp_path):
    folder = tmp_path / "run"
    assert status("run", file, "--seeds", 1, "--methods", "mean", "--tasks", 1, "--out", folder)[0] == 0
    code, _, error = status("regret", folder)
    assert (code, error.count("\n")) == (2, 1)
    assert "is a run of the online protocol" in error
