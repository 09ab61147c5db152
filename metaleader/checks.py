"""What every learner and every stream must satisfy, for ours and for yours.

Each check is a function whose first line says what is required; it raises an AssertionError that says what was found.
`check_learner` and `check_stream` run them all; a test suite parametrises over `LEARNER_CHECKS` and `STREAM_CHECKS`.
All comparisons are bit for bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.evaluate import measure, play
from metaleader.learners import Learner
from metaleader.losses import unsmoothed
from metaleader.network import scale_uint8
from metaleader.tasks import Batch, Task, TaskStream, check_alike, check_batch, num_rows, rows, to_device

# Builds a new learner, the same one at every call.
MakeLearner = Callable[[], Learner]
Stream = TaskStream | Sequence[Task]
# What arrives at once: datapoints, and for n-way tasks their ids.
Reveal = tuple[Batch, Tensor | None]

# How much of a stream a learner is shown: enough to have a past, and to be stopped in the middle of a round.
_ROUNDS, _REVEALS, _REVEAL = 2, 2, 10
# The rounds of a stream that are asked for again.
_ASKED_AGAIN = 8


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


def check_stream(stream: Stream) -> None:
    """Run all of `STREAM_CHECKS`.

    Raises:
        AssertionError: at the first check that fails.

    >>> from metaleader.streams import SinusoidStream
    >>> check_stream(SinusoidStream(tasks=3))
    """
    for check in STREAM_CHECKS:
        check(stream)


# Learners.


def adapt_leaves_the_learner(make_learner: MakeLearner, stream: Stream) -> None:
    """`adapt` leaves the learner unchanged, and so does whatever is done to the net it returns."""
    learner = make_learner()
    for event in _events(stream):
        event(learner)
        before = _snapshot(learner)
        net = learner.adapt()
        with torch.no_grad():
            for value in [*net.parameters(), *net.buffers()]:
                value.zero_()
        learner.adapt(steps=[0, 2], statistics="batch")
        _require_equal(before, learner.state_dict(), "adapt, or a change to the net it returned, changed the learner")


def same_seed_same_results(make_learner: MakeLearner, stream: Stream) -> None:
    """Two learners with the same seed and data are equal, whatever random numbers others draw."""
    states = []
    with torch.random.fork_rng(devices=[]):
        for number in (1, 2):
            torch.manual_seed(number)
            states.append(_snapshot(_fed(make_learner(), _events(stream))))
    _require_equal(states[0], states[1], "two learners from one make_learner differ after the same data")


def asking_changes_nothing(make_learner: MakeLearner, stream: Stream) -> None:
    """Calls of `adapt`, `state_dict` and a measurement between the observations change nothing that follows."""
    silent, asked = make_learner(), make_learner()
    for event in _events(stream):
        event(silent)
        event(asked)
        asked.state_dict()
        asked.adapt()
        measure(asked, stream[0].test, unsmoothed(asked.loss))
    _require_equal(silent.state_dict(), asked.state_dict(), "a learner that was asked in between differs")


def state_dict_continues(make_learner: MakeLearner, stream: Stream) -> None:
    """A new learner that loads a `state_dict` continues as the one it was taken from, wherever that was stopped."""
    events = list(_events(stream))
    for cut in (0, len(events) // 2 + 1, len(events) - 1):  # untouched, just after a begin, in the middle of a round
        learner = _fed(make_learner(), events[:cut])
        state, taken = learner.state_dict(), _snapshot(learner)
        _fed(learner, events[cut:])
        _require_equal(taken, state, "a state_dict changed while its learner went on")
        other = make_learner()
        other.load_state_dict(state)
        _require_equal(taken, other.state_dict(), "the state_dict after load_state_dict is not the one loaded")
        _fed(other, events[cut:])
        _require_equal(learner.state_dict(), other.state_dict(), f"stopped after {cut} calls: continuing differs")
        _require_same_net(learner, other, f"stopped after {cut} calls: adapt differs")


def save_continues(make_learner: MakeLearner, stream: Stream) -> None:
    """A learner loaded from its file continues as if it had not stopped."""
    events = list(_events(stream))
    learner = _fed(make_learner(), events[:-1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "learner.safetensors"
        learner.save(path)
        given = {name: value for name, value in learner._hyperparameters.items() if callable(value)}
        callables = {name: value for name, value in given.items() if value is not scale_uint8}
        other = type(learner).load(path, learner._model, learner.loss, **callables)
    _require_equal(learner.state_dict(), other.state_dict(), "the learner that was loaded is not the one saved")
    _fed(learner, events[-1:])
    _fed(other, events[-1:])
    _require_equal(learner.state_dict(), other.state_dict(), "continuing after a load differs")
    _require_same_net(learner, other, "adapt after a load differs")


def adapt_before_data_is_the_initialisation(make_learner: MakeLearner, stream: Stream) -> None:
    """Before any data of a task, `adapt` returns the initialisation: the learner's `params`."""
    learner = make_learner()

    def require(when: str) -> None:
        found = dict(learner.adapt().named_parameters())
        _require_equal(_copy(learner.params), found, f"{when} adapt is not the initialisation")

    require("before any task")
    for event in _events(stream):
        event(learner)
        if learner.num_datapoints == 0:
            require(f"in round {learner.round}, before its data,")


