"""What changes the data of a learner: a new round, and new datapoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from metaleader.learners.definition import check_repeats
from metaleader.learners.inputs import batch_of
from metaleader.learners.optimizer import State
from metaleader.learners.options import initial_module
from metaleader.memory.by_class import ClassBuffer
from metaleader.memory.by_task import TaskBuffer
from metaleader.tasks import Batch, Tree, check_alike

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner


def begin(learner: Learner, name: str, classes: Sequence[int] | None) -> None:
    """The body of `Learner.begin`."""
    options, layout = learner.options, learner.layout
    with learner.locks.changing, learner.locks.reading:
        memory, state = learner.memory, learner.state
        is_fresh = type(memory) is TaskBuffer and learner.task is None and not memory.sizes()
        if classes is not None and is_fresh and options.max_tasks is None:
            memory = ClassBuffer(learner.device, options.weights)
        if learner.definition.restarts:
            module = initial_module(learner.model, options.seed, learner.round + 1, fresh=True)
            params = {name: value.detach().to(learner.device) for name, value in module.named_parameters()}
            state = State(layout.flat(params), {}, state.step, state.step)
        memory.begin(name, classes, learner.network.num_classes)
        learner.memory, learner.state, learner.round, learner.task = memory, state, learner.round + 1, name


def checked_batch(learner: Learner, x: Tree, y: Tree, task: str | None) -> Batch:
    """Datapoints as `observe` stores them; those that it refuses raise a ValueError."""
    if task is None and learner.task is None:
        raise ValueError("observe before begin: call begin(name) to open a task first, or pass task=name")
    if task is not None and learner.definition.restarts:
        raise ValueError(f"{type(learner).__name__} trains on the current task alone: call begin(name), not task=")
    batch = batch_of(learner, x, y, "observe")
    stored = learner.memory.store.data
    if stored is not None:
        check_alike(batch, stored, "observe")
    learner.network.check(learner.params, batch, "observe")
    adaptation = learner.definition.objective.adaptation
    if adaptation is not None and stored is None:
        adaptation.check_data(learner.network, learner.layout.named(learner.state.flat), batch)
    if stored is None:
        check_repeats(learner, batch)
    return batch


def observe(
    learner: Learner, x: Tree, y: Tree, task: str | None, ids: Sequence[int] | Tensor | None, update: bool
) -> None:
    """The body of `Learner.observe`."""
    locks = learner.locks
    with locks.changing:
        batch = checked_batch(learner, x, y, task)
        with locks.reading:
            mark, state = learner.memory.mark(), learner.state
        try:
            with locks.reading:
                learner.memory.append(batch, ids, task)
            if update:
                learner.update()
        except BaseException:
            with locks.reading:
                learner.memory.rollback(mark)
                learner.state = state
            raise
