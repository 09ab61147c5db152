"""The public checks over all of our learners and streams, and learners and streams that each check must catch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import metaleader as ml
from metaleader import checks
from metaleader.checks import learners as learner_checks
from metaleader.checks import streams as stream_checks
from metaleader.memory.by_class import ClassBuffer
from metaleader.tasks import rng

SMALL: Any = {"meta_steps": 1, "tasks_per_step": 2, "query": 2, "seed": 3}
INNER: Any = {"inner_lr": 0.05, "inner_steps": 2}
LEARNERS: dict[str, Callable[..., ml.Learner]] = {
    "ftml": functools.partial(ml.FTML, **SMALL, **INNER, support=2),
    "ftml-last": functools.partial(ml.FTML, **SMALL, **INNER, support=2, only="last"),
    "ftml-first-order": functools.partial(ml.FTML, **SMALL, **INNER, support=2, first_order=True),
    "toe": functools.partial(ml.TOE, **SMALL),
    "ftl": functools.partial(ml.FTL, **SMALL, **INNER),
    "scratch": functools.partial(ml.Scratch, **SMALL),
}


class Images:
    """Uint8 images of three classes, a few a task."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, t: int) -> ml.Task:
        if not 0 <= t < 2:
            raise IndexError(t)
        draw = rng("test images", t)

        def batch(num: int) -> ml.Batch:
            y = torch.from_numpy(draw.integers(3, size=num))
            noise = torch.from_numpy(draw.integers(64, size=(num, 1, 4, 4)))
            return ml.Batch((noise + 60 * y.view(-1, 1, 1, 1)).to(torch.uint8), y)

        return ml.Task(f"task {t}", batch(8), batch(6))


def conv_net(ways: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2, padding=1),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(8, ways),
    )


def labelled(*images: int) -> ml.streams.Labelled:
    draw = rng("n-way", 0)
    return ml.streams.Labelled(
        draw.integers(0, 256, (80, *images), dtype=np.uint8),
        np.arange(80) % 8,
        draw.integers(0, 256, (40, *images), dtype=np.uint8),
        np.arange(40) % 8,
    )


SINUSOIDS = ml.streams.SinusoidStream(tasks=3, train=20, test=10, noise=0.1, seed=1)
N_WAY = ml.streams.NWayStream(labelled(1, 4, 4), ways=2, per_class=7)
SETTINGS = {
    "mlp": (lambda: ml.models.mlp(1, 1, (6,)), ml.losses.squared_error, SINUSOIDS),
    "conv": (conv_net, functools.partial(ml.losses.cross_entropy, smoothing=0.1), Images()),
    # The learners draw 2 + 2 datapoints a task: one of each class.
    "n-way": (lambda: conv_net(2), ml.losses.cross_entropy, N_WAY),
}


