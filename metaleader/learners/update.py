"""Learners side by side: updates (draw, gather, gradient, outer step of Algorithm 2), and predictions once adapted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from metaleader.learners.joint import Apart, Joint, outer_steps
from metaleader.learners.options import check_integer
from metaleader.memory.by_task import Draw
from metaleader.tasks import ClassBatch, Tree, shapes

# Updates whose datapoints are gathered at once.
_GATHERED = 10

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner


@torch.no_grad()
def update_together(learners: Sequence[Learner], steps: int | None = None) -> None:
    """Run the updates of learners of one shape side by side, on the first one's engine.

    Each learner has its own parameters, data, draws and optimiser; what it learns does not depend on the others.

    Raises:
        ValueError: when a loss or gradient is not finite; all learners are then as before the call.
    """
    lead = learners[0]
    num = lead._num_updates(lead.meta_steps if steps is None else steps)
    numbers = range(lead.step, lead.step + num)
    if any(learner.step != lead.step or type(learner) is not type(lead) for learner in learners):
        raise ValueError("learners side by side must be of one kind and have made the same number of updates")
    if len({learner._objective.key() for learner in learners}) > 1:
        raise ValueError("learners side by side must have the same inner loop (inner_lr, inner_steps, only, ...)")
    draws = [learner._draw(numbers) if numbers else None for learner in learners]
    if any(draw is None for draw in draws):
        return
    outer = outer_steps([learner._outer for learner in learners])
    try:
        _run_updates(learners, outer, numbers, [draw for draw in draws if draw is not None])
    except BaseException:
        outer.undo()
        raise
    outer.end(numbers.stop)


def _run_updates(learners: Sequence[Learner], outer: Joint | Apart, numbers: range, draws: Sequence[Draw]) -> None:
    lead = learners[0]
    noises = [learner._noise(numbers, lead.tasks_per_step) for learner in learners]
    several = outer if isinstance(outer, Joint) and lead._engine.takes_several(lead._objective) else None
    rates = several and several.rates(numbers)
    watched: list[Tensor] = []
    for start in range(0, len(numbers), _GATHERED):
        part = slice(start, start + _GATHERED)
        pairs = [learner._gather(draw.at(part)) for learner, draw in zip(learners, draws, strict=True)]
        # Updates first: what one of them gets then looks the same however many there are, and is compiled once.
        batches = [_stack(list(trees), 1) for trees in zip(*pairs, strict=True)]
        noise = None if noises[0] is None else _stack([noise[part] for noise in noises if noise is not None], 1)
        if several is not None and rates is not None:
            tensors, found = lead._engine.updates(lead._objective, several.make, several.tensors, rates[part], *batches)
            several.go_on_from(tensors)
            watched += found
            continue
        for i, (support, query) in enumerate(_apart(batches)):
            own = None if noise is None else noise[i]
            found, gradients = lead._engine.flat_gradient(lead._objective, outer.flat, support, query, own)
            outer.descend(gradients, found[1], numbers[start + i])
            watched.append(found)
    # The one point where the host waits for the device.
    finite = torch.isfinite(torch.stack(watched)).all(1).cpu()
    if not bool(finite.all()):
        first, r = (int(value) for value in (~finite).nonzero()[0])
        raise ValueError(
            f"the loss or its gradient is not finite at update {first + 1} of {len(numbers)}, {learners[r]._where()}:"
            f" lower {learners[r]._what_to_lower()}, set clip, or check the scale of the data; the learner is as before"
            " the call"
        )


@torch.no_grad()
def predict_together(learners: Sequence[Learner], xs: Sequence[Tree], steps: Sequence[int]) -> dict[str, Tensor] | None:
    """What learners of one shape predict once adapted to D_t, (learners, rows, ...), by numbers of steps and "task".

    None where they must be asked one by one: with dropout, whose masks are each learner's own, without data, and where
    learners, data or rows are not alike.
    """
    lead, how = learners[0], [learner._adaptation() for learner in learners]
    for number in steps:
        check_integer("steps", number, 0)
    data = [learner._buffer.current() if learner.task is not None else None for learner in learners]
    if lead._network.has_dropout or any(batch is None for batch in data):
        return None
    kinds = {(type(one), own and own.key()) for one, own in zip(learners, how, strict=True)}
    sizes = {str(shapes(pair)) for pair in zip(data, xs, strict=True)}
    if len(kinds) > 1 or len(sizes) > 1:
        return None
    params = lead._objective.form.named(torch.stack([learner._outer.flattened() for learner in learners]))
    classes = [learner._classes() for learner in learners]
    chosen = None if classes[0] is None else _stack(classes)
    seen = _stack(data)
    seen = seen if chosen is None else ClassBatch(seen.x, seen.y, chosen)
    return lead._engine.predictions(lead._network, how[0], steps, params, seen, _stack(list(xs)), chosen)


def _stack(trees: list[Any], dim: int = 0) -> Any:
    if len(trees) == 1:
        return tree_map(lambda leaf: leaf.unsqueeze(dim), trees[0])
    return tree_map(lambda *leaves: torch.stack(leaves, dim), *trees)


def _apart(trees: list[Any]) -> list[Any]:
    """Trees whose tensors are (updates, learners, ...), apart by update."""
    leaves, form = tree_flatten(trees)
    return [tree_unflatten(list(of_one), form) for of_one in zip(*(leaf.unbind(0) for leaf in leaves), strict=True)]
