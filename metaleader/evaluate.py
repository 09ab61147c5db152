"""The play: Algorithm 1 of the paper as a generator of records, and the regret protocol of its section 3."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from metaleader.engine.determinism import repeatable
from metaleader.learners import Learner, predict_together, update_together
from metaleader.losses import Loss, takes_labels, unsmoothed
from metaleader.tasks import Batch, Task, TaskStream, num_rows, rows, to_device

ADAPTATION_STEPS = 5

# Parts of the outputs by name, as slices of their columns
Parts = Mapping[str, slice]
NO_PARTS: Parts = MappingProxyType({})


@dataclass(frozen=True)
class Record:
    """One measurement on held-out data.

    Attributes:
        protocol: "online" (Algorithm 1) or "regret" (section 3: the learner had not trained on this task).
        round: t, from 0.
        task: the task's name.
        datapoints: the size of D_t.
        loss: the mean loss on the held-out data, without label smoothing, batch norm by the test batch as in the paper.
        accuracy: the fraction classified correctly; None for regression.
        needed: the datapoints at the first record of this round that met the threshold; None while none has.
        more: the same for other numbers of adaptation steps (`loss_1`, `accuracy_1`, ...), and, where the net has batch
            norm, with statistics of D_t (`loss_task`, `accuracy_task`); the losses of parts of the outputs, where asked
            for. For tasks with ids, `new_datapoints`: how many of D_t's datapoints no earlier task had.
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
    """Play a stream: reveal data, let the learner observe, adapt, measure on held-out data.

    The learner receives training batches only. In the regret protocol w_t is fixed while round t is measured: the data
    is only stored, and the updates of the round are made when the next round begins. `Scratch`, which has no w_t, is
    trained on the data of the round.

    Args:
        learner: changed as it learns.
        stream: a sequence of tasks.
        reveal: datapoints revealed at a time.
        options: `reveals`, how many reveals of a task are used; `gamma`, the threshold of proficiency; `steps`, the
            numbers of adaptation steps to measure, 5 if not given, whatever the learner's own; `start`, the first round
            to play, for a learner that was loaded; and the others of `metaleader.evaluate.play_together`.

    Yields:
        A record for each measured reveal.
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
    """Play streams of one shape side by side, each with its own learner; several are updated as one program.

    Args:
        learners: of one kind and shape, each changed as it learns.
        streams: one for each learner.
        reveal: datapoints revealed at a time.
        reveals: how many reveals of a task are used; all if None.
        gamma: the threshold of proficiency: an accuracy to reach, or for regression a loss.
        steps: the number of adaptation steps to measure, or several; the first is the record's own, others go to
            `more`.
        measure_at: measure only at these sizes of D_t; at every reveal if None.
        regret: follow the regret protocol.
        loss: the loss to report; the learner's own without label smoothing if None.
        parts: names of parts of the outputs whose loss is reported by itself too, as `loss_NAME` in `more`.
        start: the first round to play, for a learner that was restored or had earlier tasks preloaded.

    Yields:
        For each measured reveal, one record a learner.
    """
    if reveal < 1 or (reveals is not None and reveals < 1):
        raise ValueError(f"reveal and reveals must be at least 1, got {reveal} and {reveals}")
    steps = [int(steps)] if isinstance(steps, int | np.integer) else steps
    if not steps or any(not isinstance(number, int | np.integer) or number < 0 for number in steps):
        raise ValueError(f"steps must be one or more numbers of adaptation steps, 0 or more each; got {steps}")
    taken = {"task", *map(str, steps)} & parts.keys()
    if taken:
        raise ValueError(
            f"parts of the outputs cannot be named {sorted(taken)}: records have other losses of that name"
        )
    if any(not hasattr(stream, "__len__") for stream in streams):
        raise ValueError("a stream must have a length and be indexed by round: pass a list of tasks, not an iterator")
    if len({len(stream) for stream in streams}) != 1 or len(streams) != len(learners):
        raise ValueError("there must be one stream a learner, all of the same length")
    if len(streams[0]) == 0:
        raise ValueError("the stream has no tasks")
    if not 0 <= start <= len(streams[0]):
        raise ValueError(f"start must be a round of the stream's {len(streams[0])} tasks, got {start}")
    metric = loss or unsmoothed(learners[0].loss)
    _check_threshold(gamma, takes_labels(metric))
    for t in range(start, len(streams[0])):
        tasks = [stream[t] for stream in streams]
        _check_tasks(tasks, t)
        pairs = list(zip(learners, tasks, strict=True))
        for learner, task in pairs:
            _begin(learner, task)
        # A learner that starts anew in every round trains on D_t alone: its updates are its adaptation.
        update = not regret or all(getattr(learner, "restarts", False) for learner in learners)
        if not update and t > 0:
            # Task t-1 is now a past task, also for a learner that trains on past tasks alone.
            for _ in range(0, _revealed(streams[0][t - 1], reveal, reveals), reveal):
                _update(learners)
        needed: list[int | None] = [None] * len(tasks)
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
                if needed[r] is None and _meets(values, gamma):
                    needed[r] = datapoints
                if task.ids is not None and hasattr(learner, "num_new"):
                    values["new_datapoints"] = learner.num_new
                value, accuracy = values.pop("loss"), values.pop("accuracy", None)
                protocol = "regret" if regret else "online"
                records.append(Record(protocol, t, task.name, datapoints, value, accuracy, needed[r], values))
            yield records


def preload(learner: Any, stream: TaskStream | Sequence[Task], tasks: int, datapoints: int | None = None) -> None:
    """Warm start: keep the first tasks of a stream in the learner's memory, without updates; then play from there on.

    The authors' warm starts: `preload(learner, stream, 20, 200)` and `play(..., start=20)` on Rainbow and pose, and
    `preload(learner, stream, 16)`, the first 20 classes, with `start=16` on 5-way CIFAR-100.

    Args:
        learner: gets the data.
        stream: a sequence of tasks.
        tasks: how many.
        datapoints: how many of each task; all if None.
    """
    if not 0 <= tasks <= len(stream) or (datapoints is not None and datapoints < 1):
        raise ValueError(
            f"cannot preload {tasks} tasks of {datapoints} datapoints from a stream of {len(stream)} tasks"
        )
    for t in range(tasks):
        task = stream[t]
        _check_tasks([task], t)
        _begin(learner, task)
        _observe([learner], [task], slice(0, datapoints), update=False)


@torch.no_grad()
def measure_together(
    learners: Sequence[Any],
    tests: Sequence[Batch],
    metric: Loss,
    steps: Sequence[int] = (ADAPTATION_STEPS,),
    parts: Parts = NO_PARTS,
) -> list[dict[str, float]]:
    """What `measure` finds of learners of one shape, as one program where the learners adapt the library's way."""
    own = all(isinstance(learner, Learner) and type(learner).adapt is Learner.adapt for learner in learners)
    predictions = predict_together(learners, [test.x for test in tests], steps) if own else None
    if predictions is None:
        return [measure(learner, test, metric, steps, parts) for learner, test in zip(learners, tests, strict=True)]
    found = []
    for r, test in enumerate(tests):
        values: dict[str, Tensor] = {}
        for name, prediction in predictions.items():
            values |= _scores(prediction[r], test, metric, parts, "" if name == str(steps[0]) else f"_{name}")
        found.append(values)
    numbers = torch.stack([torch.stack([value.double() for value in values.values()]) for values in found]).tolist()
    return [dict(zip(values, row, strict=True)) for values, row in zip(found, numbers, strict=True)]


