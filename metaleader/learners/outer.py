"""The outer steps of learners side by side.

The parameters of a learner are one row of a flat (learners, parameters) tensor.
"""

from __future__ import annotations

import copy
import functools
import inspect
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
        self.form, self.elementwise = states[0].form, isinstance(rule.optimizer, str)
        self.flat = torch.stack([state.flat for state in states])
        if self.elementwise:
            self._optimizer = self.make({"flat": self.flat, **_stacked_slots(states)})
        else:
            self._optimizer = UserOptimizers(rule, layout, self.flat, states)

    @property
    def make(self) -> Callable[[dict[str, Tensor]], BatchedOptimizer]:
        """Builds the same optimiser from its tensors; one object per optimiser and clip."""
        assert isinstance(self._rule.optimizer, str)
        return _maker(self._rule.optimizer, self._rule.clip)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a step changes; for the library's optimisers."""
        assert isinstance(self._optimizer, BatchedOptimizer)
        return self._optimizer.tensors

    def replace(self, tensors: dict[str, Tensor]) -> None:
        """Continue from tensors that were updated elsewhere."""
        self._optimizer = self.make(tensors)
        self.flat = self._optimizer.flat

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
        self._optimizer.step(gradients, norms, lr)

    def states(self, step: int) -> list[State]:
        """The states after the updates, with the given number of updates made."""
        triples = zip(self.flat.detach().unbind(), self._optimizer.slots(), self._states, strict=True)
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

    def slots(self) -> list[dict[str, Tensor]]:
        """The optimiser's state of each learner, by name."""
        slots = self._optimizer.state[self.flat]
        return [{n: v[r] if v.ndim else v.clone() for n, v in slots.items()} for r in range(len(self.flat))]

    def step(self, gradients: Tensor, norms: Tensor, lr: float | Tensor) -> None:
        """Take one step down gradients of known norms, (learners,)."""
        group = self._optimizer.param_groups[0]
        group["lr"] = lr
        if "capturable" in group:  # torch requires it during capture and rejects it otherwise
            group["capturable"] = self.flat.is_cuda and torch.cuda.is_current_stream_capturing()
        self.flat.grad = _clipped(gradients, norms, self._clip)
        self._optimizer.step()
        self.flat.grad = None


class UserOptimizers:
    """A user's optimisers, one per learner.

    Args:
        rule: builds them.
        layout: of the parameters.
        flat: the parameters, (learners, number of parameters), changed in place.
        states: the states of the learners, with those of their optimisers.
    """

    def __init__(self, rule: Rule, layout: Layout, flat: Tensor, states: Sequence[State]) -> None:
        self._layout, self._flat, self._clip = layout, flat, rule.clip
        self._rows = [list(layout.named(row).values()) for row in flat.unbind()]
        restored = [_restored(rule, *pair) for pair in zip(self._rows, states, strict=True)]
        self._optimizers = [optimizer for optimizer, _ in restored]
        self._factors = [factors for _, factors in restored]

    def slots(self) -> list[dict[str, Any]]:
        """The state of each optimiser, and its groups."""
        return [_user_slots(optimizer) for optimizer in self._optimizers]

    def step(self, gradients: Tensor, norms: Tensor, lr: float) -> None:
        """Take one step down gradients of known norms, (learners,)."""
        gradients = _clipped(gradients, norms, self._clip)
        groups = zip(self._optimizers, self._factors, self._rows, self._flat, gradients, strict=True)
        for optimizer, factors, tensors, row, gradient in groups:
            for tensor, value in zip(tensors, self._layout.named(gradient).values(), strict=True):
                tensor.grad = value
            for group, factor in zip(optimizer.param_groups, factors, strict=True):
                group["lr"] = factor * lr
            optimizer.step()
            for tensor, view in zip(tensors, self._layout.named(row).values(), strict=True):
                tensor.grad = None
                if tensor.data_ptr() != view.data_ptr():  # the optimiser replaced the data of the parameter
                    tensor.data = view.copy_(tensor)


def _restored(rule: Rule, tensors: list[Tensor], state: State) -> tuple[torch.optim.Optimizer, list[float]]:
    """A user's optimiser of these tensors, with the optimiser state of a learner.

    Beside it, the step sizes that the user gave to the groups of parameters, as factors of `meta_lr`.
    """
    assert callable(rule.optimizer)
    first = rule.schedule[0][1]
    optimizer = rule.optimizer(tensors, lr=first)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must build a torch.optim.Optimizer, got {type(optimizer).__name__}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step; use another optimizer"
        )
    factors = [float(group["lr"]) / first if first else 1.0 for group in optimizer.param_groups]
    if state.slots:
        tree = optimizer.state_dict()
        tree["state"] = {int(i): copy.deepcopy(values) for i, values in state.slots["state"].items()}
        for group, saved in zip(tree["param_groups"], state.slots["groups"], strict=True):
            group.update(saved)
        optimizer.load_state_dict(tree)
    return optimizer, factors


def _user_slots(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tree = optimizer.state_dict()
    plain = (bool, int, float, str, tuple, list, type(None))
    groups = [
        {name: value for name, value in group.items() if name != "params" and isinstance(value, plain)}
        for group in tree["param_groups"]
    ]
    return {"state": {str(i): values for i, values in tree["state"].items()}, "groups": groups}


def _stacked_slots(states: Sequence[State]) -> dict[str, Tensor]:
    """The state of one of the library's optimisers for all learners."""
    # A slot without dimensions counts steps and is the same for all learners.
    slots = states[0].slots
    return {n: torch.stack([s.slots[n] for s in states]) if v.ndim else v.clone() for n, v in slots.items()}


@functools.cache
def _maker(name: str, clip: float | None) -> Callable[[dict[str, Tensor]], BatchedOptimizer]:
    return functools.partial(BatchedOptimizer, name, clip)


def _clipped(gradients: Tensor, norms: Tensor, clip: float | None) -> Tensor:
    """Scale down gradients whose norm exceeds `clip`."""
    return gradients if clip is None else gradients * torch.clamp(clip / (norms[:, None] + 1e-12), max=1.0)
