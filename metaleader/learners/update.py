"""Updates (draw, gather, gradient, outer step of Algorithm 2) and predictions of learners side by side.

The parameters of a learner are one row of a flat (learners, parameters) tensor. An update is a pure function of the
learners' states: `Outer` copies their rows into one tensor, steps in place, and returns new states.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from metaleader.engine.hook import OwnGradient
from metaleader.engine.objective import GradientSteps
from metaleader.learners.optimizer import Rule, State
from metaleader.memory.rows import Draw
from metaleader.nets.functional import Layout
from metaleader.tasks import ClassBatch, Tree, rng

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner

# The number of updates whose datapoints are gathered at once
_GATHERED_UPDATES = 10


@torch.no_grad()
def update_together(learners: Sequence[Learner], steps: int | None = None) -> None:
    """Run the updates of learners of one shape side by side, on the engine of the first.

    Each learner has its own parameters, data, draws and optimiser state; its result does not depend on the others.

    Raises:
        ValueError: if a loss or gradient is not finite; all learners are then as before the call.
    """
    if len(learners) > 1 and not _shareable(learners):
        _update_one_by_one(learners, steps)
        return
    lead, before = learners[0], [learner.state for learner in learners]
    num_updates = lead.definition.updates_per_step * (lead.options.meta_steps if steps is None else steps)
    numbers = range(before[0].step, before[0].step + num_updates)
    if len(learners) > 1:
        _check_alike(learners)
    draws = [_draw(learner, numbers) if numbers else None for learner in learners]
    if any(draw is None for draw in draws):
        return
    outer = Outer(lead.rule, lead.definition.objective.layout, before)
    watched = _run_updates(learners, outer, numbers, [draw for draw in draws if draw is not None])
    # The one point where the host waits for the device.
    finite = torch.isfinite(watched).all(1).cpu()
    if not bool(finite.all()):
        first, r = (int(value) for value in (~finite).nonzero()[0])
        learner = learners[r]
        adaptation = learner.definition.adaptation
        inner = f" or inner_lr ({adaptation.lr or 'learned'})" if isinstance(adaptation, GradientSteps) else ""
        raise ValueError(
            f"the loss or its gradient is not finite at update {first + 1} of {len(numbers)}, round {learner.round}"
            f" (task {learner.task!r}, {learner.num_datapoints} datapoints): lower meta_lr"
            f" ({outer.lrs(numbers)[first]}){inner}, set clip, or check the scale of the data; the learner is as before"
            " the call"
        )
    try:
        for learner, state in zip(learners, outer.states(numbers.stop), strict=True):
            learner.state = state
    except BaseException:
        for learner, state in zip(learners, before, strict=True):
            learner.state = state
        raise


def _shareable(learners: Sequence[Learner]) -> bool:
    """Whether one call of a user's `task_gradient` serves all learners: it reads the same plain values of each."""
    states = []
    for learner in learners:
        own = learner.definition.objective.own_gradient
        if not isinstance(own, OwnGradient):
            return True
        draw = _draw(learner, [learner.state.step])
        if draw is not None:
            batches = tree_map(lambda leaf: leaf[0, 0], _gather(learner, draw))
            own.trial(learner.layout.named(learner.state.flat), *batches)
        states.append(own.state())
    return states[0] is not None and all(state == states[0] for state in states)


def _update_one_by_one(learners: Sequence[Learner], steps: int | None) -> None:
    """Update learners that cannot share a program; on an error all are as before."""
    before = [learner.state for learner in learners]
    try:
        for learner in learners:
            update_together([learner], steps)
    except BaseException:
        for learner, state in zip(learners, before, strict=True):
            learner.state = state
        raise


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
    if len(kinds) > 1 or len(sizes) > 1:
        return None
    params = lead.definition.objective.layout.named(torch.stack([learner.state.flat for learner in learners]))
    chosen = lead.network.num_classes is not None
    stacked_classes = _stack([learner.memory.current_classes() for learner in learners]) if chosen else None
    batch = _stack(data)
    batch = batch if stacked_classes is None else ClassBatch(batch.x, batch.y, stacked_classes)
    adaptation = lead.definition.adaptation
    return lead.engine.predictions(lead.network, adaptation, steps, params, batch, _stack(list(xs)), stacked_classes)


