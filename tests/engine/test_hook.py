"""Gradients of a user's own: batched or looped, they equal the ten-line loop; wrong ones are refused."""

import copy
import logging

import pytest
import torch

import metaleader as ml
from metaleader.evaluate import play_together
from metaleader.tasks import double

SETTINGS = {"meta_steps": 3, "tasks_per_step": 4, "support": 5, "query": 5, "inner_lr": 0.02, "inner_steps": 2}


def net():
    return ml.models.mlp(1, 1, (8,)).double()


def streams(num):
    return [
        [
            ml.Task(task.name, train=ml.Batch(*map(double, task.train)), test=ml.Batch(*map(double, task.test)))
            for task in ml.streams.SinusoidStream(tasks=3, train=20, test=10, seed=seed)
        ]
        for seed in range(num)
    ]


class Inherited(ml.FTML):
    def task_gradient(self, params, support, query):
        return super().task_gradient(params, support, query)


class Unrolled(ml.FTML):
    """FTML by plain autograd, which vmap does not support."""

    def task_gradient(self, params, support, query):
        leaves = {name: value.requires_grad_() for name, value in params.items()}
        loss = self.loss_fn(ml.adapt(self.loss_fn, leaves, support, self.inner_lr, self.inner_steps), query)
        return loss, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


class Reptile(ml.FTML):
    def task_gradient(self, params, support, query):
        adapted = ml.adapt(self.loss_fn, params, support, self.inner_lr, self.inner_steps)
        return self.loss_fn(adapted, query), {name: params[name] - adapted[name] for name in params}


class Anchored(ml.FTML):
    """Pulled to the weights at the start of the round: a tensor of its own for each learner."""

    def begin(self, name, classes=None):
        super().begin(name, classes)
        self.anchor = self.params

    def task_gradient(self, params, support, query):
        loss, gradients = super().task_gradient(params, support, query)
        return loss, {name: value + 0.3 * (params[name] - self.anchor[name]) for name, value in gradients.items()}


class Decaying(ml.FTML):
    """Reads the round, a plain value that changes."""

    def task_gradient(self, params, support, query):
        loss, gradients = super().task_gradient(params, support, query)
        return loss, {name: value / (1 + self.round) for name, value in gradients.items()}


def played(kind, num, **settings):
    learners = [kind(net, ml.losses.squared_error, seed=seed, **SETTINGS, **settings) for seed in range(num)]
    for _ in play_together(learners, streams(num), 10):
        pass
    return learners


def assert_close(one, other):
    for name, value in one.params.items():
        torch.testing.assert_close(value, other.params[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("num", [1, 2])
def test_inherited_and_looped_gradients_equal_ftml(num, caplog):
    expected = played(ml.FTML, num)
    for kind in (Inherited, Unrolled):
        with caplog.at_level(logging.WARNING, "metaleader"):
            for one, other in zip(played(kind, num), expected, strict=True):
                assert_close(one, other)
    assert "Unrolled.task_gradient runs as a loop over tasks" in caplog.text
    assert "Inherited" not in caplog.text


@pytest.mark.parametrize("kind", [Reptile, Anchored, Decaying])
def test_seeds_side_by_side_equal_one_at_a_time(kind):
    together = played(kind, 2)
    for seed in range(2):
        alone = kind(net, ml.losses.squared_error, seed=seed, **SETTINGS)
        for _ in ml.play(alone, streams(2)[seed], 10):
            pass
        assert_close(together[seed], alone)
        assert not torch.allclose(alone.state.flat, played(ml.FTML, 2)[seed].state.flat)


def test_it_is_used_for_networks_with_a_fast_path():
    class Zero(ml.FTML):
        def task_gradient(self, params, support, query):
            return self.loss_fn(params, query), {name: torch.zeros_like(value) for name, value in params.items()}

    stream = ml.streams.rainbow_digits(tasks=2, train=20, test=10)
    learner = Zero(lambda: ml.models.conv_net(10, image_size=16, filters=4, layers=2), ml.losses.cross_entropy)
    before = copy.deepcopy(learner.params)
    for _ in ml.play(learner, stream, 20):
        pass
    assert learner.step > 0
    torch.testing.assert_close(learner.params, before, rtol=0, atol=0)


def test_chunks_change_only_rounding():
    assert_close(played(Reptile, 1)[0], played(Reptile, 1, chunk=3)[0])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss, gradients: loss, "must return .loss, gradients"),
        (lambda loss, gradients: (loss[None], gradients), "scalar loss of one task, got shape"),
        (lambda loss, gradients: (loss, {}), "missing"),
        (lambda loss, gradients: (loss, gradients | {"w": loss}), "unknown .'w'."),
        (lambda loss, gradients: (loss, {n: v[None] for n, v in gradients.items()}), "must be of shape"),
        (lambda loss, gradients: 1 / 0, "division by zero"),
    ],
)
def test_wrong_results_are_refused(result, message):
    class Wrong(ml.FTML):
        def task_gradient(self, params, support, query):
            return result(*super().task_gradient(params, support, query))

    learner = Wrong(net, ml.losses.squared_error, **SETTINGS)
    learner.begin("a")
    with pytest.raises(ValueError, match=message):
        learner.observe(torch.rand(10, 1).double(), torch.rand(10, 1).double())
    assert learner.num_datapoints == 0


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="first_order would have no effect"):
        Reptile(net, ml.losses.squared_error, first_order=True)
    with pytest.raises(ValueError, match="dropout"):
        Reptile(lambda: torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.1)), ml.losses.squared_error)