def observe_without_update_only_keeps(make_learner: MakeLearner, stream: Stream) -> None:
    """`observe(update=False)` keeps the data and learns nothing; `update` then learns what `observe` would have."""
    *before, _ = _events(stream)
    last = list(_reveals(stream[_rounds(stream) - 1]))[-1]
    apart, together = (_fed(make_learner(), before) for _ in range(2))
    state, kept = _snapshot(apart), apart.num_datapoints
    _observe(apart, last, update=False)
    _require_equal(
        {**state, "buffer": None}, {**apart.state_dict(), "buffer": None}, "observe(update=False) changed the learner"
    )
    _require(apart.num_datapoints == kept + num_rows(last[0]), "observe(update=False) did not keep the datapoints")
    apart.update()
    _observe(together, last)
    _require_equal(together.state_dict(), apart.state_dict(), "update after observe(update=False) differs from observe")
    _require(bool(_differences(state["params"], apart.params)), "update changed no parameter")


def refused_data_changes_nothing(make_learner: MakeLearner, stream: Stream) -> None:
    """Data that cannot be right is refused with a ValueError, and the learner is as before the call."""
    learner = make_learner()
    _refused(learner, lambda: _observe(learner, next(_reveals(stream[0]))), "observe before begin")
    for t in range(_rounds(stream)):
        for event in _round_events(stream[t]):
            event(learner)
            for bad, what in _bad_reveals(stream[t]):
                _refused(learner, lambda bad=bad: _observe(learner, bad), what)
            if stream[t].classes is not None:
                _refused(learner, lambda: learner.begin("bad"), "a task without classes among tasks that have them")
    straight = _fed(make_learner(), _events(stream))
    _require_equal(straight.state_dict(), learner.state_dict(), "a learner that refused data went on differently")