@pytest.mark.parametrize("check", checks.LEARNER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_our_learners(setting: str, learner: str, check: Callable[..., None]) -> None:
    model, loss, stream = SETTINGS[setting]
    check(lambda: LEARNERS[learner](model, loss), stream)


def test_other_optimisers_and_functions_of_the_user() -> None:
    model, loss = ml.models.mlp(1, 1, (6,)), ml.losses.squared_error  # a module: its weights are the initialisation
    options: Any = {
        "optimizer": torch.optim.AdamW,
        "weights": ml.recency(2),
        "preprocess": lambda x: x / 5,
        "clip": 1.0,
        "support": 2,
        "meta_lr": [(0, 0.01), (2, 0.001)],
    }
    checks.check_learner(lambda: ml.FTML(model, loss, **options, **INNER, **SMALL), SINUSOIDS)


@pytest.mark.parametrize(
    "stream",
    [
        SINUSOIDS,
        ml.streams.SinusoidStream(tasks=1, train=1, test=1),
        ml.streams.SinusoidStream(tasks=20, drift=0.1),
        Images(),
        [SINUSOIDS[t] for t in range(3)],
        ml.streams.SinusoidStream(tasks=5, order="amplitude"),
        ml.streams.QuadraticStream(tasks=5),
        ml.streams.make_stream("rainbow-digits", tasks=5),
        ml.streams.NWayStream(labelled(3, 8, 8), ways=3, per_class=5),
        ml.streams.ArrayStream({str(t): SINUSOIDS[t].train._asdict() for t in range(3)}),
    ],
    ids=["sinusoid", "one", "drift", "images", "list", "order", "quadratic", "digits", "n-way", "arrays"],
)
@pytest.mark.parametrize("check", checks.STREAM_CHECKS, ids=lambda check: check.__name__)
def test_our_streams(check: Callable[..., None], stream: Any) -> None:
    check(stream)


def test_every_check_says_what_is_required() -> None:
    for check in (*checks.LEARNER_CHECKS, *checks.STREAM_CHECKS):
        assert check.__doc__, check
        assert check.__doc__.splitlines()[0].rstrip().endswith("."), check


# Learners that are wrong in one way each. A check that cannot fail is worth nothing.


class AdaptTrains(ml.FTML):
    """Hands out a net that shares the learner's parameters."""

    def adapt(self, *args: Any, **options: Any) -> Any:
        nets = super().adapt(*args, **options)
        for net in nets if isinstance(nets, list) else [nets]:
            for name, value in net.named_parameters():
                value.data = self.params[name]
        return nets


class GlobalRandomness(ml.FTML):
    """Draws from torch's global generator."""

    def update(self, steps: int | None = None) -> None:
        super().update(steps)
        self.params["head.bias"] += 0.01 * torch.randn(())


class CountsQuestions(ml.FTML):
    """Draws other data after it was asked to adapt, without a trace in its state."""

    def adapt(self, *args: Any, **options: Any) -> Any:
        vars(self)["options"] = dataclasses.replace(self.options, seed=self.options.seed + 1)
        return super().adapt(*args, **options)


class ForgetsStep(ml.FTML):
    """Restores everything but the number of updates."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({**state, "step": 0})


class SavesSingle(ml.FTML):
    """Loses digits on the way to the file."""

    def save(self, path: Any) -> None:
        for value in self.params.values():
            value.copy_(value.half().float())
        super().save(path)
        self.params["head.bias"] += 1e-6


class AdaptsOnThePast(ml.FTML):
    """Adapts although there is no data of the task."""

    def adapt(self, *args: Any, **options: Any) -> Any:
        nets = super().adapt(*args, **options)
        for net in nets if isinstance(nets, list) else [nets]:
            for value in net.parameters():
                value.data *= 0.99
        return nets


class AlwaysUpdates(ml.FTML):
    """Does not listen to update=False."""

    def observe(self, x: Any, y: Any, *, task: Any = None, ids: Any = None, update: bool = True) -> None:
        super().observe(x, y, update=True)


class NeverUpdates(ml.FTML):
    """Learns nothing at all."""

    def update(self, steps: int | None = None) -> None:
        pass


class LearnsBeforeItLooks(ml.FTML):
    """Checks the data too late."""

    def observe(self, x: Any, y: Any, *, task: Any = None, ids: Any = None, update: bool = True) -> None:
        self.round += 1
        super().observe(x, y, update=update)


class RefusesNothing(ml.FTML):
    """Drops what it cannot use in silence."""

    def observe(self, x: Any, y: Any, *, task: Any = None, ids: Any = None, update: bool = True) -> None:
        try:
            super().observe(x, y, update=update)
        except ValueError:
            return


class FailsOtherwise(ml.FTML):
    """Refuses with an error that no user's code expects."""

    def observe(self, x: Any, y: Any, *, task: Any = None, ids: Any = None, update: bool = True) -> None:
        try:
            super().observe(x, y, update=update)
        except ValueError as error:
            raise RuntimeError from error


class LearnsFromTheTest(ml.FTML):
    """Takes what its nets are called on for training data."""

    def adapt(self, *args: Any, **options: Any) -> Any:
        nets = super().adapt(*args, **options)

        def steal(module: nn.Module, args: Any) -> None:
            self.params["head.bias"] += 1e-3 * args[0].mean()

        for net in nets if isinstance(nets, list) else [nets]:
            net.register_forward_pre_hook(steal)
        return nets


class SharesState(ml.FTML):
    """Counts rounds in the class, where learners side by side count for each other."""

    rounds = 0

    def begin(self, name: str, classes: Any = None) -> None:
        super().begin(name, classes)
        type(self).rounds += 1
        self.state = self.state._replace(flat=self.state.flat + 0.01 * self.rounds)


BROKEN = [
    (AdaptTrains, learner_checks.adapt_leaves_the_learner),
    (GlobalRandomness, learner_checks.same_seed_same_results),
    (CountsQuestions, learner_checks.queries_change_nothing),
    (ForgetsStep, learner_checks.state_dict_continues),
    (SavesSingle, learner_checks.save_continues),
    (AdaptsOnThePast, learner_checks.adapt_before_data_is_the_initialisation),
    (AlwaysUpdates, learner_checks.observe_without_update_only_stores),
    (NeverUpdates, learner_checks.observe_without_update_only_stores),
    (LearnsBeforeItLooks, learner_checks.refused_data_changes_nothing),
    (RefusesNothing, learner_checks.refused_data_changes_nothing),
    (FailsOtherwise, learner_checks.refused_data_changes_nothing),
    (LearnsFromTheTest, learner_checks.held_out_data_is_untouched),
    (SharesState, learner_checks.side_by_side_as_alone),
]


def test_a_network_that_flattens_its_inputs() -> None:
    net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3))  # noqa: E731
    checks.check_learner(lambda: ml.FTML(net, ml.losses.cross_entropy, support=2, **INNER, **SMALL), Images())


