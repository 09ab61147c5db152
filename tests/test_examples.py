"""The examples run and show what they say."""

import itertools
import json
import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import metaleader as ml
from metaleader.checks import check_learner
from metaleader.evaluate import play
from metaleader.presets import PRESETS
from metaleader.runner import RunOptions, run_experiment
from metaleader.runner.plan import planned
from metaleader.runs.folder import read_records
from metaleader.streams.base import View


def test_own_stream(capsys):
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "own_stream.py"))
    errors = example["main"]()
    assert len(errors) == 20
    assert "sensor 19: squared error" in capsys.readouterr().out
    assert np.mean(errors[10:]) < np.mean(errors[:5]) / 4


def test_compare(capsys, tmp_path):
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "compare.py"))
    records = example["main"](tmp_path / "new", tasks=2, seeds=1)
    assert [(r["method"], r["round"], r["datapoints"]) for r in records] == [
        (method, t, size) for method in example["METHODS"] for t in range(2) for size in (10, 20, 30)
    ]
    newest = example["METHODS"]["ftml, newest 3"](lambda: ml.models.mlp(1, 1), ml.losses.squared_error)
    assert newest.options.max_tasks == 3
    assert "ftml, newest 3: squared error" in capsys.readouterr().out
    assert (tmp_path / "new" / "figure.png").stat().st_size > 10_000


def test_tune(capsys):
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "tune.py"))
    texts = ("inner_lr=0.01", "inner_lr=0.02,meta_lr=0.01,inner_steps=2", "meta_lr=1e300")
    settings = [example["setting"](text) for text in texts]
    found = example["tune"]("sinusoid", "ftl", settings, seeds=2, tasks=2, device="cpu", schedule="quick")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == found
    first, second, third = found
    assert (first["inner_lr"], second["meta_lr"], first["seeds"], first["tasks"]) == (0.01, 0.01, [100, 101], 2)
    assert second["inner_steps"] == 2
    assert list(first["errors"]) == ["5", "0", "1", "10", "20"]
    assert first["errors"]["5"]["20"] != second["errors"]["5"]["20"]
    assert "is not finite" in third["failed"]
    (fourth,) = example["tune"]("sinusoid", "scratch", [{"inner_lr": 0.1}], tasks=1, schedule="quick", device="cpu")
    assert "inner_lr" in fourth["failed"]
    # The mean over the second half of the tasks, here the second of two, by hand.
    preset = PRESETS["sinusoid"]("quick")
    alone = []
    for seed in (100, 101):
        learner = preset.methods["ftl"](preset.network, preset.loss, meta_steps=preset.meta_steps, seed=seed)
        stream = View(preset.stream(seed=seed), range(2))
        *_, last = play(learner, stream, preset.reveal, reveals=preset.reveals)
        alone.append(last.loss)
    assert first["errors"]["5"]["20"] == pytest.approx(sum(alone) / 2, abs=1e-3)


@pytest.mark.parametrize("name", ["reptile", "proximal", "imaml", "meta_sgd", "cavia"])
def test_algorithms(name):
    path = Path(__file__).parent.parent / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 40
    make = runpy.run_path(str(path))["make"]
    small = {"meta_steps": 1, "tasks_per_step": 2, "support": 4, "query": 4}
    check_learner(lambda: make(**small), ml.streams.SinusoidStream(tasks=2, train=20))
    stream = ml.streams.SinusoidStream(tasks=12, train=20)
    losses = [record.loss for record in ml.play(make(meta_lr=3e-3, meta_steps=5), stream, reveal=20)]
    plain = ml.TOE(lambda: ml.models.mlp(1, 1), ml.losses.squared_error, meta_lr=3e-3, meta_steps=5)
    assert np.mean(losses[6:]) < np.mean([record.loss for record in ml.play(plain, stream, reveal=20)][6:])


