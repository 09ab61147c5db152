"""Updates (draw, gather, gradient, outer step of Algorithm 2) and predictions of learners side by side.

An update is a pure function of the learners' states: `Outer` copies their rows into one tensor, steps in place, and
returns new states.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from metaleader.engine.hook import OwnGradient, StateReadError
from metaleader.engine.objective import GradientSteps
from metaleader.learners.changes import Change
from metaleader.learners.options import check_integer
from metaleader.learners.outer import Outer
from metaleader.learners.outliers import Failure, examine, names_text, quarantine
from metaleader.memory.rows import Draw
from metaleader.system.settings import keeps_settings
from metaleader.tasks import ClassBatch, Tree, WeightedBatch, rng

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner

# The number of updates whose datapoints are gathered at once
_GATHERED_UPDATES = 10


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


def _update_side_by_side(learners: Sequence[Learner], steps: int | None) -> None:
    lead, before = learners[0], [learner.state for learner in learners]
    num_updates = lead.definition.updates_per_step * (lead.options.meta_steps if steps is None else steps)
    numbers = range(before[0].step, before[0].step + num_updates)
    if len(learners) > 1:
        _check_alike(learners)
    aside: list[dict[str, str]] = [{} for _ in learners]
    while True:
        pairs = zip(learners, aside, strict=True)
        draws = [draw_meta_batches(learner, numbers, names) if numbers else None for learner, names in pairs]
        if any(draw is None for draw in draws):
            return
        outer = Outer(lead.rule, lead.definition.objective.layout, before)
        failed = _first_failure(learners, outer, numbers, [draw for draw in draws if draw is not None])
        if failed is None:
            break
        update, r, error = failed
        aside[r] |= _culprits(learners[r], draws[r], numbers, update, aside[r], outer, error)
    with Change(learners, nested=True):
        for learner, state, reasons in zip(learners, outer.states(numbers.stop), aside, strict=True):
            learner.state = state
            quarantine(learner, reasons)


def _culprits(
    learner: Learner,
    draw: Draw | None,
    numbers: range,
    update: int,
    aside: Mapping[str, str],
    outer: Outer,
    error: ValueError | None,
) -> dict[str, str]:
    """The tasks to leave out after a failed update, with reasons; raises an error if they cannot be singled out."""
    assert draw is not None
    draw = draw.at(slice(0, update + 1))
    failure = examine(learner, _shifted(learner, numbers[: update + 1]), draw, _gather(learner, draw), aside)
    num = len(learner.memory.sizes()) - len(learner.set_aside)
    if failure.culprits and 2 * len(failure.culprits.keys() | aside.keys()) <= num:
        return failure.culprits
    if None not in failure.bad and num > 1 and (error is None or len(failure.bad) < len(failure.drawn)):
        learner.skipped += len(numbers)
    raise error or _not_finite(learner, failure, update, len(numbers), outer.lrs(numbers)[update])


def _first_failure(
    learners: Sequence[Learner], outer: Outer, numbers: range, draws: Sequence[Draw]
) -> tuple[int, int, ValueError | None] | None:
    """Run the updates; the first one that fails and its learner, and the error that it raised, if any."""
    try:
        watched = _run_updates(learners, outer, numbers, draws)
    except ValueError as error:  # of a solver, for one
        if len(learners) > 1:
            raise
        return len(numbers) - 1, 0, error
    finite = torch.isfinite(watched).all(1)
    # The last parameters too. This is the one point where the host waits for the device.
    finite = torch.cat([finite[:-1], (finite[-1] & torch.isfinite(outer.flat).all(1))[None]]).cpu()
    if bool(finite.all()):
        return None
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
    """Whether one program serves all learners: their networks are alike, and so is all that a `task_gradient` reads."""
    lead = learners[0]
    values = []
    for learner in learners:
        own = learner.definition.objective.own_gradient
        if not lead.network.is_like(learner.network) or (isinstance(own, OwnGradient) and not own.shared):
            return False
        values.append(own.values() if isinstance(own, OwnGradient) else own)
    return all(value == values[0] for value in values)


def _update_one_by_one(learners: Sequence[Learner], steps: int | None) -> None:
    """Update learners that cannot share a program; on an error all are as before."""
    with Change(learners, nested=True):
        for learner in learners:
            update_together([learner], steps)


def _run_updates(learners: Sequence[Learner], outer: Outer, numbers: range, draws: Sequence[Draw]) -> Tensor:
    """Take all updates; returns losses and gradient norms, (updates, 2, learners)."""
    lead = learners[0]
    engine, objective = lead.engine, lead.definition.objective
    noises = [_dropout_seeds(learner, numbers) for learner in learners]
    together = outer.elementwise and engine.runs_updates_together(objective)
    lrs = outer.lrs(numbers)
    watched: list[Tensor] = []
    for start in range(0, len(numbers), _GATHERED_UPDATES):
        chunk = slice(start, start + _GATHERED_UPDATES)
        pairs = [_gather(learner, draw.at(chunk)) for learner, draw in zip(learners, draws, strict=True)]
        # Updates come first, so that the inputs of one update have the same strides whatever the number of updates.
        batches = [_stack(list(trees), 1) for trees in zip(*pairs, strict=True)]
        noise = None if noises[0] is None else _stack([seeds[chunk] for seeds in noises if seeds is not None], 1)
        if together:
            tensors, values = engine.updates(
                objective, outer.make, outer.tensors, outer.lr_tensor(lrs[chunk]), *batches
            )
            outer.replace(tensors)
            watched += values
            continue
        for i, (support, query) in enumerate(_unbind(batches)):
            values, gradients = engine.gradient(
                objective, outer.flat, support, query, None if noise is None else noise[i]
            )
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
    sizes = {str(tree_map(lambda leaf: leaf.shape, pair)) for pair in zip(data, xs, strict=True)}
    if len(kinds) > 1 or len(sizes) > 1 or not all(lead.network.is_like(learner.network) for learner in learners):
        return None
    params = lead.definition.objective.layout.named(torch.stack([learner.state.flat for learner in learners]))
    chosen = lead.network.num_classes is not None
    stacked_classes = _stack([learner.memory.current_classes() for learner in learners]) if chosen else None
    batch = _stack(data)
    batch = batch if stacked_classes is None else ClassBatch(batch.x, batch.y, stacked_classes)
    adaptation = lead.definition.adaptation
    return lead.engine.predictions(lead.network, adaptation, steps, params, batch, _stack(list(xs)), stacked_classes)


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


def draw_meta_batches(learner: Learner, numbers: Sequence[int], without: Collection[str] = ()) -> Draw | None:
    """Draw the meta-batches of the updates with these numbers; None if there is nothing to draw from."""
    options, definition = learner.options, learner.definition
    sizes = (definition.support,) if isinstance(definition.support, int) else definition.support
    numbers = _shifted(learner, numbers)
    widths = options.tasks_per_step, max(sizes), options.query
    draw = learner.memory.draw(options.seed, numbers, *widths, definition.which, without)
    if draw is None or len(sizes) == 1:
        return draw
    shots = [rng("support size", options.seed, n).integers(len(sizes), size=options.tasks_per_step) for n in numbers]
    # Draws of n-way tasks have the classes one after the other, but for those from the current task.
    groups = 1 if draw.classes is None or definition.which == "current" else draw.classes.shape[-1]
    return draw.with_support(np.asarray(sizes)[np.stack(shots)], groups)


def _shifted(learner: Learner, numbers: Sequence[int]) -> list[int]:
    """The numbers of the draws of updates: draws that failed are skipped."""
    return [number + learner.skipped for number in numbers]


def _gather(learner: Learner, draw: Draw) -> tuple[Any, Any]:
    """The support and query batches of a draw, with the tasks' classes if the network chooses its outputs by them."""
    support, query = learner.memory.gather(draw)
    adaptation = learner.definition.objective.adaptation
    if adaptation is not None and adaptation.takes_weights:
        first = _first_occurrences(torch.cat([draw.support, draw.query], -1)).to(learner.state.flat.dtype)
        weights = first.split([draw.support.shape[-1], draw.query.shape[-1]], -1)
        return WeightedBatch(*support, weights[0]), WeightedBatch(*query, weights[1])
    if learner.network.num_classes is None or draw.classes is None:
        return support, query
    return ClassBatch(*support, draw.classes), ClassBatch(*query, draw.classes)


