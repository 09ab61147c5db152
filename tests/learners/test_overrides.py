"""Whatever a subclass changes is used or refused, in every mode, with one learner or several side by side."""

import functools
import logging
import unittest.mock
from typing import Any

import pytest
import torch
from torch import nn

import metaleader as ml
from metaleader.checks.trees import differences, snapshot
from metaleader.engine.objective import Objective
from metaleader.evaluate import play_together
from metaleader.learners.learner import Definition
from metaleader.memory.by_class import ClassBuffer
from metaleader.nets.functional import Network

SETTINGS: Any = {"meta_steps": 1, "tasks_per_step": 3, "support": 3, "query": 3, "inner_lr": 0.02, "inner_steps": 1}


def net():
    return ml.models.mlp(1, 1, (6,)).double()


def stream(seed):
    def double(batch):
        return ml.Batch(batch.x.double(), batch.y.double())

    tasks = ml.streams.SinusoidStream(tasks=2, train=12, test=6, seed=seed)
    return [ml.Task(task.name, double(task.train), double(task.test)) for task in tasks]


def made(kind, seed=0, loss=ml.losses.squared_error, **settings):
    return kind(net, loss, seed=seed, **SETTINGS, **settings)


def played(learners):
    """The losses of learners side by side, in float64."""
    streams = [stream(learner.options.seed) for learner in learners]
    return [[record.loss for record in records] for records in play_together(learners, streams, 6)]


@functools.cache
def plain(seed):
    return torch.tensor(played([made(ml.FTML, seed)]), dtype=torch.float64)[:, 0]


def assert_used(kind, engine="eager", **settings):
    """Side by side as alone, and otherwise than FTML."""
    together = [made(kind, seed, engine=engine, **settings) for seed in range(2)]
    losses = torch.tensor(played(together), dtype=torch.float64).T
    for seed in range(2):
        alone = torch.tensor(played([made(kind, seed, **settings)]), dtype=torch.float64)[:, 0]
        torch.testing.assert_close(losses[seed], alone, rtol=1e-7, atol=1e-9)
        assert not torch.allclose(alone, plain(seed), rtol=1e-5)
    assert together[0].engine.mode == engine


class Defined(ml.FTML):
    def define(self):
        return super().define()._replace(which="past", updates_per_step=3)


class Observing(ml.FTML):
    def observe(self, x, y, *, task=None, ids=None, update=True):
        super().observe(x, y + 1, task=task, ids=ids, update=update)


class Updating(ml.FTML):
    def update(self, steps=None):
        super().update(5)


class Beginning(ml.FTML):
    def begin(self, name, classes=None):
        super().begin(name, classes)
        self.state = self.state._replace(flat=self.state.flat * 0.7)


class Adapting(ml.FTML):
    def adapt(self, *args: Any, **options: Any) -> Any:
        adapted = super().adapt(*args, **options)
        for module in adapted if isinstance(adapted, list) else [adapted]:
            for value in module.parameters():
                value.data *= 0.9
        return adapted


