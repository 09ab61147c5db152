"""What every learner must satisfy."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from metaleader.checks.calls import (
    REVEAL,
    REVEALS,
    bad_reveals,
    fed,
    garbage,
    num_rounds,
    observe,
    play_calls,
    reveals,
    round_calls,
)
from metaleader.checks.streams import Stream
from metaleader.checks.trees import copied, differences, require, require_equal, snapshot
from metaleader.evaluate import measure, play
from metaleader.learners import Learner
from metaleader.losses import unsmoothed
from metaleader.nets.functional import scale_uint8
from metaleader.tasks import Task, num_rows

# Builds a new learner, the same one at every call.
MakeLearner = Callable[[], Learner]


def check_learner(make_learner: MakeLearner, stream: Stream) -> None:
    """Run all of `LEARNER_CHECKS`.

    Args:
        make_learner: builds a new learner, the same one at every call; few updates a reveal keep the checks quick.
        stream: at least two tasks that the learner can learn from, of two datapoints or more; n-way tasks bring their
            classes and ids.

    Raises:
        AssertionError: at the first check that fails.
    """
    for check in LEARNER_CHECKS:
        check(make_learner, stream)


def adapt_leaves_the_learner(make_learner: MakeLearner, stream: Stream) -> None:
    """`adapt` leaves the learner unchanged, and so does whatever is done to the net it returns."""
    learner = make_learner()
    for call in play_calls(stream):
        call(learner)
        before = snapshot(learner)
        net = learner.adapt()
        with torch.no_grad():
            for value in [*net.parameters(), *net.buffers()]:
                value.zero_()
        learner.adapt(steps=[0, 2], statistics="batch")
        require_equal(before, learner.state_dict(), "adapt, or a change to the net it returned, changed the learner")


def same_seed_same_results(make_learner: MakeLearner, stream: Stream) -> None:
    """Two learners with the same seed and data are equal, whatever random numbers others draw."""
    states = []
    with torch.random.fork_rng(devices=[]):
        for number in (1, 2):
            torch.manual_seed(number)
            states.append(snapshot(fed(make_learner(), play_calls(stream))))
    require_equal(states[0], states[1], "two learners from one make_learner differ after the same data")


def asking_changes_nothing(make_learner: MakeLearner, stream: Stream) -> None:
    """Calls of `adapt`, `state_dict` and a measurement between the observations change nothing that follows."""
    silent, asked = make_learner(), make_learner()
    for call in play_calls(stream):
        call(silent)
        call(asked)
        asked.state_dict()
        asked.adapt()
        measure(asked, stream[0].test, unsmoothed(asked.loss))
    require_equal(silent.state_dict(), asked.state_dict(), "a learner that was asked in between differs")


def state_dict_continues(make_learner: MakeLearner, stream: Stream) -> None:
    """A new learner that loads a `state_dict` continues as the one it was taken from, wherever that was stopped."""
    calls = list(play_calls(stream))
    for cut in (0, len(calls) // 2 + 1, len(calls) - 1):  # untouched, just after a begin, in the middle of a round
        learner = fed(make_learner(), calls[:cut])
        state, taken = learner.state_dict(), snapshot(learner)
        fed(learner, calls[cut:])
        require_equal(taken, state, "a state_dict changed while its learner went on")
        other = make_learner()
        other.load_state_dict(state)
        require_equal(taken, other.state_dict(), "the state_dict after load_state_dict is not the one loaded")
        fed(other, calls[cut:])
        require_equal(learner.state_dict(), other.state_dict(), f"stopped after {cut} calls: continuing differs")
        _require_same_net(learner, other, f"stopped after {cut} calls: adapt differs")


def save_continues(make_learner: MakeLearner, stream: Stream) -> None:
    """A learner loaded from its file continues as if it had not stopped."""
    calls = list(play_calls(stream))
    learner = fed(make_learner(), calls[:-1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "learner.safetensors"
        learner.save(path)
        given = {name: value for name, value in learner._hyperparameters.items() if callable(value)}
        callables = {name: value for name, value in given.items() if value is not scale_uint8}
        try:
            other = type(learner).load(path, learner._model, learner.loss, **callables)
        except ValueError:  # a class that brings its functions itself
            other = type(learner).load(path, learner._model, learner.loss)
    require_equal(learner.state_dict(), other.state_dict(), "the learner that was loaded is not the one saved")
    found = _settings(other)
    lost = sorted(name for name, value in _settings(learner).items() if found.get(name) != value)
    require(
        not lost,
        f"{', '.join(lost)} of the learner that was loaded differ: does it keep them under the names of its arguments?",
    )
    fed(learner, calls[-1:])
    fed(other, calls[-1:])
    require_equal(learner.state_dict(), other.state_dict(), "continuing after a load differs")
    _require_same_net(learner, other, "adapt after a load differs")


def _settings(learner: Learner) -> dict[str, str]:
    """The public attributes that are plain values, as text: nan is then like nan."""
    plain = bool | int | float | str | list | tuple | dict | None
    public = {name: value for name, value in vars(learner).items() if not name.startswith("_")}
    public = {name: value.item() if isinstance(value, np.generic) else value for name, value in public.items()}
    return {name: repr(value) for name, value in public.items() if isinstance(value, plain)}


def adapt_before_data_is_the_initialisation(make_learner: MakeLearner, stream: Stream) -> None:
    """Before any data of a task, `adapt` returns the initialisation: the learner's `params`."""
    learner = make_learner()

    def require_start(when: str) -> None:
        found = dict(learner.adapt().named_parameters())
        require_equal(copied(learner.params), found, f"{when} adapt is not the initialisation")

    require_start("before any task")
    for call in play_calls(stream):
        call(learner)
        if learner.num_datapoints == 0:
            require_start(f"in round {learner.round}, before its data,")


