"""One task whose data makes updates fail is set aside; everybody else goes on."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import metaleader as ml
from metaleader.checks.trees import differences, snapshot
from metaleader.tasks import rng

SIZES: Any = {"tasks_per_step": 5, "query": 4, "meta_steps": 3}


def made(kind: Any = ml.FTML, **settings: Any) -> Any:
    own = {"support": 4, "inner_steps": 3} if kind is ml.FTML and "adaptation" not in settings else {}
    own |= {"support": 4} if "adaptation" in settings else {}
    return kind(lambda: ml.models.mlp(2, 1, (5,)), ml.losses.squared_error, **(SIZES | own | settings))


def data(i: int, scale: float = 1.0) -> ml.Batch:
    x = torch.from_numpy(rng("outliers", i).standard_normal((10, 2))).float()
    return ml.Batch(x * scale, (torch.sin(x[:, :1]) + i % 3) * scale)


def observe(learner: ml.Learner, i: int, scale: float = 1.0, update: bool = True) -> None:
    learner.observe(*data(i, scale), task=f"customer {i}", update=update)


@pytest.mark.parametrize("kind", [ml.FTML, ml.TOE, ml.FTL])
def test_one_bad_customer(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is named and set aside, and the others learn as if it had never been there."""
    learner, never = made(kind), made(kind)
    bad = 1e3 if kind is ml.FTML else 1e20
    for i in range(20):
        if i == 7:
            learner.observe(*data(7, bad), task="bad", update=False)
        for one in (learner, never):
            observe(one, i)
    assert list(learner.set_aside) == ["bad"]
    assert "not finite" in learner.set_aside["bad"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "task 'bad' is set aside: its loss or gradient is not finite" in record.getMessage()
    assert learner.tasks["bad"] == 10
    assert not differences(never.state_dict()["params"], learner.state_dict()["params"])
    assert learner.step == never.step == 60
    assert learner.skipped == 0


def test_its_own_observation_is_kept() -> None:
    learner = made()
    for i in range(6):
        observe(learner, i)
    for i in range(10, 14):
        learner.observe(*data(i, 1e6), task="bad")
    assert list(learner.set_aside) == ["bad"]
    assert learner.tasks["bad"] == 40
    with pytest.raises(ValueError, match="the net adapted to task 'bad' is not finite"):
        learner.adapt(task="bad")


def test_readmit_and_forget() -> None:
    learner = made(meta_steps=6)
    for i in range(6):
        observe(learner, i)
    learner.observe(*data(9, 1e6), task="bad")
    learner.readmit("bad")
    assert learner.set_aside == {}
    with pytest.raises(ValueError, match="task 'bad' is not set aside; 0 tasks are"):
        learner.readmit("bad")
    learner.update()
    assert list(learner.set_aside) == ["bad"]
    learner.forget("bad")
    assert learner.set_aside == {}
    assert "bad" not in learner.tasks
    learner.update()


def test_saved_and_loaded(tmp_path: Path) -> None:
    learner = made()
    for i in range(6):
        observe(learner, i)
    learner.observe(*data(9, 1e6), task="bad")
    learner.skipped = 3
    learner.save(tmp_path / "a.safetensors")
    loaded = ml.FTML.load(tmp_path / "a.safetensors", lambda: ml.models.mlp(2, 1, (5,)), ml.losses.squared_error)
    assert loaded.set_aside == learner.set_aside
    for one in (learner, loaded):
        observe(one, 7)
        one.readmit("bad")
        observe(one, 8)
    assert not differences(snapshot(learner), snapshot(loaded))


def test_a_closed_round_is_set_aside_and_an_open_one_refused() -> None:
    learner = made()
    for i in range(5):
        learner.begin(f"round {i}")
        learner.observe(*data(i))
    learner.begin("bad")
    before = snapshot(learner)
    with pytest.raises(
        ValueError, match=r"not finite at update \d of 3, round 5 \(task 'bad'.*not finite alone: 'bad'\)"
    ):
        learner.observe(*data(9, 1e6))
    assert not differences(before, snapshot(learner))
    learner.observe(*data(9, 1e6), update=False)
    learner.begin("next")
    learner.observe(*data(6))
    learner.update(10)
    assert list(learner.set_aside) == ["bad"]


def test_the_only_task_is_refused() -> None:
    learner = made()
    before = snapshot(learner)
    with pytest.raises(ValueError, match=r"not finite.*drawn: 'bad'; not finite alone: 'bad'"):
        learner.observe(*data(0, 1e6), task="bad")
    assert not differences(before, snapshot(learner))


@pytest.mark.parametrize("settings", [{"meta_lr": 3e38}, {"inner_lr": 1e30}, {"meta_lr": 1e30, "optimizer": "sgd"}])
def test_a_diverging_learner_stops(settings: Any) -> None:
    """Nobody is set aside, the parameters are as before, and the next call draws others."""
    learner = made(**settings)
    for i in range(4):
        observe(learner, i, update=False)
    before = snapshot(learner)
    for number in (1, 2):
        with pytest.raises(ValueError, match=r"not finite at update \d of 3.*drawn: 'customer"):
            learner.update()
        assert learner.skipped == 3 * number
        assert not differences({**before, "skipped": 3 * number}, snapshot(learner))
    assert learner.set_aside == {}


def test_parameters_are_checked_after_the_last_update() -> None:
    learner = made(meta_lr=3e38, meta_steps=1)
    learner.observe(*data(0), task="a", update=False)
    with pytest.raises(ValueError, match="parameter is not finite at update 1 of 1"):
        learner.update()
    assert all(bool(torch.isfinite(value).all()) for value in learner.params.values())


def test_a_huge_gradient_that_spoils_the_parameters() -> None:
    """All losses are finite alone; without the task whose gradient is far longer than the others' the updates work."""
    learner = ml.TOE(
        lambda: nn.Linear(2, 1), ml.losses.squared_error, optimizer="sgd", meta_lr=0.01, meta_steps=20, query=4
    )
    for i in range(8):
        observe(learner, i, update=False)
    learner.observe(*data(8, 1e6), task="huge", update=False)
    learner.update()
    assert list(learner.set_aside) == ["huge"]
    assert "times as long as that of other tasks" in learner.set_aside["huge"]
    assert float(torch.cat([value.flatten() for value in learner.params.values()]).abs().max()) < 10


def test_a_solver_that_fails() -> None:
    learner = made(adaptation=ml.BayesianHead())
    for i in range(8):
        observe(learner, i, update=False)
    learner.observe(*data(8, 1e25), task="huge", update=False)
    learner.update(6)
    assert list(learner.set_aside) == ["huge"]
    for call in (
        lambda: learner.predict(data(0).x, task="huge"),
        lambda: learner.predict_many({"customer 1": data(0).x, "huge": data(0).x}),
    ):
        with pytest.raises(ValueError, match="the net adapted to task 'huge' is not finite"):
            call()
    assert learner.predict_many({"customer 1": data(0).x})["customer 1"].isfinite().all()


def test_a_wrong_task_gradient_sets_nobody_aside() -> None:
    class Wrong(ml.FTML):
        def task_gradient(self, params: Any, support: Any, query: Any) -> Any:
            return torch.zeros(2), params

    learner = made(Wrong)
    for i in range(4):
        observe(learner, i, update=False)
    before = snapshot(learner)
    with pytest.raises(ValueError, match="must return a scalar loss"):
        learner.update()
    assert not differences(before, snapshot(learner))


def test_several_bad_customers() -> None:
    learner = made()
    for i in range(24):
        observe(learner, i, 1e6 if i % 4 == 3 else 1.0)
    assert set(learner.set_aside) <= {f"customer {i}" for i in range(3, 24, 4)}
    assert len(learner.set_aside) > 2
    assert len(learner.tasks) == 24


def test_an_observe_that_fails_later_sets_nobody_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = made(meta_steps=10)
    for i in range(3):
        observe(learner, i)
    learner.observe(*data(9, 1e6), task="bad", update=False)
    before = snapshot(learner)
    set_aside = learner.memory.set_aside

    def interrupted(name: str, reason: str) -> None:
        set_aside(name, reason)
        raise KeyboardInterrupt

    monkeypatch.setattr(learner.memory, "set_aside", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learner.observe(*data(20), task="next")
    assert not differences(before, snapshot(learner))
    assert learner.set_aside == {}