@torch.no_grad()
def measure(
    learner: Any,
    test: Batch,
    metric: Loss,
    steps: Sequence[int] = (ADAPTATION_STEPS,),
    parts: Parts = NO_PARTS,
) -> dict[str, float]:
    """Adapt, then loss and accuracy on held-out data, for each number of steps; all values in one transfer."""
    test = to_device(test, getattr(learner, "device", "cpu"))
    values: dict[str, Tensor] = {}
    for number, net in zip(steps, learner.adapt(steps=list(steps), statistics="batch"), strict=True):
        suffix = "" if number == steps[0] else f"_{number}"
        values |= _net_scores(net, test, metric, parts, suffix)
    if getattr(learner, "has_batch_norm", False):
        values |= _net_scores(learner.adapt(steps=steps[0], statistics="task"), test, metric, parts, "_task")
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


def _net_scores(net: nn.Module, test: Batch, metric: Loss, parts: Parts, suffix: str) -> dict[str, Tensor]:
    with repeatable(tree_leaves(test.x)[0].device):
        return _scores(net(test.x), test, metric, parts, suffix)


def _scores(prediction: Tensor, test: Batch, metric: Loss, parts: Parts, suffix: str) -> dict[str, Tensor]:
    scores = {f"loss{suffix}": metric(prediction, test.y).mean()}
    if takes_labels(metric) or (_integers(test.y) and prediction.ndim == 2 and prediction.shape[1] > 1):
        scores[f"accuracy{suffix}"] = (prediction.argmax(1) == test.y).float().mean()
    for name, of in () if suffix else parts.items():  # of the record's own number of steps
        if prediction.ndim != 2 or not prediction[:, of].numel():
            raise ValueError(f"there is no part {name!r} ({of}) of outputs {tuple(prediction.shape)}: check `parts`")
        scores[f"loss_{name}"] = metric(prediction[:, of], test.y[:, of]).mean()
    return scores


def _integers(y: Any) -> bool:
    return isinstance(y, Tensor) and not y.is_floating_point() and y.ndim == 1


def _begin(learner: Any, task: Task) -> None:
    # A learner of the user's own need not know of classes and ids.
    if task.classes is None:
        learner.begin(task.name)
    else:
        learner.begin(task.name, classes=task.classes)


def _observe(learners: Sequence[Any], tasks: Sequence[Task], part: slice, update: bool) -> None:
    alone = len(learners) == 1
    for learner, task in zip(learners, tasks, strict=True):
        batch = rows(task.train, part)
        ids = {} if task.ids is None else {"ids": task.ids[part]}
        learner.observe(batch.x, batch.y, update=update and alone, **ids)
    if update and not alone:
        update_together(learners)


def _update(learners: Sequence[Any]) -> None:
    if len(learners) == 1:
        learners[0].update()
    else:
        update_together(learners)


def _revealed(task: Task, reveal: int, reveals: int | None) -> int:
    num = num_rows(task.train)
    return num if reveals is None else min(num, reveal * reveals)


def _meets(values: dict[str, float], gamma: float | None) -> bool:
    if gamma is None:
        return False
    _check_threshold(gamma, "accuracy" in values)
    return values["accuracy"] >= gamma if "accuracy" in values else values["loss"] <= gamma


def _check_threshold(gamma: float | None, of_accuracy: bool) -> None:
    if gamma is not None and gamma > 1 and of_accuracy:
        raise ValueError(f"gamma is an accuracy here, at most 1; got {gamma}")


def _check_tasks(tasks: Sequence[Any], t: int) -> None:
    for task in tasks:
        if not isinstance(task, Task):
            raise ValueError(f"stream[{t}] is a {type(task).__name__}, not a Task(name, train, test)")
    sizes = {num_rows(task.train) for task in tasks}
    if len(sizes) > 1:
        raise ValueError(
            f"streams side by side must have tasks of equal size; round {t} has {sorted(sizes)} datapoints"
        )
