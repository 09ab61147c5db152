"""The state that updates change: flat parameters and optimiser state, and the rule by which they change."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metaleader.engine.form import adjoint_form, form_of
from metaleader.engine.objective import Form, Objective
from metaleader.gradient.selection import Params
from metaleader.memory.fields import integer, mapping
from metaleader.nets.functional import Layout

# One step size, or (from update, step size) pairs
Schedule = float | Sequence[tuple[int, float]]
# Of (parameters, lr=...)
OptimizerFactory = Callable[..., torch.optim.Optimizer]


# The library's optimisers
BUILTIN = ("adam", "sgd")


class State(NamedTuple):
    """Parameters and optimiser state of one learner; never changed in place.

    Attributes:
        flat: the parameters, (number of parameters,).
        slots: the optimiser's state of `flat` by name; for a user's optimiser its `state` and `groups`.
        step: the number of updates made.
        schedule_start: the update at which the step schedule begins.
        form: the form of the gradient, chosen before the first update.
    """

    flat: Tensor
    slots: dict[str, Any]
    step: int = 0
    schedule_start: int = 0
    form: Form | None = None


@dataclass(frozen=True)
class Rule:
    """An optimiser, a step schedule, and a bound on the gradient norm.

    Attributes:
        optimizer: "adam", "sgd", or a function of (parameters, lr=...) that builds an optimiser.
        schedule: (from update, step size) pairs.
        clip: the largest norm of a gradient, or None.
    """

    optimizer: str | OptimizerFactory
    schedule: tuple[tuple[int, float], ...]
    clip: float | None

    @classmethod
    def of(cls, optimizer: str | OptimizerFactory, meta_lr: Schedule, clip: float | None) -> Rule:
        """Build a rule from a learner's options."""
        if not callable(optimizer) and optimizer not in BUILTIN:
            raise ValueError(f"optimizer must be one of {list(BUILTIN)} or a function, got {optimizer!r}")
        if clip is not None and not (isinstance(clip, Real) and clip > 0):
            raise ValueError(f"clip must be a positive number or None, got {clip!r}")
        return cls(optimizer, _checked_schedule(meta_lr), clip)

    @property
    def elementwise(self) -> bool:
        """Whether the optimiser treats every number alike, so that it can see all learners as one tensor."""
        return isinstance(self.optimizer, str)


def state_tree(state: State, layout: Layout, elementwise: bool) -> dict[str, Any]:
    """A copy of a state as a tree of tensors and plain values, for a checkpoint."""
    slots = {"0": state.slots} if elementwise and state.slots else state.slots.get("state", {})
    form = {} if state.form is None else {"form": state.form._asdict()}
    return {
        **form,
        "step": state.step,
        "schedule_start": state.schedule_start,
        "params": {name: value.clone() for name, value in layout.named(state.flat).items()},
        "optimizer": {
            "flat": elementwise,
            "state": copy.deepcopy(slots),
            "groups": copy.deepcopy(state.slots.get("groups", [])) if not elementwise else [],
        },
    }


def state_from_tree(tree: Mapping[str, Any], objective: Objective, like: State, rule: Rule) -> State:
    """The state of a checkpoint, on the device of another state.

    Learners that were saved before forms of the gradient were chosen continue by the adjoint recursion, bit for bit.

    Raises:
        ValueError: for the state of another model or optimiser.
    """
    layout = objective.layout
    _check_params(mapping(tree, "params"), layout.named(like.flat))
    params = {name: value.to(like.flat.device) for name, value in tree["params"].items()}
    optimizer, elementwise = mapping(tree, "optimizer"), rule.elementwise
    saved, groups = copy.deepcopy(dict(mapping(optimizer, "state"))), copy.deepcopy(optimizer["groups"])
    fits = optimizer.get("flat", elementwise) is elementwise and all(isinstance(s, dict) for s in saved.values())
    if elementwise and fits and saved:
        fits = saved.keys() == {"0"} and _are_slots(saved["0"], rule, like.flat)
    if not fits or type(groups) is not list:
        raise ValueError("the state belongs to another optimiser, or to an earlier version; start a new learner")
    if elementwise:
        # The library's optimisers are fused, and keep their step counters on the device too.
        slots = {name: value.to(like.flat.device) for name, value in saved.get("0", {}).items()}
    else:
        slots = {"state": saved, "groups": groups} if groups else {}
    step = integer(tree, "step")
    form = form_of(mapping(tree, "form")) if "form" in tree else adjoint_form(objective) if step else None
    return State(layout.flat(params), slots, step, integer(tree, "schedule_start", high=step), form)


def _are_slots(slots: Mapping[str, Any], rule: Rule, flat: Tensor) -> bool:
    """Whether these are the slots of one of the library's optimisers for these parameters."""
    expected = {"adam": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}[str(rule.optimizer)]
    return slots.keys() == expected and all(
        isinstance(value, Tensor)
        and (value.shape, value.dtype) == (((), torch.float32) if name == "step" else (flat.shape, flat.dtype))
        for name, value in slots.items()
    )


def _checked_schedule(meta_lr: Schedule) -> tuple[tuple[int, float], ...]:
    pairs: Any = [(0, meta_lr)] if isinstance(meta_lr, Real) else meta_lr
    is_schedule = isinstance(pairs, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(value, Real) for value in pair)
        for pair in pairs
    )
    starts = [int(start) for start, _ in pairs] if is_schedule else []
    if not starts or starts[0] != 0 or starts != sorted({start for start, _ in pairs}):
        raise ValueError(
            f"meta_lr must be a number, or (from update, step size) pairs that begin at 0; got {meta_lr!r}"
        )
    if not all(math.isfinite(lr) and lr >= 0 for _, lr in pairs):
        raise ValueError(f"meta_lr must be finite and at least 0, got {meta_lr!r}")
    return tuple((int(start), float(lr)) for start, lr in pairs)


def _check_params(saved: Mapping[str, Tensor], expected: Params) -> None:
    if not all(isinstance(value, Tensor) for value in saved.values()):
        raise ValueError("the state is damaged: its params must be tensors")
    differences = [
        f"{name}: saved {tuple(saved[name].shape)}, here {tuple(value.shape)}"
        for name, value in expected.items()
        if name in saved and saved[name].shape != value.shape
    ]
    differences += [f"only in the state: {name}" for name in saved if name not in expected]
    differences += [f"only in the model: {name}" for name in expected if name not in saved]
    if differences:
        raise ValueError(f"the state belongs to another model: {'; '.join(differences[:5])}")
    if any(saved[name].dtype != value.dtype for name, value in expected.items()):
        raise ValueError("the state belongs to a model of another dtype; convert the model first")
