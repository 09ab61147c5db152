"""Updates (draw, gather, gradient, outer step of Algorithm 2) and predictions of learners side by side.

An update is a pure function of the learners' states: `Outer` copies their rows into one tensor, steps in place, and
returns new states.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.engine.form import choose_form
from metaleader.engine.hook import OwnGradient, StateReadError
from metaleader.engine.objective import GradientSteps
from metaleader.learners.batches import (
    GATHERED_UPDATES,
    Gathered,
    draw_meta_batches,
    draw_numbers,
    gather,
    stack,
    stacked_batches,
    unbind,
)
from metaleader.learners.changes import Change
from metaleader.learners.optimizer import State
from metaleader.learners.options import check_integer
from metaleader.learners.outer import Outer
from metaleader.learners.outliers import Failure, judge, longest_gradients, names_text, quarantine
from metaleader.learners.sharded import ShardedDraw, ShardedGradient, draw_shards, merge_norms, run_sharded_updates
from metaleader.memory.rows import Draw
from metaleader.system.settings import keeps_settings
from metaleader.tasks import ClassBatch, Tree

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


def gather_updates(learner: Learner, steps: int) -> Gathered | None:
    """The meta-batches of the next updates, copied from the data of this moment; None if there is nothing to draw."""
    first = learner.step
    numbers = range(first, first + steps * learner.definition.updates_per_step)
    draw = draw_meta_batches(learner, numbers) if numbers else None
    return None if draw is None else Gathered(*gather(learner, draw))


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
        draws = [_draw(learner, numbers, names) if numbers else None for learner, names in pairs]
        if any(draw is None for draw in draws):
            return
        if len({tuple(draw.weights > 0) for draw in draws if isinstance(draw, ShardedDraw)}) > 1:
            _update_one_by_one(learners, steps)  # the shards that take part differ
            return
        outer = Outer(lead.rule, lead.definition.objective.layout, before)
        failed = _first_failure(learners, outer, numbers, [draw for draw in draws if draw is not None])
        if failed is None:
            break
        update, r, error = failed
        aside[r] |= _culprits(learners[r], draws[r], numbers, update, aside[r], outer, error)
    states = list(outer.states(numbers.stop))
    if len(learners) == 1 and not aside[0]:  # one assignment, which happens or does not
        vars(lead).update(state=states[0])
        return
    with Change(learners, nested=True):
        for learner, state, reasons in zip(learners, states, aside, strict=True):
            learner.state = state
            if reasons:
                quarantine(learner, reasons)


def _culprits(
    learner: Learner,
    draw: Draw | ShardedDraw | None,
    numbers: range,
    update: int,
    aside: Mapping[str, str],
    outer: Outer,
    error: ValueError | None,
) -> dict[str, str]:
    """The tasks to leave out after a failed update, with reasons; raises an error if they cannot be singled out."""
    assert draw is not None
    draw, examined = draw.at(slice(0, update + 1)), draw_numbers(learner, numbers[: update + 1])
    if isinstance(draw, ShardedDraw):
        norms: dict[str | None, float] | None = {}
        for shard, drawn in draw.by_shard.items():
            some = longest_gradients(learner, examined, gather(learner, drawn), aside, shard)
            norms = None if norms is None or some is None else _largest(norms, some)
        norms = merge_norms(learner.sharding, norms)
    else:
        norms = longest_gradients(learner, examined, gather(learner, draw), aside)
    failure = judge(norms)
    num = len(learner.memory.sizes()) - len(learner.set_aside)
    if failure.culprits and 2 * len(failure.culprits.keys() | aside.keys()) <= num:
        return failure.culprits
    if None not in failure.bad and num > 1 and (error is None or len(failure.bad) < len(failure.drawn)):
        learner.skipped += len(numbers)
    raise error or _not_finite(learner, failure, update, len(numbers), outer.lrs(numbers)[update])


def _largest(norms: dict[str | None, float], others: dict[str | None, float]) -> dict[str | None, float]:
    return norms | {name: max(norm, norms.get(name, 0.0)) for name, norm in others.items()}


def _first_failure(
    learners: Sequence[Learner], outer: Outer, numbers: range, draws: Sequence[Draw | Gathered | ShardedDraw]
) -> tuple[int, int, ValueError | None] | None:
    """Run the updates; the first one that fails and its learner, and the error that it raised, if any."""
    sharded = [draw for draw in draws if isinstance(draw, ShardedDraw)]
    gradient = ShardedGradient(learners[0].sharding, [draw.weights for draw in sharded], outer) if sharded else None
    try:
        if gradient is None:
            watched = _run_updates(
                learners,
                outer,
                numbers,
                [draw for draw in draws if draw is not None and not isinstance(draw, ShardedDraw)],
            )
        else:
            watched = run_sharded_updates(learners, outer, numbers, sharded, gradient)
    except ValueError as error:  # of a solver, for one
        if len(learners) > 1:
            raise
        return len(numbers) - 1, 0, error
    finite = torch.isfinite(watched).all(1)
    # The last parameters too. This is the one point where the host waits for the device.
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


def _not_finite(learner: Learner, failure: Failure, update: int, num_updates: int, lr: float) -> ValueError:
    adaptation = learner.definition.adaptation
    inner = f" or inner_lr ({adaptation.lr or 'learned'})" if isinstance(adaptation, GradientSteps) else ""
    drawn = names_text(failure.drawn, learner.task)
    bad = f"; not finite alone: {names_text(failure.bad, learner.task)}" if failure.bad else ""
    return ValueError(
        f"the loss, its gradient or a parameter is not finite at update {update + 1} of {num_updates}, round"
        f" {learner.round} (task {learner.task!r}, {learner.num_datapoints} datapoints; drawn: {drawn}{bad}): lower"
        f" meta_lr ({lr}){inner}, set clip, or check the scale of the data; the learner is as before the call"
    )


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


@keeps_settings
def _run_updates(learners: Sequence[Learner], outer: Outer, numbers: range, draws: Sequence[Draw | Gathered]) -> Tensor:
    """Take all updates; returns losses and gradient norms, (updates, 2, learners)."""
    lead = learners[0]
    engine, objective = lead.engine, lead.definition.objective
    lrs = outer.lrs(numbers)
    watched: list[Tensor] = []
    for start in range(0, len(numbers), GATHERED_UPDATES):
        chunk = slice(start, start + GATHERED_UPDATES)
        support, query, noise = stacked_batches(learners, numbers, draws, chunk)
        if outer.form is None:
            first = tree_map(lambda leaf: leaf if leaf is None else leaf[0], (support, query, noise))
            outer.form = choose_form(objective, outer.flat, *first)
        objective = lead.definition.objective.in_form(outer.form)
        if outer.elementwise and engine.runs_updates_together(objective):
            tensors, values = engine.updates(
                objective, outer.make, outer.tensors, outer.lr_tensor(lrs[chunk]), support, query, noise
            )
            outer.replace(tensors)
            watched += values
            continue
        for i, (s, q) in enumerate(unbind([support, query])):
            values, gradients = engine.gradient(objective, outer.flat, s, q, None if noise is None else noise[i])
            outer.step(gradients, values[1], lrs[start + i])
            watched.append(values)
    return torch.stack(watched)


@keeps_settings
@torch.no_grad()
def predict_together(learners: Sequence[Learner], xs: Sequence[Tree], steps: Sequence[int]) -> dict[str, Tensor] | None:
    """Predictions of learners of one shape adapted to D_t, (learners, rows, ...), by number of steps and "task".

    None where the learners must be asked one by one: with dropout, whose masks differ, without data, and where
    learners, data or rows differ in kind or shape.
    """
    lead = learners[0]
    if any(number < 0 for number in steps):
        raise ValueError(f"steps must be integers of at least 0, got {list(steps)}")
    data = [learner.memory.current() if learner.task is not None else None for learner in learners]
    if lead.network.has_dropout or any(batch is None for batch in data):
        return None
    kinds = {(type(learner), learner.definition.adaptation) for learner in learners}
    ways = [learner.memory.current_classes() if learner.task is not None else None for learner in learners]
    sizes = {
        str(tree_map(lambda leaf: leaf.shape, group))
        for group in zip(data, xs, (() if one is None else one for one in ways), strict=True)
    }
    if len(kinds) > 1 or len(sizes) > 1 or not all(lead.network.is_like(learner.network) for learner in learners[1:]):
        return None
    params = lead.definition.objective.layout.named(torch.stack([learner.state.flat for learner in learners]))
    chosen = lead.network.num_classes is not None
    stacked_classes = stack([learner.memory.current_classes() for learner in learners]) if chosen else None
    batch, x = stack(list(zip(data, xs, strict=True)))
    batch = batch if stacked_classes is None else ClassBatch(batch.x, batch.y, stacked_classes)
    adaptation = lead.definition.adaptation
    return lead.engine.predictions(lead.network, adaptation, steps, params, batch, x, stacked_classes)


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
