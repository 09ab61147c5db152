"""Algorithm 1 of the paper and the regret protocol of its section 3, as generators of records."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np

from metaleader.learners import Learner, store, trial, update_together
from metaleader.learners.measure import ADAPTATION_STEPS, NO_PARTS, Parts, measure_together, overrides
from metaleader.learners.options import check_integer
from metaleader.losses import Loss, takes_labels, unsmoothed
from metaleader.tasks import Task, TaskStream, check_streams, check_tasks, num_rows, rows, to_device


@dataclass(frozen=True)
class Record:
    """One measurement on held-out data.

    Attributes:
        protocol: "online" (Algorithm 1) or "regret" (section 3: the learner has not trained on this task).
        round: t, from 0.
        task: the task's name.
        datapoints: the size of D_t.
        loss: the mean loss on the held-out data, without label smoothing; batch norm uses the statistics of the test
            batch, as in the paper.
        accuracy: the fraction classified correctly; None for regression.
        needed: the number of datapoints at the first record of this round that met the threshold; None before that.
        more: loss and accuracy for other numbers of adaptation steps (`loss_1`, `accuracy_1`, ...); if the net has
            batch norm, with the statistics of D_t (`loss_task`, `accuracy_task`); the losses of the `parts` of the
            outputs; for tasks with ids, `new_datapoints`, the number of datapoints of D_t that no earlier task had;
            for sizes in `before_at`, the loss and accuracy of the regret (`loss_before`, `accuracy_before`).
    """

    protocol: Literal["online", "regret"]
    round: int
    task: str
    datapoints: int
    loss: float
    accuracy: float | None
    needed: int | None
    more: dict[str, float] = field(default_factory=dict)


def play(learner: Any, stream: TaskStream | Sequence[Task], reveal: int = 20, **options: Any) -> Iterator[Record]:
    """Play a stream: reveal data, let the learner observe and adapt, and measure on held-out data.

    The learner receives only training batches. In the regret protocol w_t is fixed while round t is measured: the data
    is only stored, and the updates of the round are made when the next round begins. `Scratch`, which has no w_t, is
    trained on the data of the round.

    Args:
        learner: the learner; it is changed in place.
        stream: a sequence of tasks.
        reveal: datapoints per reveal.
        options: `reveals`, the number of reveals per task; `gamma`, the threshold of proficiency; `steps`, the numbers
            of adaptation steps to measure, 5 by default, independent of the learner's `inner_steps`; `start`, the first
            round to play, for a learner that was loaded; and the other options of
            `metaleader.evaluate.play_together`.

    Yields:
        One record per measured reveal.
    """
    for (record,) in play_together([learner], [stream], reveal, **options):
        yield record


def play_together(
    learners: Sequence[Any],
    streams: Sequence[TaskStream | Sequence[Task]],
    reveal: int = 20,
    *,
    reveals: int | None = None,
    gamma: float | None = None,
    steps: int | Sequence[int] = ADAPTATION_STEPS,
    measure_at: Collection[int] | None = None,
    before_at: Collection[int] = (),
    regret: bool = False,
    loss: Loss | None = None,
    parts: Parts = NO_PARTS,
    start: int = 0,
) -> Iterator[list[Record]]:
    """Play one stream per learner in lockstep; two or more learners are updated as one batched program.

    Learners whose class overrides `update` or `observe`, and objects that are not a `Learner`, are updated one by one.
    Measurements leave parameters, data and draws of the learners as they are.

    Args:
        learners: learners of the same type and shape; they are changed in place.
        streams: one stream per learner, all of the same length and with tasks of equal size.
        reveal: datapoints per reveal.
        reveals: the number of reveals per task; all if None.
        gamma: the threshold of proficiency: an accuracy to reach, or for regression a loss.
        steps: one or more numbers of adaptation steps to measure; the first gives `loss` and `accuracy`, the others
            are in `more`.
        measure_at: sizes of D_t to measure at; every reveal if None. At a size between two reveals, the result is that
            of a shorter reveal, with its updates, after which the learners return to their state before it.
        before_at: sizes of D_t, among those measured, at which w_t is measured too: the learner as it was before it
            observed any data of the round, adapted to D_t. The regret of Eq. 3 is made of these losses. Learners that
            restart in every round have none.
        regret: whether to follow the regret protocol.
        loss: the loss to report; if None, the learner's loss without label smoothing.
        parts: slices of the outputs by name; the loss of each is reported as `loss_NAME` in `more`.
        start: the first round to play, for a learner that was restored or for which earlier tasks were preloaded.

    Yields:
        For each measured reveal, a list of one record per learner.
    """
    steps = [int(steps)] if isinstance(steps, int | np.integer) else steps
    _check_options(reveal, reveals, steps, parts)
    num_rounds = check_streams(streams, len(learners), start)
    for learner in learners:
        _check_learner(learner, ["begin", "observe", "adapt", *(["update"] if regret else [])], loss)
    metric = loss or unsmoothed(learners[0].loss)
    if gamma is not None:
        _check_threshold(gamma, takes_labels(metric))
    options = _Options(reveal, reveals, gamma, steps, measure_at, before_at, regret, metric, parts)
    for t in range(start, num_rounds):
        tasks = [stream[t] for stream in streams]
        ends = _ends(check_tasks(tasks, t), options)
        # The updates of learners that restart in every round are their adaptation to D_t, also for the regret.
        update = not regret or _restart(learners)
        num_late = 0 if update or t == 0 else len(_ends(num_rows(streams[0][t - 1].train), options))
        yield from _Round(learners, tasks, t, options).play(ends, update, num_late)


class _Options(NamedTuple):
    """The arguments of `play_together` that every round needs."""

    reveal: int
    reveals: int | None
    gamma: float | None
    steps: Sequence[int]
    measure_at: Collection[int] | None
    before_at: Collection[int]
    regret: bool
    metric: Loss
    parts: Parts


class _Round:
    """Round t and its measurements.

    Attributes:
        needed: per learner, the number of datapoints at the first record that met the threshold.
        before: by size of D_t, the values that w_t gives, per learner.
    """

    def __init__(self, learners: Sequence[Any], tasks: Sequence[Task], t: int, options: _Options) -> None:
        self.learners, self.tasks, self.t, self.options = learners, tasks, t, options
        pairs = zip(learners, tasks, strict=True)
        self._tests = [to_device(task.test, getattr(learner, "device", "cpu")) for learner, task in pairs]
        self.needed: list[int | None] = [None] * len(tasks)
        self.before: dict[int, list[dict[str, float]]] = {}

    def play(self, ends: list[int], update: bool, num_late: int) -> Iterator[list[Record]]:
        """Play the round, with reveals that end at these sizes, after the updates that are due from the last round."""
        learners, tasks, options = self.learners, self.tasks, self.options
        sizes = ends if options.measure_at is None else _up_to(options.measure_at, ends, 1)
        between = [size for size in sizes if size not in ends]
        early = _up_to(options.before_at, ends) if options.before_at and not _restart(learners) else []
        if between or early:
            _check_trials(learners, between, early, sizes, self.t)
        _begin(learners, tasks, num_late)
        for size in early:
            self.measure_before(size)
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            for size in (size for size in between if first < size < end):
                yield self.tried_records(first, size, update)
            _observe(learners, tasks, slice(first, end), update)
            if end in sizes:
                yield self.records(end)

    def records(self, datapoints: int) -> list[Record]:
        """The records of the learners as they are now."""
        records, options = [], self.options
        protocol = "regret" if options.regret else "online"
        measured = measure_together(self.learners, self._tests, options.metric, options.steps, options.parts)
        for r, (learner, task, values) in enumerate(zip(self.learners, self.tasks, measured, strict=True)):
            if options.gamma is not None and self.needed[r] is None and _meets(values, options.gamma):
                self.needed[r] = datapoints
            if task.ids is not None and hasattr(learner, "num_new"):
                values["new_datapoints"] = learner.num_new
            if datapoints in self.before:
                before = self.before[datapoints][r]
                values |= {f"{n}_before": v for n, v in before.items() if n in ("loss", "accuracy")}
            value, accuracy = values.pop("loss"), values.pop("accuracy", None)
            records.append(Record(protocol, self.t, task.name, datapoints, value, accuracy, self.needed[r], values))
        return records

    def tried_records(self, first: int, size: int, update: bool) -> list[Record]:
        """The records after a shorter reveal, which is then undone."""
        with trial(self.learners):
            _observe(self.learners, self.tasks, slice(first, size), update, tried=True)
            return self.records(size)

    def measure_before(self, size: int) -> None:
        """Measure the learners as they are now, adapted to this number of datapoints of the task."""
        with trial(self.learners):
            _observe(self.learners, self.tasks, slice(0, size), update=False, tried=True)
            self.before[size] = measure_together(
                self.learners, self._tests, self.options.metric, self.options.steps[:1]
            )


def _up_to(sizes: Collection[int], ends: list[int], least: int = 0) -> list[int]:
    """The sizes that D_t reaches, in order."""
    return sorted(size for size in {*sizes} if least <= size <= max(ends, default=0))


def _restart(learners: Sequence[Any]) -> bool:
    return all(getattr(learner, "restarts", False) for learner in learners)


def preload(learner: Any, stream: TaskStream | Sequence[Task], tasks: int, datapoints: int | None = None) -> None:
    """Warm start: store the first tasks of a stream in the learner's memory without updates.

    Play the remaining tasks with the option `start`. The authors' warm starts are `preload(learner, stream, 20, 200)`
    and `play(..., start=20)` on Rainbow and pose, and `preload(learner, stream, 16)`, the first 20 classes, with
    `start=16` on 5-way CIFAR-100.

    Args:
        learner: the learner that observes the data.
        stream: a sequence of tasks.
        tasks: the number of tasks.
        datapoints: the number of datapoints per task; all if None.
    """
    if not 0 <= tasks <= len(stream) or (datapoints is not None and datapoints < 1):
        raise ValueError(f"cannot preload {tasks} tasks of {datapoints} datapoints from {len(stream)} tasks")
    for t in range(tasks):
        task = stream[t]
        check_tasks([task], t)
        _begin([learner], [task])
        _observe([learner], [task], slice(0, datapoints), update=False)


def _begin(learners: Sequence[Any], tasks: Sequence[Task], num_late: int = 0) -> None:
    """Begin a round; in the regret protocol with the updates of the round before."""
    keeps_one = num_late > 0 and all(getattr(learner, "max_tasks", None) == 1 for learner in learners)
    if keeps_one:  # `begin` deletes the data of task t-1
        _update(learners, num_late)
    for learner, task in zip(learners, tasks, strict=True):
        # A user-defined learner need not accept `classes`.
        learner.begin(task.name, **({} if task.classes is None else {"classes": task.classes}))
    if num_late and not keeps_one:  # task t-1 is now a past task, also for a learner that trains only on past tasks
        _update(learners, num_late)


def _observe(
    learners: Sequence[Any], tasks: Sequence[Task], datapoints: slice, update: bool, tried: bool = False
) -> None:
    """Reveal datapoints; `tried` says that it is within a trial."""
    batched = tried or _are_batched(learners)
    for learner, task in zip(learners, tasks, strict=True):
        batch = rows(task.train, datapoints)
        ids = {} if task.ids is None else {"ids": task.ids[datapoints]}
        if tried:
            store(learner, batch.x, batch.y, ids=ids.get("ids"), update=update)
        else:
            learner.observe(batch.x, batch.y, update=update and not batched, **ids)
    if update and batched:
        update_together(learners)


def _update(learners: Sequence[Any], times: int) -> None:
    for _ in range(times):
        if _are_batched(learners):
            update_together(learners)
            continue
        for learner in learners:
            learner.update()


def _are_batched(learners: Sequence[Any]) -> bool:
    """Whether learners are updated as one program: not if there is one, nor if one has updates of its own."""
    return len(learners) > 1 and not any(overrides(learner, "update", "observe") for learner in learners)


def _ends(num: int, options: _Options) -> list[int]:
    """The size of D_t after each reveal of a task with this number of datapoints."""
    stop = num if options.reveals is None else min(num, options.reveal * options.reveals)
    return [min(first + options.reveal, stop) for first in range(0, stop, options.reveal)]


def _meets(values: dict[str, float], gamma: float) -> bool:
    _check_threshold(gamma, "accuracy" in values)
    return values["accuracy"] >= gamma if "accuracy" in values else values["loss"] <= gamma


def _check_threshold(gamma: float, of_accuracy: bool) -> None:
    if not isinstance(gamma, Real) or math.isnan(gamma):
        raise ValueError(f"gamma must be a number or None, got {gamma!r}")
    if gamma > 1 and of_accuracy:
        raise ValueError(f"gamma is an accuracy here, at most 1; got {gamma}")


def _check_options(reveal: int, reveals: int | None, steps: Sequence[int], parts: Parts) -> None:
    for name, value in (("reveal", reveal), ("reveals", 1 if reveals is None else reveals)):
        check_integer(name, value, 1)
    if not steps or any(not isinstance(number, int | np.integer) or number < 0 for number in steps):
        raise ValueError(f"steps must be one or more numbers of adaptation steps, each 0 or more; got {steps}")
    if reserved := sorted({"task", "before", *map(str, steps)} & parts.keys()):
        raise ValueError(f"parts of the outputs cannot be named {reserved}: records have other losses of that name")


def _check_trials(learners: Sequence[Any], between: list[int], early: list[int], sizes: list[int], t: int) -> None:
    if other := sorted({*early} - {*sizes}):
        raise ValueError(f"before_at has {other}, but round {t} is measured at {sizes} datapoints")
    for learner in learners:
        if (between or early) and not can_try(learner):
            name, wanted = ("measure_at", between) if between else ("before_at", early)
            raise ValueError(
                f"{name} has {wanted}, which needs a learner that can return to an earlier state; a"
                f" {type(learner).__name__} with its own observe or update cannot: leave these sizes out"
            )


def can_try(learner: Any) -> bool:
    """Whether a learner can be measured between reveals, and before it trains on a task."""
    return not overrides(learner, "observe", "update")


def _check_learner(learner: Any, methods: Sequence[str], loss: Loss | None) -> None:
    absent = [name for name in methods if not callable(getattr(learner, name, None))]
    if absent:
        raise ValueError(f"{type(learner).__name__} cannot be played: it has no {' and no '.join(absent)}")
    if loss is None and not callable(getattr(learner, "loss", None)):
        raise ValueError(f"a {type(learner).__name__} has no loss; pass the loss to report, play(..., loss=...)")
    if isinstance(learner, Learner) and overrides(learner, "predict") and not overrides(learner, "adapt"):
        raise ValueError(
            f"{type(learner).__name__} overrides predict, and measurements call the nets that adapt returns;"
            " override adapt, which predict calls"
        )
