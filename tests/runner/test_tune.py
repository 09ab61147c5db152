"""The search for settings: equal budgets, pruning, resuming, and an experiment that runs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("optuna")

from metaleader import cli
from metaleader.runner import tune as module
from metaleader.runner.plan import RunOptions, planned
from metaleader.runs.folder import read_records

FILE = """
import torch
import metaleader as ml

class Mean:
    def __init__(self, scale=2.0, kind="mean"):
        if kind == "broken":
            raise ValueError("this kind is broken")
        self.scale, self.kind = scale, kind
    def begin(self, name):
        self.y = torch.zeros(0, 1)
    def observe(self, x, y, update=True):
        self.y = torch.cat([self.y, y])
    def adapt(self, steps, statistics):
        value = float("nan") if self.kind == "nan" else self.scale
        return [lambda x: value * self.y.mean().expand(len(x), 1)] * len(steps)

def task(value):
    x, y = torch.rand(9, 1), torch.full((9, 1), float(value))
    return ml.Task(f"{value}", ml.Batch(x[:4], y[:4]), ml.Batch(x[4:], y[4:]))

def stream(seed, tasks=6):
    return [task(seed + t + 1) for t in range(tasks)]

experiment = ml.Experiment(
    stream=stream, network=lambda: ml.models.mlp(1, 1, [8]), loss=ml.losses.squared_error,
    methods={"mean": Mean, "toe": {"query": 3}, "other": ml.Method(Mean, label="other", scale=3.0)},
    reveal=2, reveals=2, meta_steps=1, steps=(1,), threads=1,
)
"""
SEARCH = ("--search", "scale=0.5..3", "--methods", "mean,other", "--trials", 12, "--seeds", 1)


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


def trials_of(folder):
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def test_the_best_settings_are_found_and_run(file, status, tmp_path):
    folder = tmp_path / "tune"
    code, out, _ = status("tune", file, *SEARCH, "--out", folder, "--set", "tasks=4")
    assert code == 0
    trials = trials_of(folder)
    assert [(t["method"], t["trial"]) for t in trials] == [(m, n) for m in ("mean", "other") for n in range(12)]
    # The first trial has the present settings.
    assert [t["settings"]["scale"] for t in trials if t["trial"] == 0] == [2.0, 3.0]
    assert {t["state"] for t in trials} == {"finished", "pruned"}
    assert all(len(t["errors"]) == 4 for t in trials if t["state"] == "finished")
    assert all(2 <= len(t["errors"]) < 4 for t in trials if t["state"] == "pruned")
    # The mean of task t is seed + t + 1, and the last third of four tasks are two.
    for trial in (t for t in trials if t["state"] == "finished"):
        scale = trial["settings"]["scale"]
        expected = (scale - 1) ** 2 * (1003**2 + 1004**2) / 2
        assert trial["error"] == pytest.approx(expected, rel=1e-4)
    path = folder / "tuned.py"
    assert out.splitlines()[-1] == str(path)
    plan = planned(RunOptions(str(path)))
    assert plan.methods == ("mean", "other")
    assert list(plan.experiment.extras) == ["toe"]
    assert plan.tasks == 4
    for method in plan.methods:
        best = min((t for t in trials if t["method"] == method and t["state"] == "finished"), key=lambda t: t["error"])
        assert plan.experiment.methods[method].options["scale"] == best["settings"]["scale"]
        assert abs(best["settings"]["scale"] - 1) < 0.3
    assert status("run", path, "--seeds", 1, "--out", tmp_path / "run")[0] == 0
    assert {r["method"] for r in read_records(tmp_path / "run")} == {"mean", "other"}
    assert status("tune", file, *SEARCH, "--out", folder)[0] == 2
    file.write_text(FILE + "# changed\n")
    for command in (("run", path, "--out", tmp_path / "again"), ("resume", folder)):
        code, _, error = status(*command)
        assert (code, error.count("\n")) == (2, 1)
        assert "the code of mine.py does" in error


def test_a_search_that_is_stopped_ends_as_if_it_had_not_been(file, status, tmp_path, monkeypatch):
    assert status("tune", file, *SEARCH, "--out", tmp_path / "whole")[0] == 0
    whole = (tmp_path / "whole" / "trials.jsonl").read_bytes()
    original, calls = module.play_round, []

    def stopping(*arguments):
        calls.append(1)
        if len(calls) == 50:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(module, "play_round", stopping)
    folder = tmp_path / "stopped"
    code, out, _ = status("tune", file, *SEARCH, "--out", folder)
    assert code == 130
    assert f"Continue with: metaleader resume {folder}" in out
    content = (folder / "trials.jsonl").read_bytes()
    assert whole.startswith(content)
    assert 0 < len(content) < len(whole)
    (folder / "trials.jsonl").write_bytes(content + whole[len(content) : len(content) + 20])  # a torn line
    assert status("resume", folder)[0] == 0
    assert (folder / "trials.jsonl").read_bytes() == whole
    assert (folder / "tuned.py").read_bytes() == (tmp_path / "whole" / "tuned.py").read_bytes()
    (folder / "trials.jsonl").write_bytes(b"{}\n")
    assert "was changed" in status("resume", folder)[2]


def test_trials_that_fail_are_counted_and_avoided(file, status, tmp_path):
    search = ("--search", "mean.kind=mean,nan,broken", "--methods", "mean", "--trials", 8, "--seeds", 1)
    assert status("tune", file, *search, "--out", tmp_path / "tune")[0] == 0
    trials = trials_of(tmp_path / "tune")
    reasons = {t["settings"]["kind"]: t.get("reason") for t in trials}
    assert reasons["mean"] is None
    assert reasons.get("nan", "the error is nan") == "the error is nan"
    assert "this kind is broken" in reasons.get("broken", "this kind is broken")
    assert len(reasons) > 1
    assert "mean.kind=mean" in (tmp_path / "tune" / "tuned.py").read_text()
    code, _, error = status("tune", file, *search[:1], "mean.kind=nan,broken", *search[2:], "--out", tmp_path / "none")
    assert code == 2
    assert "no trial of mean has finished; the last one" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--search", "mean.scael=1..2"], "did you mean 'scale'?"),
        (["--search", "mean.scale=2..1"], "the lower bound must be less"),
        (["--search", "mean.scale=1..2"], "there is no range for toe"),
        (["--search", "scale=1..2", "--methods", "mean", "--trials", 0], "--trials must be at least 1"),
        (["--search", "scale=1..2", "--methods", "mean", "--at", 3], "2 to 4, got 3"),
        (["--search", "toe.query=1..3.5", "--methods", "toe"], "query must be an integer of at least 1, got 1.0"),
        (["--search", "toe.query=0..3", "--methods", "toe"], "query must be an integer of at least 1, got 0"),
        (["--search", "mean.scale=1..2", "--set", "mean.scale=3", "--methods", "mean"], "mean.scale is set twice"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(file, status, tmp_path, arguments, message):
    code, _, error = status("tune", file, *arguments, "--out", tmp_path / "tune")
    assert (code, error.count("\n")) == (2, 1)
    assert message in error
    assert not (tmp_path / "tune").exists()


def test_settings_of_one_method_leave_the_others(file, status, tmp_path):
    search = ("--search", "mean.scale=1..2", "--search", "toe.meta_lr=log:1e-3..1e-2", "--methods", "mean,toe")
    settings = ("--set", "toe.query=2", "--trials", 1, "--seeds", 1, "--tasks", 1)
    assert status("tune", file, *search, *settings, "--out", tmp_path / "tune")[0] == 0
    assert [trial["state"] for trial in trials_of(tmp_path / "tune")] == ["finished", "finished"]


def test_optuna_that_is_not_installed(file, status, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, error = status("tune", file, *SEARCH, "--out", tmp_path / "tune")
    assert code == 2
    assert "install metaleader[tune]" in error


@pytest.mark.torture
def test_a_search_that_is_killed_ends_as_if_it_had_not_been(file, status, tmp_path):
    assert status("tune", file, *SEARCH, "--out", tmp_path / "whole")[0] == 0
    folder = tmp_path / "killed"
    command = ["tune", file, *SEARCH, "--out", folder]
    whole = (tmp_path / "whole" / "trials.jsonl").read_bytes()
    kills = 0
    while True:
        process = subprocess.Popen([sys.executable, "-m", "metaleader", *map(str, command)], stdout=subprocess.DEVNULL)
        before = (folder / "trials.jsonl").stat().st_size if (folder / "trials.jsonl").exists() else 0
        while process.poll() is None:
            grown = (folder / "trials.jsonl").exists() and (folder / "trials.jsonl").stat().st_size > before + 500
            if grown and kills < 3:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
            time.sleep(0.01)
        command = ["resume", folder]
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert kills >= 1
    assert (folder / "trials.jsonl").read_bytes() == whole