def observe_without_update_only_keeps(make_learner: MakeLearner, stream: Stream) -> None:
    """`observe(update=False)` keeps the data and learns nothing; `update` then learns what `observe` would have."""
    *before, _ = play_calls(stream)
    last = list(reveals(stream[num_rounds(stream) - 1]))[-1]
    apart, together = (fed(make_learner(), before) for _ in range(2))
    state, kept = snapshot(apart), apart.num_datapoints
    observe(apart, last, update=False)
    require_equal(
        {**state, "buffer": None}, {**apart.state_dict(), "buffer": None}, "observe(update=False) changed the learner"
    )
    require(apart.num_datapoints == kept + num_rows(last[0]), "observe(update=False) did not keep the datapoints")
    apart.update()
    observe(together, last)
    require_equal(together.state_dict(), apart.state_dict(), "update after observe(update=False) differs from observe")
    require(bool(differences(state["params"], apart.params)), "update changed no parameter")


def refused_data_changes_nothing(make_learner: MakeLearner, stream: Stream) -> None:
    """Data that cannot be right is refused with a ValueError, and the learner is as before the call."""
    learner = make_learner()
    _refused(learner, lambda: observe(learner, next(reveals(stream[0]))), "observe before begin")
    for t in range(num_rounds(stream)):
        for call in round_calls(stream[t]):
            call(learner)
            for bad, what in bad_reveals(stream[t]):
                _refused(learner, lambda bad=bad: observe(learner, bad), what)
            if stream[t].classes is not None:
                _refused(learner, lambda: learner.begin("bad"), "a task without classes among tasks that have them")
    straight = fed(make_learner(), play_calls(stream))
    require_equal(straight.state_dict(), learner.state_dict(), "a learner that refused data went on differently")


def held_out_data_is_untouched(make_learner: MakeLearner, stream: Stream) -> None:
    """Test data changes nothing but the measured numbers: with other test data the learner ends the same."""
    tasks = [stream[t] for t in range(num_rounds(stream))]
    poisoned = [Task(task.name, task.train, garbage(task.test), task.classes, task.ids) for task in tasks]
    states, losses = [], []
    for played in (tasks, poisoned):
        learner = make_learner()
        losses.append([record.loss for record in play(learner, played, REVEAL, reveals=REVEALS)])
        states.append(snapshot(learner))
    require(losses[0] != losses[1], "the measured losses do not depend on the test data")
    require_equal(
        states[0], states[1], "the learner differs when the test data does: it has learned from held-out data"
    )


LEARNER_CHECKS: tuple[Callable[[MakeLearner, Stream], None], ...] = (
    adapt_leaves_the_learner,
    same_seed_same_results,
    asking_changes_nothing,
    state_dict_continues,
    save_continues,
    adapt_before_data_is_the_initialisation,
    observe_without_update_only_keeps,
    refused_data_changes_nothing,
    held_out_data_is_untouched,
)


def _refused(learner: Learner, call: Callable[[], None], what: str) -> None:
    before = snapshot(learner)
    try:
        call()
    except ValueError:
        pass
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} ({error}) instead of a ValueError") from error
    else:
        raise AssertionError(f"{what}: not refused")
    require_equal(before, learner.state_dict(), f"{what}: refused, but the learner changed")


def _require_same_net(one: Learner, other: Learner, message: str) -> None:
    require_equal(dict(one.adapt().named_parameters()), dict(other.adapt().named_parameters()), message)
