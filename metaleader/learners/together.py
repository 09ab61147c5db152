"""Updates of one or more learners as a whole: all take effect, or none; tasks that make them fail are set aside.

An update is a pure function of the learners' states: `Outer` copies their rows into one tensor, steps in place, and
returns new states, which the learners then get.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from metaleader.engine.hook import OwnGradient, StateReadError
from metaleader.learners.changes import Change
from metaleader.learners.optimizer import State
from metaleader.learners.options import check_integer
from metaleader.learners.outer import Outer
from metaleader.learners.outliers import culprits, quarantine
from metaleader.learners.sharded import ShardedDraw, ShardedGradient, draw_shards, run_sharded_updates
from metaleader.learners.update import Gathered, draw_meta_batches, run_updates
from metaleader.memory.rows import Draw
from metaleader.system.settings import keeps_settings

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner


@keeps_settings
@torch.no_grad()
def update_together(learners: Sequence[Learner], steps: int | None = None) -> None:
    """Run the updates of learners of one shape side by side, on the engine of the first.

    Each learner has its own parameters, data, draws and optimiser state; its result does not depend on the others.

    Raises:
        ValueError: if a loss or gradient is not finite, or steps is no number of updates; all learners are then as
            before the call.
    """
    if steps is not None:
        check_integer("steps", steps, 0)
    if len(learners) > 1 and not _are_shareable(learners):
        _update_one_by_one(learners, steps)
        return
    try:
        _update_side_by_side(learners, steps)
    except StateReadError as error:
        for learner in learners:
            own = learner.definition.objective.own_gradient
            assert isinstance(own, OwnGradient)
            own.read_state(error, warn=learner is learners[0])
        _update_one_by_one(learners, steps)


class FailedUpdate(Exception):  # noqa: N818
    """A loss, a gradient or a parameter became not finite."""


@keeps_settings
@torch.no_grad()
def state_after(learner: Learner, state: State, steps: int, batches: Gathered) -> State:
    """The state after updates on meta-batches of `gather_updates`; the learner is not changed.

    Raises:
        FailedUpdate: if an update fails.
        StateReadError: if the learner's `task_gradient` depends on attributes that may change.
    """
    numbers = range(state.step, state.step + steps * learner.definition.updates_per_step)
    outer = Outer(learner.rule, learner.definition.objective.layout, [state])
    if _first_failure([learner], outer, numbers, [batches]) is not None:
        raise FailedUpdate
    return outer.states(numbers.stop)[0]


def _update_side_by_side(learners: Sequence[Learner], steps: int | None) -> None:
    lead, before = learners[0], [learner.state for learner in learners]
    num_updates = lead.definition.updates_per_step * (lead.options.meta_steps if steps is None else steps)
    numbers = range(before[0].step, before[0].step + num_updates)
    if len(learners) > 1:
        _check_alike(learners)
    aside: list[dict[str, str]] = [{} for _ in learners]
    while True:
        pairs = zip(learners, aside, strict=True)
        drawn = [_draw(learner, numbers, names) if numbers else None for learner, names in pairs]
        draws = [draw for draw in drawn if draw is not None]
        if len(draws) < len(learners):
            return
        if len({tuple(draw.weights > 0) for draw in draws if isinstance(draw, ShardedDraw)}) > 1:
            _update_one_by_one(learners, steps)  # the shards that take part differ
            return
        outer = Outer(lead.rule, lead.definition.objective.layout, before)
        failed = _first_failure(learners, outer, numbers, draws)
        if failed is None:
            break
        update, r, error = failed
        aside[r] |= culprits(learners[r], draws[r], numbers, update, aside[r], outer, error)
    states = list(outer.states(numbers.stop))
    if len(learners) == 1 and not aside[0]:  # one assignment, which happens or does not
        vars(lead).update(state=states[0])
        return
    with Change(learners, nested=True):
        for learner, state, reasons in zip(learners, states, aside, strict=True):
            learner.state = state
            if reasons:
                quarantine(learner, reasons)


def _first_failure(
    learners: Sequence[Learner], outer: Outer, numbers: range, draws: Sequence[Draw | Gathered | ShardedDraw]
) -> tuple[int, int, ValueError | None] | None:
    """Run the updates; the first one that fails and its learner, and the error that it raised, if any."""
    sharded = [draw for draw in draws if isinstance(draw, ShardedDraw)]
    gradient = ShardedGradient(learners[0].sharding, [draw.weights for draw in sharded], outer) if sharded else None
    try:
        if gradient is None:
            unsharded = [draw for draw in draws if not isinstance(draw, ShardedDraw)]
            watched = run_updates(learners, outer, numbers, unsharded)
        else:
            watched = run_sharded_updates(learners, outer, numbers, sharded, gradient)
    except ValueError as error:  # of a solver, for one
        if len(learners) > 1:
            raise
        return len(numbers) - 1, 0, error
    # The last parameters too. This is the one point where the host waits for the device. A sum is not finite if a part
    # is not; finite parts may overflow.
    if math.isfinite(float(watched.sum() + outer.flat.sum())):
        return None
    finite = torch.isfinite(watched).all(1)
    finite = torch.cat([finite[:-1], (finite[-1] & torch.isfinite(outer.flat).all(1))[None]]).cpu()
    if bool(finite.all()):
        return None
    failed = None if gradient is None else gradient.error()
    if failed is not None:
        if failed.is_state_read or len(learners) > 1:
            raise failed.error()
        return len(numbers) - 1, 0, ValueError(failed.text)
    update, r = (int(value) for value in (~finite).nonzero()[0])
    return update, r, None


def _are_shareable(learners: Sequence[Learner]) -> bool:
    """Whether one program serves all learners.

    Their networks and forms of the gradient are alike, and so is all that a `task_gradient` reads.
    """
    lead = learners[0]
    values = []
    for learner in learners:
        own = learner.definition.objective.own_gradient
        if not lead.network.is_like(learner.network) or (isinstance(own, OwnGradient) and not own.shared):
            return False
        classes = learner.memory.current_classes()
        ways = None if classes is None else len(classes)  # of tasks with several numbers of classes
        values.append((own.values() if isinstance(own, OwnGradient) else own, learner.state.form, ways))
    return all(value == values[0] for value in values)


def _update_one_by_one(learners: Sequence[Learner], steps: int | None) -> None:
    """Update learners that cannot share a program; on an error all are as before."""
    with Change(learners, nested=True):
        for learner in learners:
            update_together([learner], steps)


def _check_alike(learners: Sequence[Learner]) -> None:
    lead = learners[0]
    if any(learner.state.step != lead.state.step or type(learner) is not type(lead) for learner in learners):
        raise ValueError("learners side by side must be of one kind and have made the same number of updates")
    if len({learner.definition.objective.key() for learner in learners}) > 1:
        raise ValueError("learners side by side must have the same inner loop (inner_lr, inner_steps, only, ...)")
    definitions = [learner.definition._replace(objective=lead.definition.objective) for learner in learners]
    if any(definition != definitions[0] for definition in definitions):
        raise ValueError("learners side by side must have the same support, adaptation and number of updates")
    if any(o.rule != lead.rule or o.state.schedule_start != lead.state.schedule_start for o in learners):
        raise ValueError("learners side by side must have the same optimizer, meta_lr and clip")


def _draw(learner: Learner, numbers: Sequence[int], without: Collection[str]) -> Draw | ShardedDraw | None:
    """The meta-batches of some updates; None if there is nothing to draw from."""
    if learner.options.shards == 1:
        return draw_meta_batches(learner, numbers, without)
    return draw_shards(learner, numbers, without)