def test_a_setting_that_is_lost_in_the_file() -> None:
    class Keeps(ml.FTML):
        def __init__(self, *args: Any, keep: int = 2, **common: Any) -> None:
            super().__init__(*args, **common)
            self.kept = keep

    make = functools.partial(Keeps, lambda: ml.models.mlp(1, 1), ml.losses.squared_error, **INNER, **SMALL)
    learner_checks.save_continues(make, SINUSOIDS)
    with pytest.raises(AssertionError, match=r"kept of the loaded learner differ: store each argument"):
        learner_checks.save_continues(lambda: make(keep=4), SINUSOIDS)


@pytest.mark.parametrize(("learner", "check"), BROKEN, ids=[broken.__name__ for broken, _ in BROKEN])
def test_a_broken_learner_is_caught(learner: type[ml.FTML], check: Callable[..., None]) -> None:
    def make() -> ml.Learner:
        return learner(lambda: ml.models.mlp(1, 1, (6,)), ml.losses.squared_error, support=2, **INNER, **SMALL)

    with pytest.raises(AssertionError):
        check(make, SINUSOIDS)
    with pytest.raises(AssertionError):
        checks.check_learner(make, SINUSOIDS)


class DropsIds(ml.FTML):
    """Keeps an image anew each time it is shown."""

    def observe(self, x: Any, y: Any, *, task: Any = None, ids: Any = None, update: bool = True) -> None:
        super().observe(x, y, update=update)


