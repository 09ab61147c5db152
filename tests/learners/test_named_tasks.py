"""Tasks in any order: `observe(task=)`, `adapt(task=)`, `predict`, `predict_many`, `forget` and `tasks`."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import metaleader as ml
from metaleader.checks.trees import differences, snapshot
from metaleader.tasks import rng

SIZES: Any = {"tasks_per_step": 3, "query": 2, "meta_steps": 2}
NAMES = [f"customer {i}" for i in range(6)]


def net() -> nn.Module:
    return ml.models.mlp(3, 1, (5,)).double()


MAKE: dict[str, Callable[..., ml.Learner]] = {
    "ftml": lambda **more: ml.FTML(net, ml.losses.squared_error, support=2, inner_steps=2, **SIZES, **more),
    "ftml-learned-lr": lambda: ml.FTML(net, ml.losses.squared_error, support=2, inner_steps=2, learn_lr=True, **SIZES),
    "bayes": lambda: ml.FTML(net, ml.losses.squared_error, support=2, adaptation=ml.BayesianHead(), **SIZES),
    "toe": lambda **more: ml.TOE(net, ml.losses.squared_error, **SIZES, **more),
    "ftl": lambda **more: ml.FTL(net, ml.losses.squared_error, inner_steps=2, **SIZES, **more),
}


def data(i: int, num: int = 5) -> ml.Batch:
    x = torch.from_numpy(rng("named tasks", i).standard_normal((num, 3)))
    return ml.Batch(x, torch.sin(x[:, :1] + i))


def in_turns(learner: ml.Learner, num: int = 5, update: bool = False) -> ml.Learner:
    """One datapoint of each task at a time."""
    for row in range(num):
        for i, name in enumerate(NAMES):
            x, y = data(i, num)
            learner.observe(x[row : row + 1], y[row : row + 1], task=name, update=update)
    return learner


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.parametrize("name", MAKE)
def test_in_turns_or_at_once(name: str) -> None:
    """Whatever the order of arrival: the same updates and nets, bit for bit, as with all data of a task at once."""
    turns, at_once = in_turns(MAKE[name]()), MAKE[name]()
    for i, task in enumerate(NAMES):
        at_once.observe(*data(i), task=task, update=False)
    before = dict(turns.params)
    for learner in (turns, at_once):
        learner.update(3)
        assert learner.tasks == dict.fromkeys(NAMES, 5)
        assert learner.step == 3 * learner.definition.updates_per_step
        assert (learner.round, learner.task, learner.num_datapoints) == (-1, None, 0)
    assert differences(before, turns.params)
    assert not differences(turns.state_dict()["params"], at_once.state_dict()["params"])
    rounds = MAKE[name]()
    rounds.load_state_dict(turns.state_dict() | {"buffer": rounds.state_dict()["buffer"]})
    for i, task in enumerate(NAMES):
        rounds.begin(task)
        rounds.observe(*data(i), update=False)
        pairs = [(rounds.adapt(steps), turns.adapt(steps, task=task)) for steps in (None, 0)]
        pairs += list(zip(rounds.adapt([0, 1]), turns.adapt([0, 1], task=task), strict=True))
        assert not any(differences(weights(a), weights(b)) for a, b in pairs)
        x = data(10 + i, 3).x
        assert torch.equal(turns.predict(x, task=task), rounds.predict(x))


@pytest.mark.parametrize("name", MAKE)
def test_predict_many_is_predict(name: str) -> None:
    learner = MAKE[name]()
    for i, task in enumerate(NAMES):
        learner.observe(*data(i, 1 + 3 * i), task=task, update=False)
    learner.update(2)
    xs = {task: data(20 + i, 1 + i % 4).x for i, task in enumerate(NAMES)}
    found = learner.predict_many(xs)
    assert list(found) == NAMES
    for task, x in xs.items():
        torch.testing.assert_close(found[task], learner.predict(x, task=task), rtol=1e-10, atol=1e-12)
    assert learner.predict_many({}) == {}
    with pytest.raises(ValueError, match="no data of task 'nobody'"):
        learner.predict_many(xs | {"nobody": data(0).x})


def test_an_open_round_stays_as_it_is() -> None:
    learner, undisturbed = (MAKE["ftml"]() for _ in range(2))
    for one in (learner, undisturbed):
        one.begin("a")
        one.observe(*data(0), update=False)
    net = weights(learner.adapt())
    learner.observe(*data(1), task="b", update=False)
    learner.observe(*data(2), task="a", update=False)
    assert (learner.task, learner.round, learner.num_datapoints, learner.num_new) == ("a", 0, 5, 5)
    assert learner.tasks == {"a": 10, "b": 5}
    assert not differences(net, weights(learner.adapt()))
    assert differences(net, weights(learner.adapt(task="a")))


def test_ftl_trains_on_every_task_but_the_open_round() -> None:
    learners = [MAKE["ftl"]() for _ in range(2)]
    for learner, scale in zip(learners, (1.0, 1000.0), strict=True):
        learner.observe(*data(0), task="past", update=False)
        learner.begin("open")
        x, y = data(1)
        learner.observe(x, scale * y)
        learner.observe(*data(2), task="also past")
    assert learners[0].step == 4
    assert not differences(learners[0].params, learners[1].params)


def test_scratch_takes_rounds_only() -> None:
    learner = ml.Scratch(net, ml.losses.squared_error, **SIZES)
    with pytest.raises(ValueError, match=r"Scratch trains on the current task alone: call begin\(name\), not task="):
        learner.observe(*data(0), task="a")
    assert learner.tasks == {}


@pytest.mark.parametrize("name", MAKE)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    learner = in_turns(MAKE[name](), 2, update=True)
    learner.begin("round")
    learner.observe(*data(8))
    learner.observe(data(9, 1).x, data(9, 1).y, task="single")
    learner.forget(NAMES[2])
    learner.save(tmp_path / "a.safetensors")
    loaded = type(learner).load(tmp_path / "a.safetensors", net, ml.losses.squared_error)
    assert not differences(snapshot(learner), snapshot(loaded))
    for one in (learner, loaded):
        for i in range(3):
            one.observe(*data(i), task=NAMES[i])
    assert not differences(snapshot(learner), snapshot(loaded))
    assert loaded.tasks == learner.tasks


def test_an_integer_is_the_name_of_its_digits() -> None:
    learner: Any = MAKE["toe"]()
    for name in (3, "3", np.int64(3)):
        learner.observe(*data(1), task=name, update=False)
    learner.begin(4)
    assert (learner.tasks, learner.task) == ({"3": 15}, "4")
    assert torch.equal(learner.predict(data(2).x, task=3), learner.predict(data(2).x, task="3"))
    learner.forget(3)
    assert not learner.tasks


@pytest.mark.parametrize("name", [None, float("nan"), 3.0, True, b"3", ("a", 1), np.float64(3), "\ud800"], ids=repr)
def test_other_names_are_refused(name: Any) -> None:
    """Rows of a table without a customer must not become one task named "nan"."""
    learner = MAKE["toe"]()
    with pytest.raises(ValueError, match="the name of a task must be"):
        learner.begin(name)
    if name is not None:
        with pytest.raises(ValueError, match="the name of a task must be"):
            learner.observe(*data(1), task=name)
    assert (learner.tasks, learner.round) == ({}, -1)


def test_forget() -> None:
    learner, never = (MAKE["ftml"]() for _ in range(2))
    for i, name in enumerate(NAMES):
        learner.observe(*data(i), task=name, update=False)
        if name != NAMES[1]:
            never.observe(*data(i), task=name, update=False)
    learner.forget(NAMES[1])
    assert learner.tasks == never.tasks
    for one in (learner, never):
        one.update()
    assert not differences(learner.state_dict()["params"], never.state_dict()["params"])
    for call in (learner.forget, lambda name: learner.adapt(task=name), lambda name: learner.predict(data(0).x, name)):
        with pytest.raises(ValueError, match="no data of task 'customer 1'; tasks with data: customer 0, customer 2"):
            call(NAMES[1])
    learner.begin("open")
    learner.observe(*data(7))
    learner.forget("open")
    assert (learner.task, learner.num_datapoints) == ("open", 0)
    learner.observe(*data(8))
    assert learner.tasks["open"] == learner.num_datapoints == 5


def test_a_refused_call_changes_nothing() -> None:
    learner = in_turns(MAKE["ftml"](), 2)
    before = snapshot(learner)
    for x, y in ((torch.ones(2, 4).double(), torch.ones(2, 1).double()), (data(0).x * np.nan, data(0).y)):
        for task in (NAMES[0], "new"):
            with pytest.raises(ValueError, match="observe: x"):
                learner.observe(x, y, task=task)
    assert not differences(before, snapshot(learner))


def test_classes_after_named_tasks_are_refused() -> None:
    learner = in_turns(MAKE["ftml"](), 2)
    with pytest.raises(ValueError, match="earlier tasks have none"):
        learner.begin("a", classes=[0, 1])
    assert learner.tasks == dict.fromkeys(NAMES, 2)


def test_a_net_that_is_not_finite_is_an_error() -> None:
    learner = MAKE["ftml"](inner_lr=1e200)
    learner.observe(*data(0), task="bad", update=False)
    for call in (
        lambda: learner.adapt(task="bad"),
        lambda: learner.predict(data(0).x, task="bad"),
        lambda: learner.predict_many({"bad": data(0).x}),
    ):
        with pytest.raises(
            ValueError, match="the net adapted to task 'bad' is not finite: check the scale of its data"
        ):
            call()


# Arrays.


def test_arrays_and_frames() -> None:
    """float64 arrays get the dtype of the model, and a one-dimensional y is one column."""
    pandas = pytest.importorskip("pandas")
    x, y = data(0, 6)
    as_tensors, others = ml.FTML(lambda: net().float(), ml.losses.squared_error, **SIZES), []
    as_tensors.observe(x.float(), y.float(), task="a")
    frame = pandas.DataFrame(x.numpy(), columns=["a", "b", "c"])
    series = pandas.Series(y[:, 0].numpy())
    for a, b in (
        (x.numpy(), y.numpy()),
        (x.numpy(), y[:, 0].numpy()),
        (frame, series),
        (frame, frame[["a"]] * 0 + y.numpy()),
    ):
        other = ml.FTML(lambda: net().float(), ml.losses.squared_error, **SIZES)
        other.observe(a, b, task="a")
        others.append(other)
    xs = (x.float(), x.numpy(), frame, x.numpy()[::-1][::-1])
    expected = as_tensors.predict(xs[0], task="a")
    for other in others:
        assert not differences(as_tensors.params, other.params)
        for inputs in xs:
            assert torch.equal(other.predict(inputs, task="a"), expected)
            # In a batch of tasks the last bit may differ.
            torch.testing.assert_close(other.predict_many({"a": inputs})["a"], expected)
            assert torch.equal(other.adapt(task="a")(inputs), expected)
        assert torch.equal(other.adapt(task="a")(x[0].numpy()), other.adapt(task="a")(x[0].float()))
    others[1].observe(x.numpy(), y[:, 0].numpy(), task="b")
    with pytest.raises(ValueError, match=r"x has rows of float64\[3\], but earlier datapoints have float32\[3\]"):
        as_tensors.observe(x, y, task="a")  # tensors keep their dtype


# Threads.


def in_threads(num: int, call: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            call(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("name", ["ftml", "bayes"])
def test_threads_adapt_and_predict(name: str) -> None:
    learner = in_turns(MAKE[name]())
    x = data(9, 4).x
    expected = {task: learner.predict(x, task=task) for task in NAMES}

    def call(number: int) -> None:
        for i in range(4):
            task = NAMES[(number + i) % len(NAMES)]
            found = (
                learner.predict(x, task=task),
                learner.adapt(task=task)(x),
                learner.predict_many({task: x})[task],
            )
            for prediction in found:
                torch.testing.assert_close(prediction, expected[task], rtol=1e-10, atol=1e-12)

    in_threads(8, call)
    assert torch.equal(learner.predict(x, task=NAMES[0]), expected[NAMES[0]])


def test_threads_predict_while_others_observe() -> None:
    """Each prediction is one of those between two updates, and the updates are those of one thread."""
    learner, alone = in_turns(MAKE["ftml"]()), in_turns(MAKE["ftml"]())
    x, task = data(9, 4).x, NAMES[0]
    possible = [alone.predict(x, task=task)]
    for i in range(6):
        alone.observe(*data(30 + i), task=f"new {i}")
        possible.append(alone.predict(x, task=task))
    done = threading.Event()

    def call(number: int) -> None:
        if number == 0:
            for i in range(6):
                learner.observe(*data(30 + i), task=f"new {i}")
            done.set()
            return
        while not done.is_set():
            prediction = learner.predict(x, task=task)
            assert any(torch.equal(prediction, one) for one in possible)

    in_threads(4, call)
    assert not differences(snapshot(learner), snapshot(alone))


def test_threads_that_all_observe() -> None:
    """The state is that of some serial order: every datapoint is stored once, and every update is made."""
    learner = MAKE["ftml"]()

    def call(number: int) -> None:
        for row in range(5):
            x, y = data(number)
            learner.observe(x[row : row + 1], y[row : row + 1], task=NAMES[number])

    in_threads(4, call)
    assert learner.tasks == dict.fromkeys(NAMES[:4], 5)
    for i in range(4):
        stored = learner.memory.named(NAMES[i])
        assert stored is not None
        assert torch.equal(stored.x, data(i).x)


class Failing(nn.Module):
    """A network that raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FAIL:
            raise KeyboardInterrupt
        return self.layer(x)


FAIL: list[bool] = []


def test_an_interrupt_in_a_forward_leaves_the_learner() -> None:
    learner = ml.FTML(Failing, ml.losses.squared_error, support=2, **SIZES)
    x, y = data(0)[0].float(), data(0)[1].float()
    learner.observe(x, y, task="a")
    expected, before = learner.predict(x, task="a"), snapshot(learner)
    for call in (
        lambda: learner.predict(x, task="a"),
        lambda: learner.observe(x, y, task="a"),
        lambda: learner.update(),
    ):
        FAIL.append(True)
        try:
            with pytest.raises(KeyboardInterrupt):
                call()
        finally:
            FAIL.clear()
        assert not differences(before, snapshot(learner))
        assert torch.equal(learner.predict(x, task="a"), expected)
