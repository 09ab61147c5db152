"""The regret of runs: that of `metaleader.regret` for the same streams, in a file and in the report."""

import csv
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import results, tiny

import metaleader as ml
from metaleader import cli
from metaleader.presets import PRESETS
from metaleader.regret import hindsight
from metaleader.runner import RunOptions, resume_experiment, run_experiment
from metaleader.runner.experiment import resumed_plan
from metaleader.runs.folder import read_checkpoint, read_config, read_records
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
    assert status("regret", folder, "--at", 7)[2].endswith("before training at 7 datapoints, but at 10, 20\n")
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
    assert "no losses from before training" in error


def test_a_run_of_algorithm_1_has_the_losses_of_its_regret(file, status, tmp_path):
    """The losses are those before training, at the sizes of `before_at`; comparators are those of the streams."""
    folder = tmp_path / "run"
    assert status("run", file, "--seeds", 2, "--methods", "ftml,scratch", "--out", folder)[0] == 0
    rows = [row for row in read_records(folder) if row["method"] == "ftml"]
    assert [row["datapoints"] for row in rows if row["loss_before"] is not None] == [10, 10, 20, 20] * 2
    assert {row["loss_before"] for row in read_records(folder) if row["method"] == "scratch"} == {None}
    code, out, _ = status("regret", folder, "--at", 10, "--max-evaluations", 30)
    assert code == 0
    assert "note: scratch has no comparator" in out
    found = [row for row in csv.DictReader((folder / "regret.csv").read_text().splitlines()) if row["seed"] == "1"]
    losses = [row["loss_before"] for row in rows if row["seed"] == 1 and row["datapoints"] == 10]
    assert [float(row["loss"]) for row in found] == losses
    checkpoint = read_checkpoint(folder, "ftml")
    assert checkpoint is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best = hindsight(
            lambda: torch.nn.Linear(4, 1, bias=False),
            ml.losses.squared_error,
            QuadraticStream(tasks=2, train=20, test=20, seed=1),
            datapoints=10,
            inner_lr=0.05,
            inner_steps=1,
            start=checkpoint["state"]["learners"][1]["params"],
            max_evaluations=30,
        )
    expected = np.cumsum(np.array(losses) - best.losses)
    np.testing.assert_allclose([float(row["static_regret"]) for row in found], expected, rtol=1e-6)


def test_the_sizes_before_training_can_be_chosen(file, status, tmp_path):
    folder = tmp_path / "none"
    arguments = ("run", file, "--seeds", 1, "--methods", "ftml", "--set")
    assert status(*arguments, "before_at=[]", "--out", folder)[0] == 0
    assert "loss_before" not in read_records(folder)[0]
    code, _, error = status("regret", folder)
    assert (code, error.count("\n")) == (2, 1)
    assert "no losses from before training" in error
    folder = tmp_path / "some"
    assert status(*arguments, "before_at=[5]", "--set", "measure_at=[5,20]", "--out", folder)[0] == 0
    rows = [(row["datapoints"], row["loss_before"] is None) for row in read_records(folder)]
    assert rows == [(5, False), (20, True)] * 2
    for settings, message in (
        (["before_at=[5]"], "before_at has 5, but reveal=10 and reveals=2 measure 10, 20 datapoints"),
        (["measure_at=[5,10]"], "last size of measure_at must be all data"),
        (["measure_at=[20,10]"], "measure_at must be ascending"),
        (["measure_at=[5,20]", "before_at=[10]"], "before_at has 10, but measure_at has 5, 20 datapoints"),
    ):
        given = [part for text in settings for part in ("--set", text)]
        code, _, error = status(*arguments[:-1], *given, "--out", tmp_path / "refused")
        assert (code, error.count("\n")) == (2, 1)
        assert message in error
    code, _, error = status(*arguments[:-2], "mean", "--set", "measure_at=[5,20]", "--out", tmp_path / "refused")
    assert (code, error.count("\n")) == (2, 1)
    assert "can be measured after reveals only" in error


def test_a_run_continues_with_the_steps_and_sizes_that_it_measured(tmp_path, monkeypatch):
    """A preset that measures more today still resumes its runs."""
    made = tiny()
    options = RunOptions("tiny", seeds=1, methods=("ftml",), engine="eager")
    folders = [tmp_path / name for name in ("whole", "stopped")]
    monkeypatch.setitem(PRESETS, "tiny", lambda schedule: made)
    run_experiment(options, folders[0])
    with pytest.raises(KeyboardInterrupt):
        run_experiment(options, folders[1], on_record=stop_after_a_round)
    changed = replace(made, steps=(2, 0, 5), measure_at=(1, 4, 8), before_at=())
    monkeypatch.setitem(PRESETS, "tiny", lambda schedule: changed)
    resume_experiment(folders[1])
    assert results(folders[0]) == results(folders[1])
    monkeypatch.setitem(PRESETS, "tiny", lambda schedule: replace(made, reveal=2, reveals=4, panels=(2, 8)))
    with pytest.raises(ValueError, match="reveal was 4, now 2"):
        resumed_plan(read_config(folders[1]), None)


def stop_after_a_round(method, seed, record):
    if record.round == 0 and record.datapoints == 8:
        raise KeyboardInterrupt
