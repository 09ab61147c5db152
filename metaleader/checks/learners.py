"""Requirements on learners."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from metaleader.checks.calls import (
    REVEAL,
    REVEALS,
    apply_calls,
    bad_reveals,
    garbage,
    num_rounds,
    observe,
    play_calls,
    reveals,
    round_calls,
)
from metaleader.checks.streams import Stream
from metaleader.checks.trees import clone, differences, require, require_equal, snapshot
from metaleader.evaluate import play, play_together
from metaleader.learners import Learner
from metaleader.learners.measure import measure
from metaleader.losses import unsmoothed
from metaleader.nets.functional import scale_uint8
from metaleader.tasks import Task, num_rows

# Builds a new learner with the same initial state at every call.
MakeLearner = Callable[[], Learner]


def check_learner(make_learner: MakeLearner, stream: Stream) -> None:
    """Run all of `LEARNER_CHECKS`.

    Args:
        make_learner: builds a new learner with the same initial state at every call; use few updates per reveal, so
            that the checks are fast.
        stream: at least two tasks of at least two datapoints; n-way tasks have classes and ids.

    Raises:
        AssertionError: if a check fails.
    """
    for check in LEARNER_CHECKS:
        check(make_learner, stream)


def adapt_leaves_the_learner(make_learner: MakeLearner, stream: Stream) -> None:
    """`adapt` does not change the learner, nor does a change to the net that it returns."""
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
    """Two learners with the same seed and data are equal, whatever the state of the global random generator."""
    states = []
    with torch.random.fork_rng(devices=[]):
        for number in (1, 2):
            torch.manual_seed(number)
            states.append(snapshot(apply_calls(make_learner(), play_calls(stream))))
    require_equal(states[0], states[1], "two learners from one make_learner differ after the same data")


def queries_change_nothing(make_learner: MakeLearner, stream: Stream) -> None:
    """Calls of `adapt` and `state_dict`, and measurements, do not influence later updates."""
    undisturbed, queried = make_learner(), make_learner()
    for call in play_calls(stream):
        call(undisturbed)
        call(queried)
        queried.state_dict()
        queried.adapt()
        measure(queried, stream[0].test, unsmoothed(queried.loss))
    require_equal(undisturbed.state_dict(), queried.state_dict(), "queries between observations changed the learner")


def state_dict_continues(make_learner: MakeLearner, stream: Stream) -> None:
    """A new learner that loads a `state_dict` continues like the original, from any point of a play."""
    calls = list(play_calls(stream))
    for cut in (0, len(calls) // 2 + 1, len(calls) - 1):  # new, after a begin, within a round
        learner = apply_calls(make_learner(), calls[:cut])
        state, taken = learner.state_dict(), snapshot(learner)
        apply_calls(learner, calls[cut:])
        require_equal(taken, state, "a state_dict changed when its learner continued")
        other = make_learner()
        other.load_state_dict(state)
        require_equal(taken, other.state_dict(), "the state_dict after load_state_dict is not the loaded one")
        apply_calls(other, calls[cut:])
        require_equal(learner.state_dict(), other.state_dict(), f"stopped after {cut} calls: continuing differs")
        _require_same_net(learner, other, f"stopped after {cut} calls: adapt differs")


def save_continues(make_learner: MakeLearner, stream: Stream) -> None:
    """A learner that is saved and loaded continues like the original."""
    calls = list(play_calls(stream))
    learner = apply_calls(make_learner(), calls[:-1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "learner.safetensors"
        learner.save(path)
        arguments = learner.options.plain().items()
        callables = {name: value for name, value in arguments if callable(value) and value is not scale_uint8}
        try:
            other = type(learner).load(path, learner.model, learner.loss, **callables)
        except ValueError:  # a class whose constructor sets these functions
            other = type(learner).load(path, learner.model, learner.loss)
    require_equal(learner.state_dict(), other.state_dict(), "the loaded learner is not the saved one")
    loaded = _settings(other)
    lost = sorted(name for name, value in _settings(learner).items() if loaded.get(name) != value)
    require(
        not lost,
        f"{', '.join(lost)} of the loaded learner differ: store each argument as an attribute of the same name",
    )
    apply_calls(learner, calls[-1:])
    apply_calls(other, calls[-1:])
    require_equal(learner.state_dict(), other.state_dict(), "continuing after a load differs")
    _require_same_net(learner, other, "adapt after a load differs")


def _settings(learner: Learner) -> dict[str, str]:
    """Return the public attributes that are plain values, as strings so that NaN equals NaN."""
    plain = bool | int | float | str | list | tuple | dict | None
    public = {name: value for name, value in vars(learner).items() if not name.startswith("_")}
    public = {n: v for n, v in public.items() if n not in ("definition", "state")} | learner.options.plain()
    public = {name: value.item() if isinstance(value, np.generic) else value for name, value in public.items()}
    return {name: repr(value) for name, value in public.items() if isinstance(value, plain)}


def adapt_before_data_is_the_initialisation(make_learner: MakeLearner, stream: Stream) -> None:
    """Before a task has data, `adapt` returns the initialisation: the learner's `params`."""
    learner = make_learner()

    def require_initialisation(when: str) -> None:
        adapted = dict(learner.adapt().named_parameters())
        require_equal(clone(learner.params), adapted, f"{when} adapt does not return the initialisation")

    require_initialisation("before any task")
    for call in play_calls(stream):
        call(learner)
        if learner.num_datapoints == 0:
            require_initialisation(f"before the data of round {learner.round}")