def test_memorised(capsys, tmp_path, monkeypatch):
    """The final TOE of a run is the one of the last record."""
    monkeypatch.setattr("metaleader.runner.experiment._finish", lambda folder: None)  # no figures
    options = RunOptions("rainbow-digits", ("ftml", "toe", "scratch"), seeds=2, schedule="quick", tasks=1)
    run_experiment(options, tmp_path / "run")
    rows = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "memorised.py"))["main"](tmp_path / "run")
    assert [row[:2] for row in rows] == [("ftml", 0), ("ftml", 1), ("toe", 0), ("toe", 1)]
    *_, first, second = [record for record in read_records(tmp_path / "run") if record["method"] == "toe"]
    expected = [100 - 100 * first["accuracy"], 100 - 100 * second["accuracy"]]
    assert [row[3] for row in rows[2:]] == pytest.approx(expected, abs=1e-4)
    assert all(0 <= row[2] < 90 for row in rows)
    assert "toe, seed 1: trained on" in capsys.readouterr().out


def test_trackers(tmp_path, monkeypatch):
    """With stand-ins for MLflow and Weights & Biases, which are not installed."""
    logged = []

    class Run(types.SimpleNamespace):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            logged.append("end")

    mlflow = types.SimpleNamespace(
        start_run=lambda run_name: Run(name=run_name),
        log_params=logged.append,
        log_metrics=lambda values, step: logged.append({**values, "round": step}),
        log_artifact=lambda path: logged.append(Path(path).name if Path(path).is_file() else None),
    )
    run = Run(log=logged.append, config=types.SimpleNamespace(update=lambda config: logged.append(config["seeds"])))
    wandb = types.SimpleNamespace(init=lambda project, name: run)
    options = RunOptions("sinusoid", ("toe",), seeds=2, schedule="quick", tasks=1, set=("meta_steps=1",))
    for name, module in (("mlflow", mlflow), ("wandb", wandb)):
        monkeypatch.setitem(sys.modules, name, module)
        logged.clear()
        example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / f"track_{name}.py"))
        example["main"](options, tmp_path / name)
        template = "toe/seed_{}/after_{}/loss" if name == "mlflow" else "toe/seed {}/after {}/loss"
        records = read_records(tmp_path / name)
        expected = [{"round": r["round"], template.format(r["seed"], r["datapoints"]): r["loss"]} for r in records]
        assert [values for values in logged if isinstance(values, dict) and "round" in values] == expected
        if name == "mlflow":
            assert logged[0] == {"experiment": "sinusoid", "seeds": 2, "set": "meta_steps=1"}
            assert logged[-4:] == ["config.json", "records.csv", "report.html", "end"]
        else:
            assert logged[-2:] == [2, "end"]


@pytest.mark.parametrize("name", ["algorithms", "algorithms_digits"])
def test_the_experiments_of_the_comparison(name, tmp_path):
    path = Path(__file__).parent.parent / "examples" / f"{name}.py"
    options = RunOptions(str(path), ("reptile", "bayes"), seeds=1, tasks=1, set=("meta_steps=1",))
    plan = planned(RunOptions(str(path)))
    assert len(plan.methods) == 8
    run_experiment(options, tmp_path / "run")
    assert {r["method"] for r in read_records(tmp_path / "run")} == {"reptile", "bayes"}


def test_schools(capsys, tmp_path, monkeypatch):
    from examples import schools

    rng = np.random.default_rng(0)
    school = np.repeat(np.arange(25), 16)
    frame = pd.DataFrame(rng.normal(size=(400, 3)), columns=["gcse", "age", "girl"])
    frame["school"] = school
    frame["grade"] = 0.8 * frame.gcse + 0.5 * rng.normal(size=25)[school] + 0.2 * rng.normal(size=400)
    monkeypatch.setattr(schools, "pupils", lambda: frame)
    errors = schools.main(tmp_path)
    assert errors.shape == (25, len(schools.SIZES))
    schools.draw(errors[None], tmp_path / "schools.png")
    assert errors[15:, -1].mean() < 0.7 * errors[:5, 0].mean()
    assert "schools 11 to 25: squared error" in capsys.readouterr().out
    assert (tmp_path / "schools.png").stat().st_size > 5000