class ForgetsIds(ml.FTML):
    """Restores the images, but not which they are."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        if isinstance(self.memory, ClassBuffer):
            self.memory._images.position_of.clear()


class TakesTasksOfBothKinds(ml.FTML):
    """Begins again from nothing when a task has no classes."""

    def begin(self, name: str, classes: Any = None) -> None:
        if classes is None and self.round >= 0:
            self.load_state_dict(self.untouched)
            return
        if self.round < 0:
            self.untouched = self.state_dict()
        super().begin(name, classes)


BROKEN_N_WAY = [
    (DropsIds, learner_checks.refused_data_changes_nothing, "fewer ids than datapoints: not refused"),
    (ForgetsIds, learner_checks.state_dict_continues, "continuing differs"),
    (TakesTasksOfBothKinds, learner_checks.refused_data_changes_nothing, "a task without classes .*: not refused"),
]


@pytest.mark.parametrize(("learner", "check", "message"), BROKEN_N_WAY, ids=[b.__name__ for b, _, _ in BROKEN_N_WAY])
def test_a_learner_broken_for_n_way_tasks_is_caught(
    learner: type[ml.FTML], check: Callable[..., None], message: str
) -> None:
    def make() -> ml.Learner:
        return learner(lambda: conv_net(2), ml.losses.cross_entropy, support=2, **INNER, **SMALL)

    with pytest.raises(AssertionError, match=message):
        check(make, N_WAY)


def test_every_learner_check_is_known_to_fail() -> None:
    assert {check for _, check in BROKEN} == set(checks.LEARNER_CHECKS)


# Streams that are wrong in one way each.


class Sinusoids:
    """A stream to break."""

    def __len__(self) -> int:
        return len(SINUSOIDS)

    def __getitem__(self, t: int) -> Any:
        return SINUSOIDS[t]


class Endless(Sinusoids):
    def __getitem__(self, t: int) -> Any:
        return SINUSOIDS[t % len(SINUSOIDS)]


class Longer(Sinusoids):
    def __len__(self) -> int:
        return len(SINUSOIDS) + 1


class Empty(Sinusoids):
    def __len__(self) -> int:
        return 0


class Pairs(Sinusoids):
    def __getitem__(self, t: int) -> Any:
        return SINUSOIDS[t].train


class Numbered(Sinusoids):
    def __getitem__(self, t: int) -> Any:
        task = SINUSOIDS[t]
        return ml.Task(t, task.train, task.test)  # pyright: ignore[reportArgumentType]


class Wider(Sinusoids):
    def __getitem__(self, t: int) -> Any:
        task = SINUSOIDS[t]
        return ml.Task(task.name, task.train, ml.Batch(task.test.x.repeat(1, 1 + t), task.test.y))


class Restless(Sinusoids):
    def __init__(self) -> None:
        self.asked = 0

    def __getitem__(self, t: int) -> Any:
        self.asked += 1
        task = SINUSOIDS[t]
        return ml.Task(task.name, ml.Batch(task.train.x, task.train.y + self.asked), task.test)


class Leaky(Sinusoids):
    def __getitem__(self, t: int) -> Any:
        task = SINUSOIDS[t]
        test = ml.Batch(*(torch.cat([new, old[3:4]]) for new, old in zip(task.test, task.train, strict=True)))
        return ml.Task(task.name, task.train, test)


BROKEN_STREAMS = [
    (Empty, stream_checks.length_matches_iteration, "no tasks"),
    (Endless, stream_checks.length_matches_iteration, "IndexError"),
    (Longer, stream_checks.length_matches_iteration, "iteration gave 3"),
    (Pairs, stream_checks.tasks_are_valid, "Batch, not a Task"),
    (Numbered, stream_checks.tasks_are_valid, "not a string"),
    (Wider, stream_checks.tasks_are_valid, "rows of"),
    (Restless, stream_checks.tasks_stay_the_same, "train/1"),
    (Leaky, stream_checks.train_and_test_are_disjoint, "1 datapoints"),
]


@pytest.mark.parametrize(("stream", "check", "message"), BROKEN_STREAMS, ids=[s.__name__ for s, _, _ in BROKEN_STREAMS])
def test_a_broken_stream_is_caught(stream: type[Any], check: Callable[..., None], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(stream())
    with pytest.raises((AssertionError, AttributeError)):
        checks.check_stream(stream())


def test_every_stream_check_is_known_to_fail() -> None:
    assert {check for _, check, _ in BROKEN_STREAMS} == set(checks.STREAM_CHECKS)
