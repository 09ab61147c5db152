"""Algorithm 1 of the paper and the regret protocol of its section 3, as generators of records."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from metaleader.engine.determinism import repeatable
from metaleader.learners import Learner, predict_together, update_together
from metaleader.losses import Loss, takes_labels, unsmoothed
from metaleader.tasks import Batch, Task, TaskStream, num_rows, rows, stream_advice, to_device

ADAPTATION_STEPS = 5

# Groups of output columns by name, as slices
Parts = Mapping[str, slice]
NO_PARTS: Parts = MappingProxyType({})


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
            outputs; for tasks with ids, `new_datapoints`, the number of datapoints of D_t that no earlier task had.
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
    regret: bool = False,
    loss: Loss | None = None,
    parts: Parts = NO_PARTS,
    start: int = 0,
) -> Iterator[list[Record]]:
    """Play one stream per learner in lockstep; two or more learners are updated as one batched program.

    Learners whose class overrides `update` or `observe`, and objects that are not a `Learner`, are updated one by one.

    Args:
        learners: learners of the same type and shape; they are changed in place.
        streams: one stream per learner, all of the same length and with tasks of equal size.
        reveal: datapoints per reveal.
        reveals: the number of reveals per task; all if None.
        gamma: the threshold of proficiency: an accuracy to reach, or for regression a loss.
        steps: one or more numbers of adaptation steps to measure; the first gives `loss` and `accuracy`, the others
            are in `more`.
        measure_at: sizes of D_t to measure at; every reveal if None.
        regret: whether to follow the regret protocol.
        loss: the loss to report; if None, the learner's loss without label smoothing.
        parts: slices of the outputs by name; the loss of each is reported as `loss_NAME` in `more`.
        start: the first round to play, for a learner that was restored or for which earlier tasks were preloaded.

    Yields:
        For each measured reveal, a list of one record per learner.
    """
    steps = [int(steps)] if isinstance(steps, int | np.integer) else steps
    _check_options(reveal, reveals, steps, parts)
    _check_streams(streams, len(learners), start)
    for learner in learners:
        _check_learner(learner, ["begin", "observe", "adapt", *(["update"] if regret else [])], loss)
    metric = loss or unsmoothed(learners[0].loss)
    if gamma is not None:
        _check_threshold(gamma, takes_labels(metric))
    # A learner that restarts in every round trains only on D_t: its updates are its adaptation.
    update = not regret or all(getattr(learner, "restarts", False) for learner in learners)
    num_late = 0  # updates of the round before
    for t in range(start, len(streams[0])):
        tasks = [stream[t] for stream in streams]
        _check_tasks(tasks, t)
        if not update and t > 0:
            num_late = len(range(0, _revealed(streams[0][t - 1], reveal, reveals), reveal))
        _begin(learners, tasks, num_late)
        needed: list[int | None] = [None] * len(tasks)
        pairs = list(zip(learners, tasks, strict=True))
        tests = [to_device(task.test, getattr(learner, "device", "cpu")) for learner, task in pairs]
        stop = _revealed(tasks[0], reveal, reveals)
        for first in range(0, stop, reveal):
            datapoints = min(first + reveal, stop)
            _observe(learners, tasks, slice(first, datapoints), update=update)
            if measure_at is not None and datapoints not in measure_at:
                continue
            records = []
            measured = measure_together(learners, tests, metric, steps, parts)
            for r, ((learner, task), values) in enumerate(zip(pairs, measured, strict=True)):
                if gamma is not None and needed[r] is None and _meets(values, gamma):
                    needed[r] = datapoints
                if task.ids is not None and hasattr(learner, "num_new"):
                    values["new_datapoints"] = learner.num_new
                value, accuracy = values.pop("loss"), values.pop("accuracy", None)
                protocol = "regret" if regret else "online"
                records.append(Record(protocol, t, task.name, datapoints, value, accuracy, needed[r], values))
            yield records


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
        _check_tasks([task], t)
        _begin([learner], [task])
        _observe([learner], [task], slice(0, datapoints), update=False)


@torch.no_grad()
def measure_together(
    learners: Sequence[Any],
    tests: Sequence[Batch],
    metric: Loss,
    steps: Sequence[int] = (ADAPTATION_STEPS,),
    parts: Parts = NO_PARTS,
) -> list[dict[str, float]]:
    """Results of `measure` for learners of the same shape, as one batched program if none overrides `adapt`."""
    batched = not any(_overrides(learner, "adapt") for learner in learners)
    predictions = predict_together(learners, [test.x for test in tests], steps) if batched else None
    if predictions is None:
        return [measure(learner, test, metric, steps, parts) for learner, test in zip(learners, tests, strict=True)]
    scores = []
    for r, test in enumerate(tests):
        values: dict[str, Tensor] = {}
        for name, prediction in predictions.items():
            values |= _scores(prediction[r], test, metric, parts, "" if name == str(steps[0]) else f"_{name}")
        scores.append(values)
    numbers = torch.stack([torch.stack([value.double() for value in values.values()]) for values in scores]).tolist()
    return [dict(zip(values, row, strict=True)) for values, row in zip(scores, numbers, strict=True)]


@torch.no_grad()
def measure(
    learner: Any,
    test: Batch,
    metric: Loss,
    steps: Sequence[int] = (ADAPTATION_STEPS,),
    parts: Parts = NO_PARTS,
    task: str | None = None,
) -> dict[str, float]:
    """Adapt, then compute loss and accuracy on held-out data for each number of steps; one transfer to the host.

    With `task`, the learner adapts to all data of that name instead of D_t.
    """
    named = {} if task is None else {"task": task}
    test = to_device(test, getattr(learner, "device", "cpu"))
    nets = dict(zip(map(str, steps), learner.adapt(steps=list(steps), statistics="batch", **named), strict=True))
    if getattr(learner, "has_batch_norm", False):
        nets["task"] = learner.adapt(steps=steps[0], statistics="task", **named)
    values: dict[str, Tensor] = {}
    with repeatable(tree_leaves(test.x)[0].device):
        for name, net in nets.items():
            values |= _scores(net(test.x), test, metric, parts, "" if name == str(steps[0]) else f"_{name}")
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


def _scores(prediction: Tensor, test: Batch, metric: Loss, parts: Parts, suffix: str) -> dict[str, Tensor]:
    scores = {f"loss{suffix}": metric(prediction, test.y).mean()}
    if takes_labels(metric) or (has_labels(test) and prediction.ndim == 2 and prediction.shape[1] > 1):
        scores[f"accuracy{suffix}"] = (prediction.argmax(1) == test.y).float().mean()
    for name, columns in () if suffix else parts.items():  # for the first number of steps only
        if prediction.ndim != 2 or not prediction[:, columns].numel():
            raise ValueError(
                f"there is no part {name!r} ({columns}) of outputs {tuple(prediction.shape)}: check `parts`"
            )
        scores[f"loss_{name}"] = metric(prediction[:, columns], test.y[:, columns]).mean()
    return scores


def has_labels(batch: Batch) -> bool:
    """Whether the targets are integers, one per datapoint: of predictions with columns, the accuracy is measured."""
    y = batch.y
    return isinstance(y, Tensor) and not y.is_floating_point() and y.ndim == 1


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


def _observe(learners: Sequence[Any], tasks: Sequence[Task], datapoints: slice, update: bool) -> None:
    batched = _are_batched(learners)
    for learner, task in zip(learners, tasks, strict=True):
        batch = rows(task.train, datapoints)
        ids = {} if task.ids is None else {"ids": task.ids[datapoints]}
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
    return len(learners) > 1 and not any(_overrides(learner, "update", "observe") for learner in learners)


def _overrides(learner: Any, *names: str) -> bool:
    """Whether an object has methods of its own in place of those of `Learner`."""
    return not isinstance(learner, Learner) or any(
        getattr(type(learner), name) is not getattr(Learner, name) or name in vars(learner) for name in names
    )


def _revealed(task: Task, reveal: int, reveals: int | None) -> int:
    num = num_rows(task.train)
    return num if reveals is None else min(num, reveal * reveals)


def _meets(values: dict[str, float], gamma: float) -> bool:
    _check_threshold(gamma, "accuracy" in values)
    return values["accuracy"] >= gamma if "accuracy" in values else values["loss"] <= gamma


def _check_threshold(gamma: float, of_accuracy: bool) -> None:
    if gamma > 1 and of_accuracy:
        raise ValueError(f"gamma is an accuracy here, at most 1; got {gamma}")


def _check_options(reveal: int, reveals: int | None, steps: Sequence[int], parts: Parts) -> None:
    if reveal < 1 or (reveals is not None and reveals < 1):
        raise ValueError(f"reveal and reveals must be at least 1, got {reveal} and {reveals}")
    if not steps or any(not isinstance(number, int | np.integer) or number < 0 for number in steps):
        raise ValueError(f"steps must be one or more numbers of adaptation steps, each 0 or more; got {steps}")
    if reserved := sorted({"task", *map(str, steps)} & parts.keys()):
        raise ValueError(f"parts of the outputs cannot be named {reserved}: records have other losses of that name")


def _check_streams(streams: Sequence[Any], num_learners: int, start: int) -> None:
    for stream in streams:
        if advice := stream_advice(stream):
            raise ValueError(f"a stream is a sequence of tasks, got {advice}")
        if not hasattr(stream, "__len__"):
            raise ValueError(
                "a stream must have a length and be indexed by round: pass a list of tasks, not an iterator"
            )
    lengths = [len(stream) for stream in streams]
    if len(set(lengths)) != 1 or len(lengths) != num_learners:
        raise ValueError(
            "there must be one stream per learner, all of the same length; got"
            f" {len(lengths)} streams of {lengths} tasks for {num_learners} learners"
        )
    if not lengths[0]:
        raise ValueError("the stream has no tasks")
    if not 0 <= start <= lengths[0]:
        raise ValueError(f"start must be a round of the stream's {lengths[0]} tasks, got {start}")


def _check_learner(learner: Any, methods: Sequence[str], loss: Loss | None) -> None:
    absent = [name for name in methods if not callable(getattr(learner, name, None))]
    if absent:
        raise ValueError(f"a {type(learner).__name__} cannot be played: it has no {' and no '.join(absent)}")
    if loss is None and not callable(getattr(learner, "loss", None)):
        raise ValueError(f"a {type(learner).__name__} has no loss; pass the loss to report, play(..., loss=...)")
    if isinstance(learner, Learner) and _overrides(learner, "predict") and not _overrides(learner, "adapt"):
        raise ValueError(
            f"{type(learner).__name__} overrides predict, and measurements call the nets that adapt returns;"
            " override adapt, which predict calls"
        )


def _check_tasks(tasks: Sequence[Any], t: int) -> None:
    for task in tasks:
        if not isinstance(task, Task):
            raise ValueError(f"stream[{t}] is a {type(task).__name__}, not a Task(name, train, test)")
    sizes = {num_rows(task.train) for task in tasks}
    if len(sizes) > 1:
        raise ValueError(
            f"streams played together must have tasks of equal size; round {t} has {sorted(sizes)} datapoints"
        )