class Outer:
    """The optimisers of learners that are updated side by side, for the duration of one call.

    The library's optimisers work element by element, so they see one tensor for all learners. A user's optimiser sees
    the parameters of each learner, as views of its row.

    Attributes:
        flat: the parameters, (learners, number of parameters), changed in place.
        elementwise: whether one optimiser steps all learners.
    """

    def __init__(self, rule: Rule, layout: Layout, states: Sequence[State]) -> None:
        self._rule, self._states = rule, states
        self.elementwise = isinstance(rule.optimizer, str)
        self.flat = torch.stack([state.flat for state in states])
        if isinstance(rule.optimizer, str):
            # A slot without dimensions counts steps and is the same for all learners.
            slots = {
                name: torch.stack([state.slots[name] for state in states]) if value.ndim else value.clone()
                for name, value in states[0].slots.items()
            }
            self._batched = BatchedOptimizer(rule.optimizer, rule.clip, {"flat": self.flat, **slots})
        else:
            self._rows = [list(layout.named(row).values()) for row in self.flat.unbind()]
            self._layout = layout
            self._optimizers = [_restored(rule, *pair) for pair in zip(self._rows, states, strict=True)]

    @property
    def make(self) -> Callable[[dict[str, Tensor]], BatchedOptimizer]:
        """Builds the same optimiser from its tensors; one object per optimiser and clip."""
        assert isinstance(self._rule.optimizer, str)
        return _maker(self._rule.optimizer, self._rule.clip)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a step changes; for the library's optimisers."""
        return self._batched.tensors

    def replace(self, tensors: dict[str, Tensor]) -> None:
        """Continue from tensors that were updated elsewhere."""
        self._batched = self.make(tensors)
        self.flat = self._batched.flat

    def lrs(self, numbers: Sequence[int]) -> list[float]:
        """The step sizes of these updates."""
        start, schedule = self._states[0].schedule_start, self._rule.schedule
        return [next(lr for first, lr in reversed(schedule) if first <= number - start) for number in numbers]

    def lr_tensor(self, lrs: Sequence[float]) -> Tensor:
        """Step sizes as torch's optimisers read them inside a program: in float32 on a GPU, else in float64."""
        tensor = torch.tensor(lrs, dtype=torch.float64)
        return tensor.to(self.flat.device, torch.float32) if self.flat.is_cuda else tensor

    def step(self, gradients: Tensor, norms: Tensor, lr: float) -> None:
        """Take one step down gradients, (learners, number of parameters), of known norms, (learners,)."""
        if self.elementwise:
            self._batched.step(gradients, norms, lr)
            return
        gradients = _clipped(gradients, norms, self._rule.clip)
        groups = zip(self._optimizers, self._rows, self.flat, gradients, strict=True)
        for optimizer, tensors, row, gradient in groups:
            for tensor, value in zip(tensors, self._layout.named(gradient).values(), strict=True):
                tensor.grad = value
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            for tensor, view in zip(tensors, self._layout.named(row).values(), strict=True):
                tensor.grad = None
                if tensor.data_ptr() != view.data_ptr():  # the optimiser replaced the data of the parameter
                    tensor.data = view.copy_(tensor)

    def states(self, step: int) -> list[State]:
        """The states after the updates, with the given number of updates made."""
        rows = self.flat.detach().unbind()
        if self.elementwise:
            slots = self.tensors
            del slots["flat"]
            by_row = [{name: v[r] if v.ndim else v.clone() for name, v in slots.items()} for r in range(len(rows))]
        else:
            by_row = [_user_slots(optimizer) for optimizer in self._optimizers]
        triples = zip(rows, by_row, self._states, strict=True)
        return [State(row, slots, step, state.schedule_start) for row, slots, state in triples]