def observe_without_update_only_stores(make_learner: MakeLearner, stream: Stream) -> None:
    """`observe(update=False)` only stores the data; `observe(update=False)` and `update` are equal to `observe`."""
    *calls, _ = play_calls(stream)
    last = list(reveals(stream[num_rounds(stream) - 1]))[-1]
    deferred, immediate = (apply_calls(make_learner(), calls) for _ in range(2))
    before, num_before = snapshot(deferred), deferred.num_datapoints
    observe(deferred, last, update=False)
    after = {**deferred.state_dict(), "buffer": None}
    require_equal({**before, "buffer": None}, after, "observe(update=False) changed more than the buffer")
    num_new = deferred.num_datapoints - num_before
    require(num_new == num_rows(last[0]), f"observe(update=False) stored {num_new} of {num_rows(last[0])} datapoints")
    deferred.update()
    observe(immediate, last)
    message = "update after observe(update=False) differs from observe"
    require_equal(immediate.state_dict(), deferred.state_dict(), message)
    require(bool(differences(before["params"], deferred.params)), "update changed no parameter")


def refused_data_changes_nothing(make_learner: MakeLearner, stream: Stream) -> None:
    """Invalid data raises a ValueError and does not change the learner."""
    learner = make_learner()
    _require_refusal(learner, lambda: observe(learner, next(reveals(stream[0]))), "observe before begin")
    for t in range(num_rounds(stream)):
        for call in round_calls(stream[t]):
            call(learner)
            for bad, description in bad_reveals(stream[t]):
                _require_refusal(learner, lambda bad=bad: observe(learner, bad), description)
            if stream[t].classes is not None:
                _require_refusal(learner, lambda: learner.begin("bad"), "a task without classes in an n-way stream")
    undisturbed = apply_calls(make_learner(), play_calls(stream))
    require_equal(undisturbed.state_dict(), learner.state_dict(), "refused data changed later updates")


def held_out_data_is_untouched(make_learner: MakeLearner, stream: Stream) -> None:
    """Test data influences only the measurements: the learner does not depend on it."""
    tasks = [stream[t] for t in range(num_rounds(stream))]
    altered = [Task(task.name, task.train, garbage(task.test), task.classes, task.ids) for task in tasks]
    states, losses = [], []
    for variant in (tasks, altered):
        learner = make_learner()
        losses.append([record.loss for record in play(learner, variant, REVEAL, reveals=REVEALS)])
        states.append(snapshot(learner))
    require(losses[0] != losses[1], "the measured losses do not depend on the test data")
    require_equal(states[0], states[1], "the learner depends on the test data: it learned from held-out data")


@torch.no_grad()
def side_by_side_as_alone(make_learner: MakeLearner, stream: Stream) -> None:
    """Learners played side by side, as by `metaleader run` with several seeds, learn what each learns alone."""
    tasks = [stream[t] for t in range(num_rounds(stream))]
    # The second learner plays the tasks in another order, so that its state differs from that of the first.
    alike = len({num_rows(task.train) for task in tasks}) == 1
    orders = [tasks, tasks[::-1] if alike else tasks]
    together = [make_learner() for _ in orders]
    for _ in play_together(together, orders, REVEAL, reveals=REVEALS):
        pass
    for learner, order in zip(together, orders, strict=True):
        alone, untrained = make_learner(), make_learner()
        for _ in play(alone, order, REVEAL, reveals=REVEALS):
            pass
        untrained.begin("task", **({} if order[-1].classes is None else {"classes": order[-1].classes}))
        # Predictions, not parameters: the optimiser amplifies the rounding of gradients that are zero.
        nets = [one.adapt(steps=0, statistics="batch") for one in (untrained, alone, learner)]
        before, expected, found = (net(order[-1].test.x) for net in nets)
        off, moved = float((found - expected).abs().max()), float((before - expected).abs().max())
        require(
            off <= 0.05 * moved + 1e-5,
            f"learners side by side learn otherwise than one alone: predictions differ by {off:.2g} after moving by"
            f" {moved:.2g}",
        )


LEARNER_CHECKS: tuple[Callable[[MakeLearner, Stream], None], ...] = (
    adapt_leaves_the_learner,
    same_seed_same_results,
    queries_change_nothing,
    state_dict_continues,
    save_continues,
    adapt_before_data_is_the_initialisation,
    observe_without_update_only_stores,
    refused_data_changes_nothing,
    held_out_data_is_untouched,
    side_by_side_as_alone,
)


def _require_refusal(learner: Learner, call: Callable[[], None], description: str) -> None:
    before = snapshot(learner)
    try:
        call()
    except ValueError:
        pass
    except Exception as error:
        raise AssertionError(f"{description}: {type(error).__name__} ({error}) instead of a ValueError") from error
    else:
        raise AssertionError(f"{description}: not refused")
    require_equal(before, learner.state_dict(), f"{description}: refused, but the learner changed")


def _require_same_net(one: Learner, other: Learner, message: str) -> None:
    require_equal(dict(one.adapt().named_parameters()), dict(other.adapt().named_parameters()), message)