def held_out_data_is_untouched(make_learner: MakeLearner, stream: Stream) -> None:
    """Test data changes nothing but the measured numbers: with other test data the learner ends the same."""
    tasks = [stream[t] for t in range(_rounds(stream))]
    poisoned = [Task(task.name, task.train, _garbage(task.test), task.classes, task.ids) for task in tasks]
    states, losses = [], []
    for played in (tasks, poisoned):
        learner = make_learner()
        losses.append([record.loss for record in play(learner, played, _REVEAL, reveals=_REVEALS)])
        states.append(_snapshot(learner))
    _require(losses[0] != losses[1], "the measured losses do not depend on the test data")
    _require_equal(
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


# Streams.


def length_is_known(stream: Stream) -> None:
    """`len(stream)` is the number of tasks, an IndexError lies beyond it, and plain iteration ends there."""
    length = len(stream)
    _require(length >= 1, "the stream has no tasks")
    try:
        stream[length]
    except IndexError:
        pass
    else:
        raise AssertionError(f"stream[{length}] of a stream of {length} tasks gave a task; raise an IndexError")
    found = sum(1 for _ in stream)  # pyright: ignore[reportGeneralTypeIssues]
    _require(found == length, f"len(stream) is {length}, iteration gave {found} tasks")


def tasks_are_valid(stream: Stream) -> None:
    """Every entry is a Task with a text for a name and finite datapoints, all of one shape and dtype."""
    first = stream[0].train if isinstance(stream[0], Task) else None
    for t in range(len(stream)):
        task: Any = stream[t]
        _require(isinstance(task, Task), f"stream[{t}] is a {type(task).__name__}, not a Task")
        _require(isinstance(task.name, str), f"stream[{t}].name is {task.name!r}, not text")
        assert first is not None
        for part in ("train", "test"):
            try:
                check_alike(check_batch(getattr(task, part), f"stream[{t}].{part}"), first, f"stream[{t}].{part}")
            except ValueError as error:
                raise AssertionError(str(error)) from error


def tasks_stay_the_same(stream: Stream) -> None:
    """`stream[t]` is the same task whenever it is asked for, in whatever order."""
    length = len(stream)
    asked = sorted({t * (length - 1) // (_ASKED_AGAIN - 1) for t in range(_ASKED_AGAIN)})
    first = {t: _copy(_parts(stream[t])) for t in asked}
    for t in [*reversed(asked), *asked]:
        _require_equal(first[t], _parts(stream[t]), f"stream[{t}] differs when asked again")


def train_and_test_are_disjoint(stream: Stream) -> None:
    """No datapoint of a task's training data is in its test data, as far as equal rows show."""
    for t in range(len(stream)):
        task = stream[t]
        shared = set(_row_bytes(task.train)) & set(_row_bytes(task.test))
        _require(not shared, f"stream[{t}]: {len(shared)} datapoints of train are in test too")


STREAM_CHECKS: tuple[Callable[[Stream], None], ...] = (
    length_is_known,
    tasks_are_valid,
    tasks_stay_the_same,
    train_and_test_are_disjoint,
)


# Inside.


def _events(stream: Stream) -> Iterator[Callable[[Learner], None]]:
    """The calls of a short play, one by one: begin, observe, observe, begin, ..."""
    for t in range(_rounds(stream)):
        yield from _round_events(stream[t])


def _round_events(task: Task) -> Iterator[Callable[[Learner], None]]:
    yield lambda learner: _begin(learner, task)
    for reveal in _reveals(task):
        yield lambda learner, reveal=reveal: _observe(learner, reveal)


def _begin(learner: Learner, task: Task) -> None:
    # A learner of the user's own need not know of classes and ids.
    learner.begin(task.name, **({} if task.classes is None else {"classes": task.classes}))


def _observe(learner: Learner, reveal: Reveal, update: bool = True) -> None:
    batch, ids = reveal
    learner.observe(batch.x, batch.y, update=update, **({} if ids is None else {"ids": ids}))


def _rounds(stream: Stream) -> int:
    _require(len(stream) >= _ROUNDS, f"the checks need a stream of at least {_ROUNDS} tasks, got {len(stream)}")
    return _ROUNDS


def _reveals(task: Task) -> Iterator[Reveal]:
    total = num_rows(task.train)
    size = max(1, min(_REVEAL, total // _REVEALS))
    for first in range(0, min(total, _REVEALS * size), size):
        part = slice(first, first + size)
        yield rows(task.train, part), None if task.ids is None else task.ids[part]


def _fed(learner: Learner, events: Sequence[Callable[[Learner], None]] | Iterator[Any]) -> Learner:
    for event in events:
        event(learner)
    return learner


def _refused(learner: Learner, call: Callable[[], None], what: str) -> None:
    before = _snapshot(learner)
    try:
        call()
    except ValueError:
        pass
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} ({error}) instead of a ValueError") from error
    else:
        raise AssertionError(f"{what}: not refused")
    _require_equal(before, learner.state_dict(), f"{what}: refused, but the learner changed")


def _bad_reveals(task: Task) -> Iterator[tuple[Reveal, str]]:
    good, ids = next(_reveals(task))
    for bad, what in _bad_batches(good):
        yield (bad, None if ids is None else ids[: num_rows(bad.x)]), what
    if task.classes is not None:
        yield (good._replace(y=torch.full_like(good.y, len(task.classes))), ids), "a label beyond the classes"
    if ids is not None:
        yield (good, ids[1:]), "fewer ids than datapoints"
        yield (good, -1 - ids), "negative ids"


def _bad_batches(good: Batch) -> Iterator[tuple[Batch, str]]:
    yield rows(good, slice(0, 0)), "an empty batch"
    yield Batch(good.x, rows(good.y, slice(0, num_rows(good) - 1))), "fewer targets than inputs"
    yield Batch(tree_map(lambda leaf: leaf[..., None], good.x), good.y), "inputs with a dimension too many"
    for name in ("x", "y"):
        if all(leaf.is_floating_point() for leaf in tree_leaves(getattr(good, name))):
            for value in (float("nan"), float("inf")):
                bad = tree_map(lambda leaf, value=value: torch.full_like(leaf, value), getattr(good, name))
                yield good._replace(**{name: bad}), f"{value} in {name}"


def _garbage(batch: Batch) -> Batch:
    """Other datapoints of the same shapes: the inputs are noise, the targets in another order (labels stay labels)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        order = torch.randperm(num_rows(batch))
        x = tree_map(_noise_like, batch.x)
    return Batch(x, rows(batch.y, order))


def _noise_like(leaf: Tensor) -> Tensor:
    if leaf.is_floating_point():
        return 100 * torch.randn(leaf.shape).to(leaf)
    low, high = int(leaf.min()), int(leaf.max())
    return torch.randint(low, high + 1, leaf.shape).to(leaf)


def _snapshot(learner: Learner) -> dict[str, Any]:
    return _copy(learner.state_dict())


def _copy(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _parts(task: Task) -> dict[str, Any]:
    return {"name": task.name, "train": task.train, "test": task.test, "classes": task.classes, "ids": task.ids}


def _require_same_net(one: Learner, other: Learner, message: str) -> None:
    _require_equal(dict(one.adapt().named_parameters()), dict(other.adapt().named_parameters()), message)


def _require_equal(expected: Any, found: Any, message: str) -> None:
    different = _differences(expected, found)
    _require(not different, f"{message}, at {', '.join(different[:5])}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two trees differ in any bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        lone = [f"{path}/{key}" for key in one.keys() ^ other.keys()]
        pairs = [(one[key], other[key], f"{path}/{key}") for key in one if key in other]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        lone, pairs = [], [(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        same = (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(_bits(one), _bits(other))
        return [] if same else [path]
    else:
        return [] if type(one) is type(other) and one == other else [path]
    return lone + [found for pair in pairs for found in _differences(*pair)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def _row_bytes(batch: Batch) -> Iterator[bytes]:
    leaves = [_bits(leaf).view(leaf.shape[0], -1) for leaf in tree_leaves(to_device(batch, "cpu"))]
    for row in torch.cat(leaves, 1).numpy():
        yield row.tobytes()