class Remembering(ml.FTML):
    """A memory of its own, with other draws."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.memory = SecondHalf()


class SecondHalf(ml.TaskBuffer):
    def draw(self, seed, *args, **options):
        return super().draw(seed + 1000, *args, **options)


class Networked(ml.FTML):
    """A network with another loss, put in place before the objective is defined."""

    def define(self):
        self.network = Absolute(self.network.module, self.loss)
        return super().define()


class Absolute(Network):
    def mean_loss(self, prediction, y):
        return (prediction - y).abs().mean()


class Measured(ml.FTML):
    """A gradient that reads a setting of its own."""

    def __init__(self, *args, weight=3.0, **settings):
        super().__init__(*args, **settings)
        self.weight = weight

    def task_gradient(self, params, support, query):
        loss, gradients = super().task_gradient(params, support, query)
        return loss, {name: value + self.weight * params[name] for name, value in gradients.items()}


@pytest.mark.parametrize("kind", [Defined, Observing, Updating, Beginning, Adapting, Remembering, Networked, Measured])
def test_overrides_are_used(kind):
    assert_used(kind)


@pytest.mark.parametrize("kind", [Measured, pytest.param(Networked, marks=pytest.mark.torture)])
def test_gradients_are_used_when_compiled(kind):
    assert_used(kind, engine="compiled")


def test_methods_of_one_object_are_used():
    learners = [made(ml.FTML, seed) for seed in range(2)]
    calls = []
    for learner in learners:
        wrapped = unittest.mock.Mock(side_effect=learner.observe)
        setattr(learner, "observe", wrapped)  # noqa: B010
        calls.append(wrapped)
    for seed, losses in enumerate(zip(*played(learners), strict=True)):
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), plain(seed))
    assert [wrapped.call_count for wrapped in calls] == [4, 4]


def test_a_memory_of_ones_own_is_kept_for_tasks_with_classes():
    class Classes(ClassBuffer):
        pass

    learner = ml.FTML(lambda: nn.Linear(2, 3), ml.losses.cross_entropy, **SETTINGS)
    learner.memory = memory = Classes()
    learner.begin("a", classes=[4, 5, 6])
    learner.observe(torch.rand(6, 2), torch.arange(6) % 3)
    assert learner.memory is memory
    assert learner.num_datapoints == 6


def test_state_is_in_the_file(tmp_path):
    class Counting(ml.FTML):
        calls = 0

        def state_dict(self, data=True):
            return super().state_dict(data) | {"calls": self.calls}

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.calls = state["calls"]

    learner = made(Counting)
    learner.calls = 7
    learner.save(tmp_path / "learner.safetensors")
    assert Counting.load(tmp_path / "learner.safetensors", net, ml.losses.squared_error).calls == 7


# Attributes that a task_gradient reads


class ReadsSeed(ml.FTML):
    def task_gradient(self, params, support, query):
        loss, gradients = super().task_gradient(params, support, query)
        return loss, {name: value * (1 + self.seed) for name, value in gradients.items()}


class ReadsOptions(ReadsSeed):
    def task_gradient(self, params, support, query):
        loss, gradients = ml.FTML.task_gradient(self, params, support, query)
        return loss, {name: value * (2 + self.options.seed) for name, value in gradients.items()}


class ReadsParams(ml.FTML):
    def task_gradient(self, params, support, query):
        loss, gradients = super().task_gradient(params, support, query)
        return loss, {name: value - 0.1 * self.params[name] for name, value in gradients.items()}


class ReadsInitialisation(ml.FTML):
    def task_gradient(self, params, support, query):
        loss, gradients = super().task_gradient(params, support, query)
        initial = self.network.params()
        return loss, {name: value + params[name] - initial[name] for name, value in gradients.items()}


class ReadsLate(ml.FTML):
    """Reads its state from the second round on, when it has an anchor."""

    anchor = None

    def begin(self, name, classes=None):
        super().begin(name, classes)
        if self.round:
            self.anchor = self.params

    def task_gradient(self, params, support, query):
        loss, gradients = super().task_gradient(params, support, query)
        if self.anchor is None:
            return loss, {name: 2 * value for name, value in gradients.items()}
        return loss, {name: value + params[name] - self.anchor[name] for name, value in gradients.items()}


class Counts(ml.FTML):
    """Changes a plain value, which the gradient reads."""

    strength = 1.0

    def begin(self, name, classes=None):
        super().begin(name, classes)
        self.strength *= 2 + self.options.seed

    def task_gradient(self, params, support, query):
        loss, gradients = super().task_gradient(params, support, query)
        return loss, {name: value + self.strength * params[name] for name, value in gradients.items()}


class Writes(ml.FTML):
    """Keeps its last loss, although a gradient must not change the learner."""

    last: Any = None

    def task_gradient(self, params, support, query):
        loss, gradients = super().task_gradient(params, support, query)
        self.last = loss
        return loss, {name: 2 * value for name, value in gradients.items()}


READERS = [ReadsSeed, ReadsOptions, ReadsParams, ReadsInitialisation, ReadsLate, Counts, Writes]
# The first of these are found before anything is compiled.
COMPILED = [pytest.param(kind, "compiled", marks=[pytest.mark.torture] * (kind in READERS[4:])) for kind in READERS[2:]]


@pytest.mark.parametrize(("kind", "engine"), [*((kind, "eager") for kind in READERS), *COMPILED])
def test_state_that_a_gradient_reads_is_that_of_its_learner(kind, engine, caplog):
    with caplog.at_level(logging.WARNING, "metaleader"):
        assert_used(kind, engine=engine, optimizer=torch.optim.SGD)
    assert f"{kind.__name__}.task_gradient uses self." in caplog.text


def test_different_settings_of_the_gradient_are_not_shared():
    learners = [made(Measured, seed, weight=3.0 * seed) for seed in range(2)]
    together = played(learners)
    for seed in range(2):
        alone = played([made(Measured, seed, weight=3.0 * seed)])
        torch.testing.assert_close([row[seed] for row in together], [row[0] for row in alone], rtol=1e-7, atol=1e-9)


# Networks and losses that differ between learners


class Random(nn.Module):
    """Features with random, fixed frequencies: a buffer that depends on the seed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(1, 8, dtype=torch.float64))
        self.head = nn.Linear(8, 1).double()

    def forward(self, x):
        return self.head(torch.cos(x @ self.frequencies))


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: ml.FTML(Random, ml.losses.squared_error, seed=seed, **SETTINGS),
        lambda seed: ml.FTML(net, lambda p, y: (p - y).square().mean(1) * (seed + 1), seed=seed, **SETTINGS),
        lambda seed: ml.FTML(net, ml.losses.squared_error, seed=seed, preprocess=lambda x: x + seed, **SETTINGS),
    ],
    ids=["buffers", "loss", "preprocess"],
)
def test_networks_that_differ_are_not_shared(make):
    together = [make(seed) for seed in range(2)]
    losses = [[record.loss for record in records] for records in play_together(together, [stream(0)] * 2, 6)]
    for seed in range(2):
        alone = make(seed)
        expected = [record.loss for record in ml.play(alone, stream(0), 6)]
        if seed == 0 or "preprocess" in str(make.__code__.co_names):
            torch.testing.assert_close([row[seed] for row in losses], expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(together[seed].state.flat, alone.state.flat, rtol=1e-7, atol=1e-9)


def test_functions_written_twice_are_shared():
    one, other = (ml.FTML(net, lambda p, y: (p - y).square().mean(1), seed=s, **SETTINGS) for s in range(2))
    assert one.network.is_like(other.network)
    assert not one.network.is_like(ml.FTML(net, ml.losses.squared_error, **SETTINGS).network)


# Refused


def test_what_would_not_be_used_is_refused():
    class Loss(ml.FTML):
        def loss_fn(self, params, batch):
            return super().loss_fn(params, batch) + 1

    with pytest.raises(ValueError, match="Loss overrides loss_fn"):
        made(Loss)

    class Predicts(ml.FTML):
        def predict(self, x, task=None, *, variance=False):
            return super().predict(x, task) + 1

    with pytest.raises(ValueError, match="Predicts overrides predict"):
        played([made(Predicts)])
    learner = Adapting(net, ml.losses.squared_error, adaptation=ml.BayesianHead())
    with pytest.raises(ValueError, match="Adapting overrides adapt"):
        learner.predict(torch.zeros(2, 1), variance=True)

    class OwnObjective(Objective):
        pass

    class Redefined(ml.FTML):
        def define(self):
            return Definition(OwnObjective(self.network))

    with pytest.raises(ValueError, match="must return an Objective"):
        made(Redefined)


@pytest.mark.parametrize("name", ["network", "definition", "loss", "options", "rule"])
def test_attributes_that_were_read_cannot_be_replaced(name):
    learner = made(ml.FTML)
    before = snapshot(learner)
    with pytest.raises(ValueError, match=f"{name} is set when a learner is built"):
        setattr(learner, name, getattr(learner, name))
    assert not differences(before, learner.state_dict())


@pytest.mark.parametrize("name", ["define", "task_gradient", "loss_fn"])
def test_methods_that_were_read_cannot_be_replaced(name):
    with pytest.raises(ValueError, match=f"{name} is a method of the class"):
        setattr(made(ml.FTML), name, print)


def test_definitions_that_differ_are_refused():
    learner = made(ml.FTML)
    other = ml.FTML(net, ml.losses.squared_error, **(SETTINGS | {"support": 4}))
    with pytest.raises(ValueError, match="same support"):
        list(play_together([learner, other], [stream(0)] * 2, 6))
