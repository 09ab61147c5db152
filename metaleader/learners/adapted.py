"""What `adapt` gives: nets adapted to D_t, or to all that was observed of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from metaleader.engine.determinism import repeatable
from metaleader.learners.options import check_integer
from metaleader.memory.by_class import ClassBuffer
from metaleader.nets.functional import Statistics
from metaleader.tasks import Batch, ClassBatch, num_rows, rng

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner


@torch.no_grad()
def adapted_nets(
    learner: Learner, steps: Sequence[int | None], statistics: Statistics, task: str | None
) -> list[nn.Module]:
    """A net for each number of steps, None being the learner's own: `Learner.adapt`."""
    data, classes, how = _data(learner, task), learner._classes(), learner._adaptation()
    wanted = [(0 if how is None else how.steps) if number is None else number for number in steps]
    for number in wanted:
        check_integer("steps", number, 0)
    nets: dict[int, nn.Module] = {}
    params, done = learner._outer.params, 0
    for number in sorted(set(wanted)):
        if how is not None and data is not None:
            batch = data if classes is None else ClassBatch(*data, classes)
            noise = _noise(learner, done, number, num_rows(data))
            with repeatable():
                params = how.walk(learner._network.loss_fn, params, batch, number - done, noise)
            done = number
        nets[number] = learner._network.adapted(
            params, data, statistics, like=learner._buffer.store.data, classes=classes
        )
    return [nets[number] for number in wanted]


def _data(learner: Learner, task: str | None) -> Batch | None:
    """What to adapt to: D_t, or all datapoints of a task by its name."""
    buffer = learner._buffer
    if task is None:
        return buffer.current() if learner.task is not None else None
    if isinstance(buffer, ClassBuffer):
        raise ValueError("n-way tasks keep their data by class, not by task; adapt to the open task, task=None")
    if learner._adaptation() is None:
        raise ValueError(f"{type(learner).__name__} is used as it is, and adapts to no task; leave task=None")
    if str(task) not in {*buffer.names, learner.task}:
        known = ", ".join(dict.fromkeys(buffer.names)) or "none yet"
        forgotten = buffer.seen - len(buffer)
        also = f"; {forgotten} more are forgotten, for max_tasks={buffer.max_tasks}" if forgotten else ""
        raise ValueError(f"nothing is kept under {task!r}; tasks with data: {known}{also}")
    return buffer.named(str(task))


def _noise(learner: Learner, done: int, stop: int, num_datapoints: int) -> Tensor | None:
    if not learner._network.has_dropout:
        return None
    drawn = rng("adapt dropout", learner.seed, learner.round, num_datapoints).integers(2**31, size=stop)
    return torch.from_numpy(drawn[done:]).to(learner.device)