def _first_occurrences(index: Tensor) -> Tensor:
    """Whether each number is the first of its value in its row, (..., numbers)."""
    return ~(index[..., :, None] == index[..., None, :]).tril(-1).any(-1)


def _dropout_seeds(learner: Learner, numbers: Sequence[int]) -> Tensor | None:
    """Seeds of the dropout masks, (updates, inner steps + 1, tasks)."""
    if not learner.network.has_dropout:
        return None
    shape = (learner.definition.objective.inner.steps + 1, learner.options.tasks_per_step)
    seeds = [rng("dropout", learner.options.seed, number).integers(2**31, size=shape) for number in numbers]
    return torch.from_numpy(np.stack(seeds)).to(learner.device)


def _stack(trees: list[Any], dim: int = 0) -> Any:
    if len(trees) == 1:
        return tree_map(lambda leaf: leaf.unsqueeze(dim), trees[0])
    return tree_map(lambda *leaves: torch.stack(leaves, dim), *trees)


def _unbind(trees: list[Any]) -> list[Any]:
    """Split trees of tensors (updates, learners, ...) into one tree per update."""
    leaves, spec = tree_flatten(trees)
    return [tree_unflatten(list(update), spec) for update in zip(*(leaf.unbind(0) for leaf in leaves), strict=True)]
