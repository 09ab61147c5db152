"""The form of a meta-gradient: chosen by memory, saved with the learner, and used again."""

import json
from typing import Any

import oracles
import pytest
import torch
from torch import nn

import metaleader as ml
from metaleader.checks.trees import differences
from metaleader.engine import form as form_module
from metaleader.engine.form import form_of
from metaleader.engine.objective import Form


def learner(**options: Any) -> ml.FTML:
    """A learner that has seen three tasks."""
    given: dict[str, Any] = {"support": 3, "query": 3, "tasks_per_step": 5, "inner_steps": 3, "inner_lr": 0.1}
    model = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()  # noqa: E731
    made = ml.FTML(model, ml.losses.squared_error, **(given | options))
    for t in range(3):
        made.begin(f"task {t}")
        made.observe(oracles.normal(f"form {t}", 8, 4), oracles.normal(f"form y {t}", 8, 2), update=False)
    return made


def with_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(form_module, "memory_bytes", lambda device, **_: free)


def form(made: ml.FTML) -> Form:
    made.update(2)
    assert made.state.form is not None
    return made.state.form


def test_all_tasks_are_unrolled_where_memory_allows() -> None:
    chosen = form(learner())
    assert chosen[:2] == (True, None)
    assert 100 < chosen.operations < 5000


@pytest.mark.parametrize("steps", [0, 3, 20])
def test_less_memory_gives_smaller_chunks_then_the_adjoint_recursion(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    chosen = []
    for free in (10**9, 200_000, 50_000, 10_000, 1):
        with_memory(monkeypatch, free)
        chosen.append(form(learner(inner_steps=steps))[:2])
    assert chosen[0] == (True, None)
    assert chosen[-1] == (steps == 0, 1)
    assert len(set(chosen)) > (2 if steps else 1)


def test_a_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 1)
    assert form(learner(chunk=4))[:2] == (False, 4)
    assert form(learner(chunk=None))[:2] == (False, None)


@pytest.mark.parametrize("free", [10**9, 50_000, 1])
def test_forms_agree(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    expected = learner(chunk=None)
    expected.update(4)
    with_memory(monkeypatch, free)
    found = learner()
    found.update(4)
    torch.testing.assert_close(found.state.flat, expected.state.flat, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [ml.FTML, ml.TOE, ml.FTL, ml.Scratch])
def test_side_by_side_learners_choose_like_one(kind: Any) -> None:
    from metaleader.learners import update_together

    made = []
    for seed in range(2):
        one = kind(lambda: nn.Linear(4, 2).double(), ml.losses.squared_error, tasks_per_step=3, query=2, seed=seed)
        for t in range(2):
            one.begin(f"task {t}")
            one.observe(oracles.normal(f"side {t}", 14, 4), oracles.normal(f"side y {t}", 14, 2), update=False)
        made.append(one)
    update_together(made, 2)
    assert made[0].state.form == made[1].state.form
    assert made[0].state.form is not None


def test_the_form_is_saved_and_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """With other memory, a learner that goes on has the same bits."""
    with_memory(monkeypatch, 50_000)
    straight, stopped = learner(), learner()
    straight.update(6)
    stopped.update(3)
    stopped.save(tmp_path / "learner.safetensors")
    with_memory(monkeypatch, 10**9)
    loaded = ml.FTML.load(tmp_path / "learner.safetensors", stopped.model, ml.losses.squared_error)
    assert loaded.state.form == stopped.state.form
    assert loaded.state.form is not None
    assert loaded.state.form.chunk is not None
    loaded.update(3)
    assert not differences(loaded.state_dict(), straight.state_dict())


def test_states_without_a_form_continue_by_the_adjoint_recursion() -> None:
    """As learners of earlier versions did; before the first update a form is chosen."""
    one, other = learner(), learner()
    one.update(2)
    state = one.state_dict()
    del state["form"]
    other.load_state_dict(state)
    assert other.state.form is not None
    assert other.state.form[:2] == (False, None)
    fresh = learner().state_dict()
    assert "form" not in fresh
    other.load_state_dict(fresh)
    assert form(other)[:2] == (True, None)


def test_damaged_forms_are_refused() -> None:
    good = Form(True, 3, 100)._asdict()
    assert form_of(json.loads(json.dumps(good))) == Form(True, 3, 100)
    for name, value in (("unroll", 1), ("chunk", 0), ("chunk", True), ("chunk", "auto"), ("operations", None)):
        with pytest.raises(ValueError, match="is not the form of a gradient"):
            form_of(good | {name: value})


@pytest.mark.parametrize("chunk", [0, -1, "all", 2.0, True])
def test_bad_chunks_are_refused(chunk: Any) -> None:
    with pytest.raises(ValueError, match="chunk must be"):
        learner(chunk=chunk)
