"""The outer steps of learners side by side.

The parameters of a learner are one row of a flat (learners, parameters) tensor.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from metaleader.learners.optimizer import Rule, State
from metaleader.nets.functional import Layout


class Outer:
    """The optimisers of learners that are updated side by side, for the duration of one call.

    The library's optimisers work element by element, so they see one tensor for all learners. A user's optimiser sees
    the parameters of each learner, as views of its row.

    Attributes:
        flat: the parameters, (learners, number of parameters), changed in place.
        elementwise: whether one optimiser steps all learners.
        form: the form of the gradient, chosen before the first update.
    """

    def __init__(self, rule: Rule, layout: Layout, states: Sequence[State]) -> None:
        self._rule, self._states = rule, states
        self.form = states[0].form
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
        return [State(row, slots, step, state.schedule_start, self.form) for row, slots, state in triples]


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
