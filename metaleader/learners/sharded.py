"""Updates of learners whose tasks are divided into shards.

Every shard draws its part of the tasks of an update from (seed, step, shard). Its mean gradient, times the weight of
the shard, is one term of a sum in a fixed order. The terms have the same shapes whichever process computes them, so the
result does not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metaleader.distributed.agreement import agree, digest_of
from metaleader.distributed.reduction import sum_over_shards
from metaleader.distributed.shards import Shard, Sharding, shard_weights
from metaleader.engine.form import choose_form, form_of
from metaleader.engine.hook import StateReadError
from metaleader.engine.objective import Form
from metaleader.learners.outer import Outer
from metaleader.learners.update import GATHERED_UPDATES, draw_meta_batches, stacked_batches, unbind
from metaleader.memory.rows import Draw
from metaleader.system import machine
from metaleader.system.machine import memory_bytes
from metaleader.tasks import Batch

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner


def agree_on_learner(learner: Learner) -> None:
    """Raise ValueError on all processes if their learners differ."""
    facts = {
        "class": type(learner).__name__,
        "settings": learner.options.plain(),
        "device": learner.device.type,
        "engine": learner.engine.mode,
        "threads": torch.get_num_threads(),
        "versions": machine.versions(),
        "initial parameters": digest_of(learner.state.flat),
    }
    agree(learner.sharding.group, facts, "a new learner")


def agree_on_batch(learner: Learner, check: Callable[[], Batch], task: str | None, update: bool) -> Batch:
    """The datapoints as checked, if they are the same on all processes; raises ValueError on all of them otherwise."""
    group, where = learner.sharding.group, "observe"
    facts = {"task": learner.task if task is None else task, "round": learner.round, "update": update}
    try:
        batch = check()
    except ValueError as error:
        agree(group, {"error": str(error)}, where)
        raise
    agree(group, facts | {"data": digest_of(batch) if group.size > 1 else ""}, where)
    return batch


class ShardedDraw(NamedTuple):
    """Meta-batches of one learner.

    Attributes:
        by_shard: the draws of the shards of this process that have tasks.
        weights: of all shards, (shards,); they add up to one, and are zero for shards without tasks.
    """

    by_shard: dict[Shard, Draw]
    weights: np.ndarray

    def at(self, updates: slice) -> ShardedDraw:
        """The draws of some updates."""
        return self._replace(by_shard={shard: draw.at(updates) for shard, draw in self.by_shard.items()})


def draw_shards(learner: Learner, numbers: Sequence[int], without: Collection[str]) -> ShardedDraw | None:
    """The draws of the shards of this process; None, on all processes, if there is nothing to draw from."""
    shards, which = learner.sharding, learner.definition.which
    masses = learner.memory.shard_masses(shards.count, which, without)
    if masses is not None:
        if not masses.any():
            return None
        weights = shard_weights(masses)
    else:
        weights = shard_weights(shards.shares(learner.options.tasks_per_step))
    active = [shard for shard in shards.own if weights[shard.number] > 0]
    draws = {shard: draw_meta_batches(learner, numbers, without, shard) for shard in active}
    by_shard = {shard: drawn for shard, drawn in draws.items() if drawn is not None}
    # Without masses every shard draws from the same data.
    return None if masses is None and not by_shard else ShardedDraw(by_shard, weights)


class ShardError(NamedTuple):
    """An error in the gradient of a shard, which all processes must raise.

    Attributes:
        is_state_read: whether it is a `StateReadError`.
        text: the message.
    """

    is_state_read: bool
    text: str

    def error(self) -> Exception:
        """The error to raise."""
        return StateReadError(self.text) if self.is_state_read else ValueError(self.text)


class ShardedGradient:
    """The gradient of learners side by side, summed over the shards of all processes.

    An error in a shard gives NaN, so that all processes take part in all sums; `error` then gives it to all of them.

    Args:
        shards: of the learners.
        weights: (learners, shards).
        outer: the optimisers.
    """

    def __init__(self, shards: Sharding, weights: Sequence[np.ndarray], outer: Outer) -> None:
        self._shards, self._outer = shards, outer
        self._weights = torch.from_numpy(np.stack(weights)).to(outer.flat)
        self._error: ShardError | None = None

    def __call__(self, gradient: Callable[[Shard], tuple[Tensor, Tensor] | None], what: str) -> tuple[Tensor, Tensor]:
        """Losses and gradient norms, (2, learners), and gradients, (learners, number of parameters).

        Args:
            gradient: the losses and gradients of a shard, or None if it has no tasks.
            what: for error messages.
        """
        terms = [self._term(gradient, shard) for shard in self._shards.own]
        total = sum_over_shards(self._shards.group, terms, what)
        gradients, losses = total[:, :-1].contiguous(), total[:, -1]
        return torch.stack([losses, torch.linalg.vector_norm(gradients, dim=1)]), gradients

    def _term(self, gradient: Callable[[Shard], tuple[Tensor, Tensor] | None], shard: Shard) -> Tensor:
        """The gradients and losses of one shard, times its weights, (learners, number of parameters + 1)."""
        flat = self._outer.flat
        try:
            found = gradient(shard) if self._error is None else None
        except (StateReadError, ValueError) as error:
            self._error, found = ShardError(isinstance(error, StateReadError), str(error)), None
        if found is None:
            return flat.new_full((len(flat), flat.shape[1] + 1), 0.0 if self._error is None else torch.nan)
        values, gradients = found
        # The product comes before the sums, so that no sum is fused with it.
        return torch.cat([gradients, values[0][:, None]], 1) * self._weights[:, shard.number, None]

    def error(self) -> ShardError | None:
        """The first error of any process, in the order of ranks; called by all after a sum that is not finite."""
        found = self._shards.group.exchange(self._error, "an error")
        return next((ShardError(*error) for error in found if error is not None), None)


def merge_norms(shards: Sharding, norms: dict[Any, float] | None) -> dict[Any, float] | None:
    """The largest norm of each task over the shards of all processes; None if one has none."""
    pairs = None if norms is None else list(norms.items())
    merged: dict[Any, float] = {}
    for some in shards.group.exchange(pairs, "the norms of gradients"):
        if some is None:
            return None
        for name, norm in some:
            merged[name] = max(merged.get(name, 0.0), norm)
    return merged


def run_sharded_updates(
    learners: Sequence[Learner], outer: Outer, numbers: range, draws: Sequence[ShardedDraw], total: ShardedGradient
) -> Tensor:
    """Take all updates, each over the shards of all processes; returns losses and gradient norms."""
    lead = learners[0]
    engine, lrs = lead.engine, outer.lrs(numbers)
    watched: list[Tensor] = []
    for start in range(0, len(numbers), GATHERED_UPDATES):
        chunk = slice(start, start + GATHERED_UPDATES)
        batches: dict[Shard, tuple[list[Any], Tensor | None]] = {}
        for shard in draws[0].by_shard:
            *pair, noise = stacked_batches(learners, numbers, [draw.by_shard[shard] for draw in draws], chunk, shard)
            batches[shard] = unbind(pair), noise
        if outer.form is None:
            outer.form = _agreed_form(lead, outer, batches)
        objective = lead.definition.objective.in_form(outer.form)
        for i, lr in enumerate(lrs[chunk]):

            def gradient(shard: Shard, i: int = i, batches: Any = batches) -> tuple[Tensor, Tensor] | None:
                if shard not in batches:
                    return None
                pairs, noise = batches[shard]
                support, query = pairs[i]
                return engine.gradient(objective, outer.flat, support, query, None if noise is None else noise[i])  # noqa: B023

            values, gradients = total(gradient, f"update {numbers[start + i]}, round {lead.round}")
            outer.step(gradients, values[1], lr)
            watched.append(values)
    return torch.stack(watched)


def _agreed_form(lead: Learner, outer: Outer, batches: dict[Shard, tuple[list[Any], Tensor | None]]) -> Form:
    """The form of the gradient, chosen by the process that has the first batch.

    The memory is that of the device, divided by the number of shards: what is free depends on the number of processes.
    """
    chosen: dict[str, Any] | None = None
    if batches:
        (pair, *_), noise = batches[min(batches)]
        memory = memory_bytes(lead.device) // lead.sharding.count
        try:
            objective, seeds = lead.definition.objective, None if noise is None else noise[0]
            chosen = choose_form(objective, outer.flat, pair[0], pair[1], seeds, memory)._asdict()
        except ValueError as error:
            chosen = {"error": str(error)}
    found = next(form for form in lead.sharding.group.exchange(chosen, "the form of the gradient") if form is not None)
    if "error" in found:
        raise ValueError(found["error"])
    return form_of(found)
