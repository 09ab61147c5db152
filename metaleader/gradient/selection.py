"""Which parameters the inner loop moves, by which step sizes, and checks of the arguments."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

Params = dict[str, Tensor]
# loss_fn(params, batch) -> scalar, or with dropout seeds loss_fn(params, batch, noise)
LossFn = Callable[..., Tensor]
# One step size, or one for each tensor that moves, by name
StepSize = float | Tensor | Mapping[str, float | Tensor]


def split(params: Mapping[str, Tensor], only: str | None) -> tuple[Params, Params]:
    """Divide parameters into those that move in the inner loop and those that are fixed."""
    if not params:
        raise ValueError("params is empty; pass a dict of tensors by name")
    moving = moving_names(params, only)
    return {k: v for k, v in params.items() if k in moving}, {k: v for k, v in params.items() if k not in moving}


def moving_names(names: Iterable[str], only: str | None) -> set[str]:
    """The names selected by `only`: all (None), the last layer ("last"), or those that match a pattern.

    The last layer is the module of the last parameter.

    >>> sorted(moving_names(["conv.weight", "head.weight", "head.bias"], "last"))
    ['head.bias', 'head.weight']
    """
    names = list(names)
    if only is None:
        return set(names)
    if only == "last":
        layer = names[-1].rpartition(".")[0]
        selected = {name for name in names if name.rpartition(".")[0] == layer}
        if not layer and selected != {"weight", "bias"} and len(selected) > 1:
            raise ValueError(
                f"parameters {sorted(selected)} belong to no layer, so the last layer is unknown; pass a name pattern"
            )
        return selected
    selected = {name for name in names if fnmatch.fnmatchcase(name, only)}
    if not selected:
        raise ValueError(f"only={only!r} matches no parameter; the parameters are {names}")
    return selected


def step_sizes(lr: StepSize, moving: Mapping[str, Tensor]) -> dict[str, float | Tensor]:
    """One step size for each tensor that moves."""
    if isinstance(lr, Mapping):
        if lr.keys() != moving.keys():
            missing, unknown = sorted(moving.keys() - lr.keys()), sorted(lr.keys() - moving.keys())
            raise ValueError(f"step sizes must name the tensors that move: missing {missing}, unknown {unknown}")
        return dict(lr)
    return dict.fromkeys(moving, lr)


def check_steps(steps: int, noise: Tensor | None, rows: int) -> None:
    """Reject a negative number of steps, and noise whose number of rows is not `rows`."""
    if steps < 0:
        raise ValueError(f"the number of steps must be 0 or more, got {steps}")
    if noise is not None and (noise.ndim == 0 or noise.shape[0] != rows):
        raise ValueError(f"noise must have {rows} rows, one per evaluation of the loss, got {tuple(noise.shape)}")


def scalar_loss(loss_fn: LossFn) -> LossFn:
    """A user's loss, which raises an error if it returns something else than a scalar."""

    def checked(params: Params, batch: Any, *noise: Tensor) -> Tensor:
        loss = loss_fn(params, batch, *noise)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a scalar tensor, got {got}; average over the datapoints")
        return loss

    return checked
