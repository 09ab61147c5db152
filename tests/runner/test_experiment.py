"""Experiments: seeds side by side, what is checked, what the configuration says."""

import dataclasses
import json
import sys
import types
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import metaleader as ml
from metaleader.learners import FTML
from metaleader.presets import PRESETS
from metaleader.report.claims import check_claims
from metaleader.runner import experiment as runner
from metaleader.runner import run_experiment
from metaleader.runner.plan import RunOptions, planned, planned_updates
from metaleader.runs.folder import read_records, read_times
from metaleader.streams import SinusoidStream
from metaleader.system import machine
from metaleader.system.trees import load_tree


@pytest.fixture(autouse=True)
def _presets(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", tiny.tiny)
    monkeypatch.setitem(PRESETS, "tiny-nway", tiny.tiny_nway)


@pytest.fixture
def no_figure(monkeypatch):
    monkeypatch.setattr(runner, "_finish", lambda folder: None)


def learner(folder, method, seed):
    return load_tree(folder / "checkpoint" / f"{method}.safetensors", "metaleader-checkpoint", 2)["state"]["learners"][
        seed
    ]


# Batch norm and a step size of 0.1 amplify the rounding of the weights.
@pytest.mark.parametrize(
    ("preset", "method", "atol"), [("tiny", "ftml", 1e-6), ("tiny", "toe", 1e-6), ("tiny-nway", "ftml", 2e-5)]
)
def test_a_seed_does_not_depend_on_how_many_run_beside_it(preset, method, atol, no_figure, tmp_path):
    for seeds in (1, 3):
        run_experiment(RunOptions(preset, (method,), seeds=seeds, tasks=1, engine="eager"), tmp_path / f"{seeds}")
    alone = read_records(tmp_path / "1")
    beside = [r for r in read_records(tmp_path / "3") if r["seed"] == 0]
    assert len(alone) == len(beside) >= 2
    for one, other in zip(alone, beside, strict=True):
        assert one == {
            name: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value for name, value in other.items()
        }
    params = [learner(tmp_path / f"{seeds}", method, 0)["params"] for seeds in (1, 3)]
    for name in params[0]:
        torch.testing.assert_close(params[0][name], params[1][name], rtol=1e-5, atol=atol)
    # Other seeds have another initialisation and other tasks.
    other = learner(tmp_path / "3", method, 1)["params"]
    assert all(not torch.allclose(params[1][name], other[name]) for name in other if "weight" in name)
    assert {r["loss"] for r in alone}.isdisjoint(r["loss"] for r in read_records(tmp_path / "3") if r["seed"] == 1)


def test_the_records_are_those_of_playing_the_stream(no_figure, tmp_path):
    import metaleader as ml

    run_experiment(RunOptions("tiny", ("ftl", "scratch"), seeds=1), tmp_path)
    preset = tiny.tiny()
    expected = []
    for method in ("ftl", "scratch"):
        made = preset.methods[method](tiny.small_net, preset.loss, meta_steps=2, seed=0)
        stream = [SinusoidStream(tasks=9, train=12, test=5)[t] for t in range(3)]
        played = ml.play(made, stream, 4, reveals=2, gamma=0.1, steps=(2, 1))
        expected += [(method, r.round, r.datapoints, r.loss, r.more["loss_1"]) for r in played]
    found = [(r["method"], r["round"], r["datapoints"], r["loss"], r["loss_1"]) for r in read_records(tmp_path)]
    assert found == expected
    assert [(r["method"], r["round"]) for r in read_times(tmp_path)] == [
        (m, t) for m in ("ftl", "scratch") for t in range(3)
    ]


def test_the_configuration_says_everything(no_figure, tmp_path):
    run_experiment(RunOptions("tiny-nway", ("scratch",), seeds=1, tasks=1, data=str(tmp_path / "data")), tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    expected = {
        "format": 2, "experiment": "tiny-nway", "methods": ["scratch"], "seeds": 1, "schedule": "standard", "tasks": 1,
        "device": "cpu", "engine": "auto", "engines": {"scratch": "eager"}, "threads": 1, "statistics": "batch",
        "data": str(tmp_path / "data"), "tensorboard": False, "error_name": "error", "panels": [3, 9],
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert config["settings"]["loss"] == {"function": "metaleader.losses.cross_entropy", "options": {"smoothing": 0.1}}
    learner = config["settings"]["learners"]["scratch"]
    assert learner["class"] == "metaleader.learners.baselines.Scratch"
    given = {"query": 3, "tasks_per_step": 2, "meta_steps": 2, "meta_lr": 1e-3, "optimizer": "adam", "clip": None}
    assert {name: learner["options"][name] for name in given} == given
    assert config["versions"]["torch"] == torch.__version__
    assert config["hardware"]
    assert read_records(tmp_path)[-1]["new_datapoints"] == 9


def test_the_configuration_comes_before_the_data(no_figure, tmp_path, monkeypatch):
    def no_data(seed, data):
        assert (tmp_path / "config.json").exists()
        raise FileNotFoundError("no data here")

    preset = dataclasses.replace(tiny.tiny(), stream=no_data)
    monkeypatch.setitem(PRESETS, "tiny", lambda schedule: preset)
    with pytest.raises(FileNotFoundError, match="no data here"):
        run_experiment(RunOptions("tiny", ("toe",)), tmp_path)
    # Nothing was recorded, so the same command may be given again.
    monkeypatch.setitem(PRESETS, "tiny", tiny.tiny)
    run_experiment(RunOptions("tiny", ("toe",), seeds=1), tmp_path)


def test_the_commit_is_that_of_the_package_alone(tmp_path, monkeypatch):
    answers = {"ls-files": "machine.py\n", "describe": "abc-dirty\n"}
    monkeypatch.setattr(machine.subprocess, "run", lambda git, **options: types.SimpleNamespace(stdout=answers[git[3]]))
    assert machine.commit() == "abc-dirty"
    monkeypatch.undo()
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.commit() is None


def test_the_end_is_the_table_and_the_path_of_the_report(tmp_path, capsys):
    run_experiment(RunOptions("tiny", ("toe", "scratch"), seeds=2), tmp_path / "run")
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == str(tmp_path / "run" / "report.html")
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
    assert (tmp_path / "run" / "figure.png").stat().st_size > 1000
    assert any("from scratch" in line and "±" in line for line in out)


def test_tasks_of_unequal_sizes_are_noted(tmp_path, monkeypatch, capsys):
    def stream(seed):
        batches = [ml.Batch(torch.ones(rows, 1), torch.ones(rows, 1)) for rows in (6, 4, 6, 5)]
        return [ml.Task(str(i), batch, batch) for i, batch in enumerate(batches)]

    experiment = ml.Experiment(
        stream=stream,
        network=lambda: ml.models.mlp(1, 1, (2,)),
        loss=ml.losses.squared_error,
        methods={"toe": {}, "ftl": {}},
        reveal=2,
        meta_steps=1,
        steps=(1,),
        threads=1,
        claims=[ml.better("toe", "ftl", at=6), ml.better("toe", "ftl", at=2)],
    )
    monkeypatch.setitem(PRESETS, "unequal", lambda schedule="standard": experiment)
    run_experiment(RunOptions("unequal", ("toe", "ftl"), seeds=2, engine="eager"), tmp_path)
    assert capsys.readouterr().out.count("note: 2 of 4 tasks were not measured after 6 datapoints") == 1
    six, two = check_claims(tmp_path)
    assert "2 of 4 tasks, 2 of 2 seeds; the other tasks have no records of this size" in six.text
    assert six.verdict == "undecided"
    assert "4 of 4 tasks, 2 of 2 seeds" in two.text


def test_choices_are_made_and_names_checked():
    plan = planned(RunOptions("tiny", tasks=2))
    assert plan.methods == ("ftml", "ftml-last", "ftl", "toe", "scratch")
    assert (plan.tasks, plan.experiment.tasks) == (2, 3)
    assert plan.options.device in ("cpu", "cuda")
    assert planned(RunOptions("tiny", ("toe", "toe"))).methods == ("toe",)
    for wrong, message in (
        (RunOptions("tinny"), "unknown preset 'tinny'; did you mean 'tiny'?"),
        (RunOptions("tiny", ("sratch",)), "unknown method 'sratch'; did you mean 'scratch'?"),
        (RunOptions("tiny", ()), "name at least one method of ftml"),
        (RunOptions("tiny", seeds=0), "seeds and tasks must be at least 1, got 0"),
        (RunOptions("tiny", tasks=0), "seeds and tasks must be at least 1, got 3 and 0"),
        (RunOptions("tiny", first_seed=-1), "the first seed must be at least 0, got -1"),
        (RunOptions("tiny", device="gpu"), "unknown device 'gpu'"),
        (RunOptions("tiny", device="meta"), "runs need device cpu, cuda or auto, got 'meta'"),
        (RunOptions("tiny", device="cuda:99"), "device 'cuda:99' does not exist"),
    ):
        with pytest.raises(ValueError, match="^" + message.replace("?", r"\?")):
            planned(wrong)


def test_extra_methods_run_when_named_only() -> None:
    preset = PRESETS["rainbow-digits"]("quick")
    plus = ("ftml-rates", "ftml-every", "ftml-anneal", "ftml-plus", "ftml-bounded")
    extras = ("ftml-first", "ftl-matched", "toe-matched", "scratch-long", "ftml-one", "ftml-recent", *plus)
    assert tuple(preset.extras) == extras
    assert planned(RunOptions("rainbow-digits", schedule="quick")).methods == tuple(preset.methods)
    assert planned(RunOptions("rainbow-digits", extras, schedule="quick")).methods == extras
    made = {name: preset.all_methods[name](preset.network, preset.loss, meta_steps=3) for name in preset.all_methods}
    assert isinstance(made["ftml-first"], FTML)
    assert made["ftml-first"].first_order
    steps = {name: learner.meta_steps for name, learner in made.items() if name != "ftml-first"}
    more = {"ftl-matched": 48, "toe-matched": 48, "scratch-long": 15}
    assert steps == dict.fromkeys((*preset.methods, *plus, "ftml-one", "ftml-recent"), 3) | more
    assert made["ftml-one"].options.inner_steps == 1
    adam = PRESETS["cifar100"]("standard").all_methods
    assert [adam[name].options.get("optimizer") for name in ("ftml", "ftml-adam")] == ["sgd", "adam"]


def test_the_half_life_of_recent_tasks_is_a_setting_of_the_run() -> None:
    options = RunOptions("rainbow-digits", ("ftml-recent",), schedule="quick", set=("ftml-recent.weights.half_life=3",))
    plan = planned(options)
    described = plan.description["learners"]["ftml-recent"]["options"]["weights"]
    assert described == {"class": "metaleader.memory.rows.Recency", "half_life": 3}
    weights = plan.samples["ftml-recent"].options.weights
    assert weights(7)[[0, 3, 6]].tolist() == [0.25, 0.5, 1.0]
    with pytest.raises(ValueError, match="half_life must be positive"):
        planned(dataclasses.replace(options, set=("ftml-recent.weights.half_life=0",)))


def test_updates_without_an_inner_loop_count_a_tenth_whatever_the_name() -> None:
    preset = tiny.tiny()
    preset = dataclasses.replace(
        preset, meta_steps=200, extras={"mine": preset.methods["ftml"], "ftml-like": preset.methods["toe"]}
    )
    expected = {"ftml": 1200, "ftml-last": 1200, "ftl": 120, "toe": 120, "scratch": 120, "mine": 1200, "ftml-like": 120}
    assert {name: planned_updates(preset, name) for name in preset.all_methods} == expected


def test_a_method_outside_the_table_runs_and_is_reported(tmp_path, monkeypatch, capsys) -> None:
    preset = dataclasses.replace(tiny.tiny(), extras={"mine": tiny.tiny().methods["toe"]})
    monkeypatch.setitem(PRESETS, "tiny", lambda schedule: preset)
    run_experiment(RunOptions("tiny", ("mine", "toe"), seeds=1, tasks=1, engine="eager"), tmp_path)
    assert "mine: round 1/1" in capsys.readouterr().out
    assert "<span>mine</span>" in (tmp_path / "report.html").read_text()


def test_pose_records_position_and_angle_by_themselves() -> None:
    columns = runner._more_columns(planned(RunOptions("pose", schedule="quick")), SinusoidStream(tasks=1))
    steps = ["loss_0", "loss_1", "loss_5", "loss_20"]
    assert columns == ["loss_position", "loss_angle", *steps, "loss_before", "loss_task"]


def test_additions_to_ftml_are_each_alone_and_then_together() -> None:
    preset = PRESETS["pose"]("standard")
    made: Any = {name: preset.all_methods[name](preset.network, preset.loss) for name in ("ftml", *preset.extras)}
    last = (preset.tasks or 0) * (preset.reveals or 0) * preset.meta_steps - 1
    for name, learner in made.items():
        both = name == "ftml-plus"
        assert learner.options.max_tasks == (16 if name == "ftml-bounded" else None)
        assert learner.learn_lr == (both or name == "ftml-rates")
        assert learner.every_step == (both or name == "ftml-every")
        lr = lambda number: next(v for start, v in reversed(learner.rule.schedule) if start <= number)  # noqa: B023, E731
        assert lr(0) == pytest.approx(3e-3)
        assert (learner.inner_lr, learner.clip) == (0.03, 1.0)
        falls = both or name == "ftml-anneal"
        assert lr(last // 2) == pytest.approx(1.65e-3 if falls else 3e-3, rel=0.1)
        assert lr(last) == pytest.approx(3e-4 if falls else 3e-3, rel=0.02)


def test_tensorboard_gets_the_mean_error_of_each_size(no_figure, tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, *arguments):
            written.append(arguments)

        def flush(self): ...

        def close(self):
            written.append("closed")

    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    run_experiment(RunOptions("tiny", ("toe", "ftl"), seeds=2, tasks=1, tensorboard=True), tmp_path)
    mean = {}
    for row in read_records(tmp_path):
        mean.setdefault((row["method"], row["datapoints"]), []).append(row["loss"])
    expected = []
    for method in ("toe", "ftl"):
        expected.append((str(tmp_path / "tensorboard" / method), 0))
        expected += [(f"squared error after {n} datapoints", np.mean(mean[method, n]), 0) for n in (4, 8)]
        expected.append("closed")
    assert written == expected


def test_tensorboard_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"install metaleader\[tensorboard\], or leave it out"):
        run_experiment(RunOptions("tiny", tensorboard=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()
