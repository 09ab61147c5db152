"""What distinguishes one kind of learner from another."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._pytree import tree_map

from metaleader.engine.hook import OwnGradient
from metaleader.engine.objective import Adaptation, GradientSteps, Objective
from metaleader.memory.rows import Which
from metaleader.tasks import Batch, ClassBatch

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


def with_own_gradient(learner: Learner, definition: Definition, overridden: set[str]) -> Definition:
    """A definition with the learner's `task_gradient` in its objective; rejects overrides that would not be used.

    Args:
        learner: has been built up to its definition.
        definition: as returned by `define`.
        overridden: the names of methods that its class overrides.
    """
    objective, name = definition.objective, type(learner).__name__
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
            f"the gradient of {name} is not one of gradient steps and takes no dropout masks; remove"
            " the dropout layers from the model"
        )
    return definition._replace(objective=objective)


@torch.no_grad()
def check_repeats(learner: Learner, batch: Batch) -> None:
    """Reject several support sizes if repeating all datapoints changes the gradient, as with a sum over datapoints.

    Support sets of one update have the largest size; smaller ones are repeated to fill it.
    """
    sizes, adaptation = learner.definition.support, learner.definition.objective.adaptation
    if isinstance(sizes, int) or len(sizes) == 1 or (adaptation is not None and adaptation.takes_weights):
        return
    params, classes = learner.layout.named(learner.state.flat), learner.chosen_classes()
    gradients = []
    for times in (1, 2):
        repeated = tree_map(lambda leaf: torch.cat([leaf] * times), batch)  # noqa: B023
        support, query = (b if classes is None else ClassBatch(b.x, b.y, classes) for b in (repeated, batch))
        with torch.enable_grad():
            _, gradient = learner.task_gradient(tree_map(torch.clone, params), support, query)
        gradients.append(learner.layout.flat(gradient).detach())
    once, twice = gradients
    if float((once - twice).norm()) > 1e-3 * float(once.norm()):
        raise ValueError(
            f"support={list(sizes)} needs a loss and an adaptation that are means over datapoints: repeating all"
            " datapoints changes the gradient; use one support size"
        )
