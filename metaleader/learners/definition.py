"""What distinguishes one kind of learner from another."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from metaleader.engine.hook import OwnGradient
from metaleader.engine.objective import Adaptation, GradientSteps, Objective
from metaleader.memory.rows import Which

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner


class Definition(NamedTuple):
    """What distinguishes one kind of learner from another.

    Attributes:
        objective: the loss that updates minimise.
        adaptation: gradient steps or another procedure; None for a learner that is used unadapted.
        support: datapoints per task that an update adapts on; of several numbers, every task of an update draws one.
        which: the tasks that an update draws from.
        restarts: whether every round starts from a new initialisation.
        updates_per_step: updates for each of `meta_steps`.
    """

    objective: Objective
    adaptation: GradientSteps | Adaptation | None = None
    support: int | tuple[int, ...] = 0
    which: Which = "all"
    restarts: bool = False
    updates_per_step: int = 1

    def work(self, query: int) -> tuple[Objective, int]:
        """The objective, and the largest number of datapoints of a support or query set."""
        sizes = (self.support,) if isinstance(self.support, int) else self.support
        return self.objective, max(*sizes, query)


def with_own_gradient(learner: Learner, definition: Definition, base: type[Learner]) -> Definition:
    """A definition with the learner's `task_gradient` in its objective; rejects overrides that would not be used.

    Args:
        learner: has been built up to its definition.
        definition: as returned by `define`.
        base: the class whose methods are not overrides.
    """
    objective, name = definition.objective, type(learner).__name__
    overridden = {n for n in ("task_gradient", "loss_fn") if getattr(type(learner), n) is not getattr(base, n)}
    if type(objective) is not Objective:
        raise ValueError(f"{name}.define must return an Objective; override task_gradient for another gradient")
    if definition.which == "past" and learner.options.max_tasks == 1:
        raise ValueError(f"{name} learns from past tasks, of which max_tasks=1 keeps none; keep two tasks or more")
    if "loss_fn" in overridden:
        raise ValueError(
            f"{name} overrides loss_fn, which gradients and adaptation do not call; pass another loss, or override"
            " task_gradient and adapt"
        )
    if "task_gradient" in overridden:
        unused = [n for n in ("first_order", "every_step", "learn_lr") if getattr(learner.options, n, False)]
        if unused:
            raise ValueError(f"{name} has its own task_gradient, so {', '.join(unused)} would have no effect")
        objective = dataclasses.replace(objective, own_gradient=OwnGradient(learner))
    if objective.task_gradient is not None and learner.network.has_dropout:
        raise ValueError(
            f"only gradient steps take dropout masks, not adaptation= and a task_gradient of {name}; remove the dropout"
            " layers from the model"
        )
    return definition._replace(objective=objective)
