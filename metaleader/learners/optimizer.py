"""The outer step: the parameters of a learner, the optimiser that moves them, and its step schedule (Algorithm 2)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from metaleader.gradient.flat import Form
from metaleader.gradient.inner import Params

# One step size, or (from update, step size) pairs
Schedule = float | Sequence[tuple[int, float]]
# Of (parameters, lr=...)
OptimizerFactory = Callable[..., torch.optim.Optimizer]


def _adam(tensors: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(tensors, lr=lr, fused=True)


def _sgd(tensors: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=lr, momentum=0.9, fused=True)


# Functions of the module: a copied or pickled learner has the same one, and runs beside the original.
_OPTIMIZERS: dict[str, OptimizerFactory] = {"adam": _adam, "sgd": _sgd}


class Outer:
    """Parameters with their optimiser.

    The library's own optimisers go element by element, so they see one tensor, of which the parameters are views: a
    step is then one launch. A user's function gets the parameters one by one.

    Attributes:
        params: changed in place.
        flat: all of them in one tensor; None with a user's optimiser.
        clip: the largest norm of a gradient, or None.
        kind: the function that makes the optimiser.
        step: updates made.
    """

    def __init__(
        self, params: Params, optimizer: str | OptimizerFactory, meta_lr: Schedule, clip: float | None
    ) -> None:
        if isinstance(optimizer, str) and optimizer not in _OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {sorted(_OPTIMIZERS)} or a function, got {optimizer!r}")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be positive or None, got {clip}")
        if len({value.dtype for value in params.values()}) > 1:
            raise ValueError(f"parameters must be of one dtype, got {sorted({str(v.dtype) for v in params.values()})}")
        self._form = Form(params)
        self.flat = self._form.flat(params) if isinstance(optimizer, str) else None
        self.params = params
        self._set_views()
        self.step = 0
        self.clip = clip
        self._schedule = _checked_schedule(meta_lr)
        # The update that the schedule counts from; a learner that starts anew moves it.
        self._schedule_start = 0
        self.kind = _OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        self._optimizer = self.new_optimizer(self._tensors())

    def _set_views(self) -> None:
        if self.flat is not None:
            self.params = self._form.named(self.flat)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickle does not keep that the parameters are views.
        self.__dict__.update(state)
        self._set_views()

    def flattened(self) -> Tensor:
        """The parameters, flat."""
        return self._form.flat(self.params) if self.flat is None else self.flat

    def lr(self, number: int) -> float:
        """The step size of an update."""
        return next(lr for start, lr in reversed(self._schedule) if start <= number - self._schedule_start)

    @property
    def schedule(self) -> tuple[list[tuple[int, float]], int]:
        """Pairs of (from update, step size), and the update that they count from."""
        return self._schedule, self._schedule_start

    def descend(self, gradient: Tensor, norm: Tensor, number: int) -> None:
        """Take one step down a flat gradient of known norm; `step` is counted by the caller, once for many updates."""
        gradient, tensors = clipped(gradient, norm, self.clip), self._tensors()
        gradients = self._form.named(gradient).values() if self.flat is None else [gradient]
        for tensor, value in zip(tensors, gradients, strict=True):
            tensor.grad = value
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr(number)
        self._optimizer.step()
        for tensor in tensors:
            tensor.grad = None

    def restart(self, params: Params) -> None:
        """Begin anew from other parameters, the optimiser and its schedule too."""
        for name, value in self.params.items():
            value.copy_(params[name].detach())
        self._optimizer = self.new_optimizer(self._tensors())
        self._schedule_start = self.step

    def _tensors(self) -> list[Tensor]:
        return list(self.params.values()) if self.flat is None else [self.flat]

    def new_optimizer(self, tensors: list[Tensor]) -> torch.optim.Optimizer:
        """An optimiser of this kind, for other tensors."""
        return self.kind(tensors, lr=self._schedule[0][1])

    def optimizer_state(self) -> dict[str, Tensor]:
        """What the optimiser knows of the flat parameters; empty before the first step."""
        assert self.flat is not None
        return dict(self._optimizer.state.get(self.flat, {}))

    def take(self, flat: Tensor, state: dict[str, Tensor], step: int) -> None:
        """Go on from flat parameters and what the optimiser knows of them, which are copied, after so many updates."""
        assert self.flat is not None
        self.flat.copy_(flat)
        self._optimizer.state.pop(self.flat, None)
        if state:
            self._optimizer.state[self.flat] = {name: value.clone() for name, value in state.items()}
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything, as a tree of tensors and plain values."""
        optimizer = self._optimizer.state_dict()
        return {
            "step": self.step,
            "schedule_start": self._schedule_start,
            "params": {name: value.clone() for name, value in self.params.items()},
            "optimizer": {
                "flat": self.flat is not None,
                "state": {
                    str(i): {
                        name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                        for name, value in values.items()
                    }
                    for i, values in optimizer["state"].items()
                },
                "groups": [
                    {name: value for name, value in group.items() if name != "params" and _is_plain(value)}
                    for group in optimizer["param_groups"]
                ],
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        _check_params(state["params"], self.params)
        whole = self.flat is not None
        kept = [value for values in state["optimizer"]["state"].values() for value in values.values()]
        shapes = {value.shape for value in kept if isinstance(value, Tensor) and value.ndim > 0}
        # A user's optimiser may keep what it likes.
        fits = shapes <= {tensor.shape for tensor in self._tensors()} if whole else True
        if state["optimizer"].get("flat", whole) != whole or not fits:
            raise ValueError("the state is of another optimiser, or of an earlier version; start the learner anew")
        for name, value in self.params.items():
            value.copy_(state["params"][name])
        self._optimizer = self.new_optimizer(self._tensors())
        whole = self._optimizer.state_dict()
        whole["state"] = {int(i): copy.deepcopy(values) for i, values in state["optimizer"]["state"].items()}
        for group, saved in zip(whole["param_groups"], state["optimizer"]["groups"], strict=True):
            group.update(saved)
        self._optimizer.load_state_dict(whole)
        self.step, self._schedule_start = state["step"], state["schedule_start"]


def clipped(gradient: Tensor, norm: Tensor, clip: float | None) -> Tensor:
    """A gradient of known norm, scaled down where it is too long."""
    return gradient if clip is None else gradient * torch.clamp(clip / (norm + 1e-12), max=1.0)


def _checked_schedule(meta_lr: Schedule) -> list[tuple[int, float]]:
    pairs = [(0, meta_lr)] if isinstance(meta_lr, int | float) else [(int(n), lr) for n, lr in meta_lr]
    starts = [start for start, _ in pairs]
    if not pairs or starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError(
            f"meta_lr must be a number, or (from update, step size) pairs that begin at 0; got {meta_lr!r}"
        )
    if not all(math.isfinite(lr) and lr >= 0 for _, lr in pairs):
        raise ValueError(f"meta_lr must be finite and at least 0, got {meta_lr!r}")
    return [(start, float(lr)) for start, lr in pairs]


def _check_params(found: Mapping[str, Tensor], expected: Params) -> None:
    differ = [
        f"{name}: saved {tuple(found[name].shape)}, here {tuple(value.shape)}"
        for name, value in expected.items()
        if name in found and found[name].shape != value.shape
    ]
    differ += [f"only in the state: {name}" for name in found if name not in expected]
    differ += [f"only in the model: {name}" for name in expected if name not in found]
    if differ:
        raise ValueError(f"the state is of another model: {'; '.join(differ[:5])}")
    if any(found[name].dtype != value.dtype for name, value in expected.items()):
        raise ValueError("the state is of a model with another dtype; convert the model first")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple | list)
