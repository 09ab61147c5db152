"""Limits of memory with every learner: what they change, files, sessions, and rows on the disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import batch, make
from torch import nn

import metaleader as ml
from metaleader.checks.trees import differences

KINDS: dict[str, Any] = {"ftml": ml.FTML, "ftl": ml.FTL, "toe": ml.TOE, "scratch": ml.Scratch}
ROW = 12  # bytes of a datapoint of `batch`
LIMITS: dict[str, dict[str, Any]] = {
    "newest": {"max_datapoints": 4},
    "reservoir": {"max_datapoints": 4, "reservoir": True},
    "bytes": {"max_bytes": 12 * ROW},
}


def net() -> nn.Module:
    return ml.models.mlp(2, 1, (6,))


def learner(kind: str, **settings: Any) -> ml.Learner:
    sizes: dict[str, Any] = {"meta_steps": 2, "tasks_per_step": 3, "query": 2}
    sizes |= {"support": 2, "inner_steps": 2, "inner_lr": 0.01} if kind == "ftml" else {}
    return KINDS[kind](net, ml.losses.squared_error, **sizes, **settings)


def play(one: ml.Learner, rounds: range) -> ml.Learner:
    for t in rounds:
        one.begin(f"task {t % 4}")
        for i in range(3):
            one.observe(*batch(10 * t + i))
        if not one.restarts:
            one.observe(*batch(1000 + t, rows=2), task=f"customer {t % 2}")
    return one


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", LIMITS)
def test_a_learner_with_limits_continues_from_its_file(kind: str, limits: str, tmp_path: Path) -> None:
    few = play(learner(kind, **LIMITS[limits]), range(4))
    few.save(tmp_path / "few")
    loaded = KINDS[kind].load(tmp_path / "few", net, ml.losses.squared_error)
    assert loaded.options == few.options
    for one in (few, loaded):
        play(one, range(4, 7))
    assert not differences(few.state_dict(), loaded.state_dict())
    # A limit that is never reached changes nothing; one that is changes the draws.
    every, enough = (play(learner(kind, **{"max_datapoints": m, "max_bytes": m}), range(7)) for m in (None, 10**6))
    assert torch.equal(every.state.flat, enough.state.flat)
    assert not torch.equal(every.state.flat, few.state.flat)
    assert few.memory.num_bytes <= 12 * ROW or limits != "bytes"
    assert limits == "bytes" or sum(few.tasks.values()) <= 4 * len(few.memory.state_dict()["names"])


def test_an_observation_that_fails_leaves_what_it_would_replace() -> None:
    one = play(learner("ftml", max_datapoints=3), range(2))
    one.begin("bad")
    before = one.state_dict()
    x, y = batch(0)
    with pytest.raises(ValueError, match="not finite"):
        one.observe(x, y * 1e30)
    assert not differences(before, one.state_dict())
    one.observe(*batch(77, rows=5), task="customer 0")
    assert one.tasks["customer 0"] == 3


def test_n_way_tasks_with_limits(tmp_path: Path) -> None:
    def images(num: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(num)
        return torch.randn(6, 2, generator=generator), torch.arange(6) % 3

    def build(**limits: Any) -> ml.FTML:
        sizes: dict[str, Any] = {"meta_steps": 2, "tasks_per_step": 2, "support": 6, "query": 6}
        return ml.FTML(lambda: ml.models.mlp(2, 3, (6,)), ml.losses.cross_entropy, **sizes, **limits)

    def begin(one: ml.FTML, rounds: range) -> None:
        for t in rounds:
            one.begin(str(t), classes=[t % 5, (t + 1) % 5, 7][: 2 + t % 2])
            x, y = images(t)
            keep = y < 2 + t % 2
            one.observe(x[keep], y[keep])

    few = build(max_datapoints=3, reservoir=True)
    begin(few, range(6))
    few.save(tmp_path / "few")
    loaded = ml.FTML.load(tmp_path / "few", lambda: ml.models.mlp(2, 3, (6,)), ml.losses.cross_entropy)
    for one in (few, loaded):
        begin(one, range(6, 9))
    assert not differences(few.state_dict(), loaded.state_dict())
    assert few.memory.num_bytes <= 6 * 3 * 16
    with pytest.raises(ValueError, match=r"images by class.* limit the images with max_datapoints \(of each class\)"):
        build(max_tasks=3).begin("a", classes=[0, 1])


@pytest.mark.parametrize("limits", LIMITS)
def test_a_session_with_limits_is_recovered(limits: str, tmp_path: Path) -> None:
    """After a stop at any point the state is that of a session that never stopped; status shows the bytes."""
    settings = LIMITS[limits]
    with ml.Session(tmp_path / "a", lambda: make(**settings), updates="inline") as session:
        for i in range(12):
            session.observe(*batch(i), task=f"customer {i % 5}")
            if i in (4, 8):
                session._updater.write_checkpoint()
        status = session.status()
        assert status["memory_bytes"] == status["datapoints"] * ROW == session.learner.memory.num_bytes
        expected = session.learner.state_dict()
        session.backup(tmp_path / "b")
    for checkpoint in sorted((tmp_path / "a").glob("checkpoint-*"))[1:]:
        checkpoint.unlink()
    for name in "ab":
        with ml.Session(tmp_path / name, lambda: make(**settings), updates="inline") as again:
            assert not differences(expected, again.learner.state_dict())
            before = again.status()["datapoints"]
            again.forget("customer 1")
            assert again.status()["datapoints"] < before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_datapoints": 1}, "max_datapoints must be an integer of at least 2, or None to keep all; got 1"),
        ({"max_bytes": 0.5}, "max_bytes must be an integer of at least 1"),
        ({"reservoir": True}, "reservoir=True has no effect without max_datapoints or max_bytes"),
        ({"reservoir": 1, "max_bytes": 99}, "reservoir must be True or False, got 1"),
        ({"max_datapoint": 3}, "did you mean max_datapoints"),
    ],
)
def test_bad_limits(settings: dict[str, Any], message: str) -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match=message):
            learner(kind, **settings)
