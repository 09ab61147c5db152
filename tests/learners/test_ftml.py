"""Learned inner step sizes: their gradient, their use in adapting, and their life with the learner."""

import math
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from torch import nn

import metaleader as ml
from metaleader.engine.engine import Engine
from metaleader.learners.measure import predict_together


def net() -> nn.Module:
    """With batch norm, and a scalar parameter, which has no dimension to flatten."""
    return nn.Sequential(
        nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6, track_running_stats=False), nn.Tanh(), Scale()
    ).double()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.linear(x)


def learner(**options: Any) -> ml.FTML:
    """A learner that has seen two tasks; one update is a plain gradient step."""
    given: dict[str, Any] = {"optimizer": torch.optim.SGD, "meta_lr": 0.5, "support": 3, "query": 3, "inner_steps": 3}
    made = ml.FTML(net, ml.losses.squared_error, learn_lr=True, tasks_per_step=2, **(given | options))
    for t in range(2):
        made.begin(f"task {t}")
        made.observe(oracles.normal(f"x {t}", 8, 3), oracles.normal(f"y {t}", 8, 2), update=False)
    return made


@pytest.mark.parametrize("every_step", [False, True])
@pytest.mark.parametrize("only", [None, "3.*"])
def test_an_update_follows_autograd_through_every_step(every_step: bool, only: str | None) -> None:
    made = learner(every_step=every_step, only=only)
    before, sizes = {name: value.clone() for name, value in made.params.items()}, made.step_sizes
    assert set(sizes) == {name for name in before if only is None or name.startswith("3.")}
    assert all(size == pytest.approx(0.1) for size in sizes.values())
    draw = made.memory.draw(made.options.seed, range(1), made.options.tasks_per_step, made.support, made.query)
    assert draw is not None
    support, query = (oracles.tree_map(lambda leaf: leaf[0], batch) for batch in made.memory.gather(draw))
    _, gradient, by_size = oracles.unrolled(
        made.network.loss_fn, before, support, query, sizes, 3, list(sizes), every_step=every_step
    )
    made.update(1)
    for name, value in before.items():
        torch.testing.assert_close(made.params[name], value - 0.5 * gradient[name], rtol=1e-9, atol=1e-12)
    for name, size in sizes.items():
        expected = size * math.exp(-0.5 * float(by_size[name]) * size)
        assert made.step_sizes[name] == pytest.approx(expected, rel=1e-9)
        assert made.step_sizes[name] != pytest.approx(size, rel=1e-6), "it must have moved for the test to say anything"


def test_adapting_takes_the_learned_sizes() -> None:
    made = learner(optimizer="adam", meta_lr=0.1)
    made.update(5)
    given = ml.FTML(net, ml.losses.squared_error, inner_lr=made.step_sizes, inner_steps=3)
    given.begin("again")
    given.observe(oracles.normal("x 1", 8, 3), oracles.normal("y 1", 8, 2), update=False)
    for name, value in given.params.items():
        value.copy_(made.params[name])
    x = oracles.normal("new", 5, 3)
    torch.testing.assert_close(made.adapt()(x), given.adapt()(x), rtol=1e-9, atol=1e-12)
    assert (made.adapt()(x) - made.adapt(steps=0)(x)).abs().max() > 1e-3


def test_predictions_side_by_side_are_those_of_the_adapted_nets() -> None:
    engine = Engine("eager")
    both = [learner(engine=engine, seed=seed, optimizer="adam", meta_lr=0.1) for seed in range(2)]
    for one in both:
        one.update(3)
    assert both[0].step_sizes != both[1].step_sizes
    x = oracles.normal("new", 5, 3)
    found = predict_together(both, [x, x], (3, 0, 5))
    assert found is not None
    for r, one in enumerate(both):
        for steps, adapted in zip((3, 0, 5), one.adapt(steps=[3, 0, 5], statistics="batch"), strict=True):
            torch.testing.assert_close(found[str(steps)][r], adapted(x).detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found["task"][r], one.adapt(3, "task")(x).detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_they_are_in_the_file(optimizer: str, tmp_path: Path) -> None:
    made = learner(optimizer=optimizer, meta_lr=0.05, every_step=True)
    made.update(3)
    made.save(tmp_path / "learner.safetensors")
    loaded = ml.FTML.load(tmp_path / "learner.safetensors", net, ml.losses.squared_error)
    assert loaded.learn_lr
    assert loaded.every_step
    assert loaded.step_sizes == made.step_sizes
    made.update(2)
    loaded.update(2)
    assert loaded.step_sizes == made.step_sizes
    assert all(torch.equal(loaded.params[name], value) for name, value in made.params.items())


def test_given_sizes_are_shown_too() -> None:
    sizes = ml.FTML(net, ml.losses.squared_error, inner_lr=0.3, only="last").step_sizes
    assert sizes == {"3.linear.weight": 0.3, "3.linear.bias": 0.3}


@pytest.mark.parametrize("options", [{"first_order": True}, {"inner_steps": 0}, {"inner_lr": 0.0}])
def test_what_leaves_nothing_to_learn_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="learn_lr needs inner steps"):
        ml.FTML(net, ml.losses.squared_error, learn_lr=True, **options)
