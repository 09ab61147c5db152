"""The updates of Algorithm 2: draw and gather meta-batches, compute the gradient, take the outer step.

Learners side by side are updated by one program: their batches are stacked, and `Outer` holds their parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from metaleader.distributed.shards import Shard
from metaleader.engine.form import choose_form
from metaleader.learners.outer import Outer
from metaleader.memory.rows import Draw
from metaleader.system.settings import keeps_settings
from metaleader.tasks import ClassBatch, WeightedBatch, rng

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner

# The number of updates whose datapoints are gathered at once
GATHERED_UPDATES = 10


class Gathered(NamedTuple):
    """The datapoints of a draw, in place of their row numbers.

    Attributes:
        support: the support batches, (steps, tasks, support, ...), as `gather` returns them.
        query: the query batches, likewise.
    """

    support: Any
    query: Any

    def at(self, step: int | slice) -> Gathered:
        """Those of one step, or of a slice of steps."""
        return tree_map(lambda leaf: leaf[step], self)


def draw_meta_batches(
    learner: Learner, numbers: Sequence[int], without: Collection[str] = (), shard: Shard | None = None
) -> Draw | None:
    """Draw the meta-batches of the updates with these numbers, or a shard's part of them.

    None if there is nothing to draw from.
    """
    options, definition = learner.options, learner.definition
    sizes = (definition.support,) if isinstance(definition.support, int) else definition.support
    numbers, tasks = draw_numbers(learner, numbers), num_tasks(learner, shard)
    in_shard = {} if shard is None else {"shard": shard}
    draw = learner.memory.draw(
        options.seed, numbers, tasks, max(sizes), options.query, definition.which, without, **in_shard
    )
    return draw if draw is None or len(sizes) == 1 else _with_sizes(learner, draw, numbers, sizes, shard)


def _with_sizes(
    learner: Learner, draw: Draw, numbers: Sequence[int], sizes: Sequence[int], shard: Shard | None
) -> Draw:
    """A draw in which every task has one of several support sizes, drawn at random."""
    tasks = num_tasks(learner, shard)
    key = () if shard is None else (shard.number,)
    shots = [rng("support size", learner.options.seed, n, *key).integers(len(sizes), size=tasks) for n in numbers]
    # Draws of n-way tasks have the classes one after the other, but for those from the current task.
    groups = 1 if draw.classes is None or learner.definition.which == "current" else draw.classes.shape[-1]
    return draw.with_support(np.asarray(sizes)[np.stack(shots)], groups)


def num_tasks(learner: Learner, shard: Shard | None) -> int:
    """The number of tasks of an update, or of a shard's part of it."""
    tasks = learner.options.tasks_per_step
    return tasks if shard is None else learner.sharding.shares(tasks)[shard.number]


def draw_numbers(learner: Learner, numbers: Sequence[int]) -> list[int]:
    """The numbers of the draws of updates: draws that failed are skipped."""
    return [number + learner.skipped for number in numbers]


def gather(learner: Learner, draw: Draw | Gathered) -> tuple[Any, Any]:
    """The support and query batches of a draw, with the tasks' classes if the network chooses its outputs by them."""
    if isinstance(draw, Gathered):
        return draw.support, draw.query
    adaptation = learner.definition.objective.adaptation
    if adaptation is not None and adaptation.takes_weights:
        return _gather_weighted(learner, draw)
    support, query = learner.memory.gather(draw)
    if learner.network.num_classes is None or draw.classes is None:
        return support, query
    return ClassBatch(*support, draw.classes), ClassBatch(*query, draw.classes)


def _gather_weighted(learner: Learner, draw: Draw) -> tuple[WeightedBatch, WeightedBatch]:
    """The batches of a draw for an adaptation that takes weights: repeated datapoints have weight 0."""
    if draw.classes is not None and learner.definition.which != "current":
        draw = _alternating(draw, draw.classes.shape[-1])
    support, query = learner.memory.gather(draw)
    first = _first_occurrences(torch.cat([draw.support, draw.query], -1)).to(learner.state.flat)
    weights = first.split([draw.support.shape[-1], draw.query.shape[-1]], -1)
    return WeightedBatch(*support, weights[0]), WeightedBatch(*query, weights[1])


def _alternating(draw: Draw, num_ways: int) -> Draw:
    """An n-way draw whose support sets take their classes in turn, so that their first datapoints are of all classes.

    Adaptations such as `BayesianHead` measure the first datapoints alone too.
    """
    index = torch.arange(draw.support.shape[-1], device=draw.support.device).view(num_ways, -1).mT.flatten()
    support_y = None if draw.support_y is None else draw.support_y[..., index]
    return draw._replace(support=draw.support[..., index], support_y=support_y)


def _first_occurrences(index: Tensor) -> Tensor:
    """Whether each number is the first of its value in its row, (..., numbers)."""
    return ~(index[..., :, None] == index[..., None, :]).tril(-1).any(-1)


def _dropout_seeds(learner: Learner, numbers: Sequence[int], shard: Shard | None = None) -> Tensor:
    """Seeds of the dropout masks, (updates, inner steps + 1, tasks)."""
    shape = (learner.definition.objective.inner.steps + 1, num_tasks(learner, shard))
    key = () if shard is None else (shard.number,)
    seeds = [rng("dropout", learner.options.seed, n, *key).integers(2**31, size=shape) for n in numbers]
    return torch.from_numpy(np.stack(seeds)).to(learner.device)


def stacked_batches(
    learners: Sequence[Learner],
    numbers: range,
    draws: Sequence[Draw | Gathered],
    chunk: slice,
    shard: Shard | None = None,
) -> tuple[Any, Any, Tensor | None]:
    """Support and query of some updates, (updates, learners, tasks, ...), and the seeds of their dropout masks."""
    pairs = [gather(learner, draw.at(chunk)) for learner, draw in zip(learners, draws, strict=True)]
    # Updates come first, so that the inputs of one update have the same strides whatever the number of updates.
    support, query = (stack(list(trees), 1) for trees in zip(*pairs, strict=True))
    if not learners[0].network.has_dropout:
        return support, query, None
    return support, query, stack([_dropout_seeds(learner, numbers[chunk], shard) for learner in learners], 1)


def stack(trees: list[Any], dim: int = 0) -> Any:
    """Stack trees of tensors."""
    if len(trees) == 1:
        return tree_map(lambda leaf: leaf.unsqueeze(dim), trees[0])
    return tree_map(lambda *leaves: torch.stack(leaves, dim), *trees)


def unbind(trees: list[Any]) -> list[Any]:
    """Split trees of tensors (updates, learners, ...) into one tree per update."""
    leaves, spec = tree_flatten(trees)
    return [tree_unflatten(list(update), spec) for update in zip(*(leaf.unbind(0) for leaf in leaves), strict=True)]


def gather_updates(learner: Learner, steps: int) -> Gathered | None:
    """The meta-batches of the next updates, copied from the data of this moment; None if there is nothing to draw."""
    first = learner.step
    numbers = range(first, first + steps * learner.definition.updates_per_step)
    draw = draw_meta_batches(learner, numbers) if numbers else None
    return None if draw is None else Gathered(*gather(learner, draw))


@keeps_settings
def run_updates(learners: Sequence[Learner], outer: Outer, numbers: range, draws: Sequence[Draw | Gathered]) -> Tensor:
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
