"""max_tasks=1, a streaming learner: its regret on quadratics is that of online gradient descent in the theory."""

from typing import Any

import pytest
import torch
from torch import nn

import metaleader as ml
from metaleader.checks import check_learner
from metaleader.theory.families import draw
from metaleader.theory.online import STREAMING, simulate

SMALL: Any = {"meta_steps": 1, "tasks_per_step": 2, "support": 2, "query": 2, "inner_lr": 0.05, "inner_steps": 2}


class Quadratic(nn.Module):
    """The value at w of the quadratics in x: one datapoint is one function."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        return 0.5 * torch.einsum("nij,i,j->n", x["A"], self.w, self.w) + x["b"] @ self.w


class Projected(torch.optim.SGD):
    """Gradient descent with a projection onto a ball."""

    radius = 0.0

    def step(self, closure=None):
        super().step()
        (w,) = self.param_groups[0]["params"]
        w.mul_((self.radius / w.norm()).clamp(max=1))


@pytest.mark.parametrize("family", ["stationary", "drifting", "correlated"])
def test_regret_on_quadratics_is_that_of_the_theory(family):
    rounds = 40
    pairs = draw(family, rounds, 1)
    expected = simulate(pairs)
    Projected.radius, mu = expected.constants.radius, expected.constants.meta_mu
    stream = []
    for t in range(rounds):
        part = slice(t, t + 1)
        batch = ml.Batch({"A": pairs.query.A[0, part], "b": pairs.query.b[0, part]}, pairs.query.c[0, part])
        stream.append(ml.Task(str(t), batch, batch))
    learner = ml.FTML(
        Quadratic,
        lambda prediction, c: prediction + c,
        max_tasks=1,
        optimizer=Projected,
        meta_lr=[(t, 1 / (mu * (t + 1))) for t in range(rounds)],
        **(SMALL | {"tasks_per_step": 1, "support": 1, "query": 1, "inner_lr": expected.alpha, "inner_steps": 1}),
    )
    losses = [record.loss for record in ml.play(learner, stream, 1, regret=True, steps=1)]
    sums = pairs.query.adapted(expected.alpha).cumsum(1)
    regret = torch.tensor(losses, dtype=torch.float64).cumsum(0) - sums.value(sums.minimiser())[0]
    torch.testing.assert_close(regret, expected.regret[STREAMING][0], rtol=1e-8, atol=1e-8)
    assert bool((regret <= expected.streaming_bound).all())


def mlp(**settings):
    return ml.FTML(lambda: ml.models.mlp(1, 1, (6,)), ml.losses.squared_error, **(SMALL | {"max_tasks": 1} | settings))


STREAM = ml.streams.SinusoidStream(tasks=4, train=12, test=6)


def test_no_data_of_past_tasks_is_kept():
    learner = mlp()
    for t, task in enumerate(STREAM):
        learner.begin(task.name)
        assert learner.tasks == {}
        before = learner.step
        learner.update()
        assert learner.step == before, "there is nothing to learn from"
        learner.observe(*task.train)
        assert learner.tasks == {task.name: 12}
        assert learner.memory.store.length == 12
        assert learner.step == t + 1
        assert learner.adapt()(task.test.x).shape == (6, 1)
    with pytest.raises(ValueError, match="3 tasks were dropped by max_tasks=1"):
        learner.adapt(task=STREAM[0].name)


def test_in_the_regret_protocol_it_learns_from_each_task_before_the_next():
    learner, other = mlp(), mlp()
    for _ in ml.play(learner, STREAM, 6, regret=True):
        pass
    for t, task in enumerate(STREAM):
        other.begin(task.name)
        other.observe(*task.train, update=False)
        if t < len(STREAM) - 1:
            other.update()
            other.update()
    assert learner.step == 2 * (len(STREAM) - 1)
    assert torch.equal(learner.state.flat, other.state.flat)


def test_the_contract():
    check_learner(mlp, STREAM)


def test_data_of_named_tasks_replaces_each_other():
    learner = mlp()
    for task in STREAM:
        learner.observe(*task.train, task=task.name)
        assert learner.tasks == {task.name: 12}
    learner.begin("round")
    with pytest.raises(ValueError, match="keeps the open round alone"):
        learner.observe(*STREAM[0].train, task="other")
    assert learner.tasks == {}


def test_follow_the_leader_needs_past_tasks():
    with pytest.raises(ValueError, match="FTL learns from past tasks, of which max_tasks=1 keeps none"):
        ml.FTL(lambda: ml.models.mlp(1, 1), ml.losses.squared_error, max_tasks=1)