class BatchedOptimizer:
    """One of the library's optimisers on one flat tensor, changed in place.

    Args:
        name: "adam" or "sgd", with momentum 0.9.
        clip: the largest norm of a learner's gradient, or None.
        tensors: "flat", the parameters, and the optimiser's state of them by name; before the first step "flat" alone.

    Attributes:
        flat: the parameters.
    """

    def __init__(self, name: str, clip: float | None, tensors: dict[str, Tensor]) -> None:
        slots = dict(tensors)
        self.flat = slots.pop("flat")
        if name == "adam":
            self._optimizer = torch.optim.Adam([self.flat], lr=0.0, fused=True)
        else:
            self._optimizer = torch.optim.SGD([self.flat], lr=0.0, momentum=0.9, fused=True)
        self._clip = clip
        if slots:
            self._optimizer.state[self.flat] = slots
            return
        # Initialise the optimiser state by taking one step with zero gradients, then zero it.
        self.flat.grad = torch.zeros_like(self.flat)
        self._optimizer.step()
        self.flat.grad = None
        for value in self._optimizer.state[self.flat].values():
            value.zero_()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a step changes."""
        return {"flat": self.flat, **self._optimizer.state[self.flat]}

    def step(self, gradients: Tensor, norms: Tensor, lr: float | Tensor) -> None:
        """Take one step down gradients of known norms, (learners,)."""
        group = self._optimizer.param_groups[0]
        group["lr"] = lr
        if "capturable" in group:  # torch requires it during capture and rejects it otherwise
            group["capturable"] = self.flat.is_cuda and torch.cuda.is_current_stream_capturing()
        self.flat.grad = _clipped(gradients, norms, self._clip)
        self._optimizer.step()
        self.flat.grad = None


def _restored(rule: Rule, tensors: list[Tensor], state: State) -> torch.optim.Optimizer:
    """A user's optimiser of these tensors, with the optimiser state of a learner."""
    assert callable(rule.optimizer)
    optimizer = rule.optimizer(tensors, lr=rule.schedule[0][1])
    if state.slots:
        tree = optimizer.state_dict()
        tree["state"] = {int(i): copy.deepcopy(values) for i, values in state.slots["state"].items()}
        for group, saved in zip(tree["param_groups"], state.slots["groups"], strict=True):
            group.update(saved)
        optimizer.load_state_dict(tree)
    return optimizer


def _user_slots(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tree = optimizer.state_dict()
    plain = (bool, int, float, str, tuple, list, type(None))
    groups = [
        {name: value for name, value in group.items() if name != "params" and isinstance(value, plain)}
        for group in tree["param_groups"]
    ]
    return {"state": {str(i): values for i, values in tree["state"].items()}, "groups": groups}


@functools.cache
def _maker(name: str, clip: float | None) -> Callable[[dict[str, Tensor]], BatchedOptimizer]:
    return functools.partial(BatchedOptimizer, name, clip)


def _clipped(gradients: Tensor, norms: Tensor, clip: float | None) -> Tensor:
    """Scale down gradients whose norm exceeds `clip`."""
    return gradients if clip is None else gradients * torch.clamp(clip / (norms[:, None] + 1e-12), max=1.0)


def _check_alike(learners: Sequence[Learner]) -> None:
    lead = learners[0]
    if any(learner.state.step != lead.state.step or type(learner) is not type(lead) for learner in learners):
        raise ValueError("learners side by side must be of one kind and have made the same number of updates")
    if len({learner.definition.objective.key() for learner in learners}) > 1:
        raise ValueError("learners side by side must have the same inner loop (inner_lr, inner_steps, only, ...)")
    if any(o.rule != lead.rule or o.state.schedule_start != lead.state.schedule_start for o in learners):
        raise ValueError("learners side by side must have the same optimizer, meta_lr and clip")


def _draw(learner: Learner, numbers: Sequence[int]) -> Draw | None:
    """Draw the meta-batches of the updates with these numbers; None if there is nothing to draw from."""
    options, definition = learner.options, learner.definition
    sizes = options.tasks_per_step, definition.support, options.query
    return learner.memory.draw(options.seed, numbers, *sizes, definition.which)


def _gather(learner: Learner, draw: Draw) -> tuple[Any, Any]:
    """The support and query batches of a draw, with the tasks' classes if the network chooses its outputs by them."""
    support, query = learner.memory.gather(draw)
    if learner.network.num_classes is None or draw.classes is None:
        return support, query
    return ClassBatch(*support, draw.classes), ClassBatch(*query, draw.classes)


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