def test_the_example_of_changepoints_runs(capsys):
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "changepoints.py"))
    for name in ("sinusoid", "digits"):
        assert list(example["main"](name, 1, tasks=2, updates=1)) == [
            "true boundaries",
            "changepoints",
            "joint training",
        ]


@pytest.mark.torture
def test_changepoints(capsys):
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "changepoints.py"))
    results = example["main"]("sinusoid", 1, tasks=12)
    assert list(results) == ["true boundaries", "changepoints", "joint training"]
    assert results["changepoints"][0] < results["joint training"][0] / 2
    out = capsys.readouterr().out
    assert "true boundaries: " in out
    assert ", 12 segments, 12 tasks" in out  # the ceiling has the true ones


def test_the_belief_of_changepoints_is_the_sum_over_all_segmentations():
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "changepoints.py"))
    make = example["Changepoints"]
    make.observe.__globals__.update(SMALLEST=0.0, CERTAIN=100)
    network, hazard = lambda: ml.models.mlp(1, 1, [4]), example["HAZARD"]
    learner = make(ml.FTML(network, ml.losses.squared_error, adaptation=ml.BayesianHead()))
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(5, 1, generator=draw), torch.rand(5, 1, generator=draw) + torch.tensor([0, 0, 0, 3, 3])[:, None]
    other = make(learner.learner)
    expected = dict.fromkeys(range(1, 6), 0.0)
    for changes in itertools.product([False, True], repeat=5):
        probability, since = 1.0, 0
        for t, change in enumerate(changes):
            # Before the first datapoint, a change makes no difference.
            since = t if change else since
            probability *= hazard if change else 1 - hazard
            other.x, other.y = x[since:t], y[since:t]
            mean, variance = other._predicted(t - since, x[t : t + 1])
            probability *= float(torch.distributions.Normal(mean, variance.sqrt()).log_prob(y[t]).exp())
        expected[5 - since] += probability
    for t in range(5):
        learner.observe(x[t : t + 1], y[t : t + 1])
    total = sum(expected.values())
    assert learner.belief == {number: pytest.approx(value / total, rel=1e-4) for number, value in expected.items()}
    assert max(learner.belief, key=learner.belief.__getitem__) == 2


def test_the_coloured_seven(capsys):
    from examples import coloured_seven

    *past, new = coloured_seven.tasks(0, num=3)
    assert [set(task.train.y.tolist()) == {7} for task in (*past, new)] == [False, False, False, True]
    background = [task.train.x[:, :, 0, 0].unique(dim=0) for task in (*past, new)]
    assert all(len(colour) == 1 for colour in background)
    always_seven = lambda x: torch.eye(10)[torch.full((len(x),), 7)]  # noqa: E731
    assert coloured_seven.measured(always_seven, new.test) == (0.0, 1.0)
    made = coloured_seven.learners(0, 1)
    learner = made["FTML, one class"]
    found, expected = (one.task_gradient(one.params, new.train, past[0].train) for one in (learner, made["FTML"]))
    torch.testing.assert_close(found, expected)  # a support set of one class is used as it is
    other, _ = learner.task_gradient(learner.params, past[1].train, past[0].train)
    assert other != made["FTML"].task_gradient(learner.params, past[1].train, past[0].train)[0]
    for task in past:
        learner.begin(task.name)
        learner.observe(*task.train)
    assert learner.step == 3
    rows = coloured_seven.main(seeds=1, updates=1, num=2)
    assert list(rows) == ["FTML", "FTML, one class", "FTL", "TOE"]
    assert "taken for 7" in capsys.readouterr().out
