"""The update procedure U: a few full-batch gradient steps on one task (Update-Procedure of Algorithm 2).

Pure functions of a `loss_fn(params, batch)` that returns a scalar, `params` a dict of tensors.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.func import grad
from torch.nn.attention import SDPBackend, sdpa_kernel

Params = dict[str, Tensor]
# loss_fn(params, batch) -> scalar; where noise is given: loss_fn(params, batch, noise)
LossFn = Callable[..., Tensor]
StepSize = float | Tensor | Mapping[str, float | Tensor]


def adapt(
    loss_fn: LossFn,
    params: Mapping[str, Tensor],
    batch: Any,
    lr: StepSize = 0.1,
    steps: int = 5,
    *,
    only: str | None = None,
    noise: Tensor | None = None,
) -> Params:
    """Take gradient steps on a batch and return the adapted parameters; the given ones are left as they are.

    The result is differentiable with respect to `params` and `lr`: call it under `torch.no_grad()` when that is not
    wanted. To adapt many tasks at once, `torch.func.vmap` it.

    Args:
        loss_fn: a scalar loss of (params, batch).
        params: the initialisation.
        batch: what `loss_fn` takes, commonly a `Batch`.
        lr: one step size, or one for each tensor that moves, by name.
        steps: the number of steps; 0 returns the initialisation.
        only: which parameters move: None for all, "last" for the last layer, or a name pattern such as "head.*".
        noise: integers, (steps,), one handed to `loss_fn` as its third argument at each step, for dropout.

    >>> import torch
    >>> loss_fn = lambda params, batch: (params["w"] - batch).square().sum()
    >>> adapt(loss_fn, {"w": torch.tensor(0.0)}, torch.tensor(1.0), lr=0.25, steps=2)
    {'w': tensor(0.7500)}
    """
    check_steps(steps, noise, needed=steps)
    moving, fixed = split(params, only)
    rates = step_sizes(lr, moving)
    # Fused attention has no second derivative; the plain one has.
    with sdpa_kernel(SDPBackend.MATH):
        for s in range(steps):
            moving = inner_step(loss_fn, moving, fixed, rates, batch, *at_step(noise, s))
    return {name: moving.get(name, fixed.get(name)) for name in params}  # pyright: ignore[reportReturnType]


def inner_step(
    loss_fn: LossFn, moving: Params, fixed: Params, rates: Mapping[str, float | Tensor], batch: Any, *noise: Tensor
) -> Params:
    """One gradient step of the parameters that move: theta - D g(theta), D the diagonal of step sizes."""
    gradient = inner_gradient(loss_fn, moving, fixed, batch, *noise)
    return {name: value - rates[name] * gradient[name] for name, value in moving.items()}


def inner_gradient(loss_fn: LossFn, moving: Params, fixed: Params, batch: Any, *noise: Tensor) -> Params:
    """The gradient of the loss with respect to the parameters that move."""
    return grad(lambda m: scalar_loss(loss_fn, {**fixed, **m}, batch, *noise))(moving)


def scalar_loss(loss_fn: LossFn, params: Params, batch: Any, *noise: Tensor) -> Tensor:
    """Call a loss and refuse a result that is not a scalar."""
    loss = loss_fn(params, batch, *noise)
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return a scalar tensor, got {got}; average over the datapoints")
    return loss


def split(params: Mapping[str, Tensor], only: str | None) -> tuple[Params, Params]:
    """Divide parameters into those that move in the inner loop and those that stay."""
    if not params:
        raise ValueError("params is empty; pass a dict of tensors by name")
    chosen = moving_names(params, only)
    return {k: v for k, v in params.items() if k in chosen}, {k: v for k, v in params.items() if k not in chosen}


def moving_names(names: Iterable[str], only: str | None) -> set[str]:
    """The names that `only` chooses: all (None), the last layer ("last"), or those that match a pattern.

    The last layer is the module of the parameter that comes last.

    >>> sorted(moving_names(["conv.weight", "head.weight", "head.bias"], "last"))
    ['head.bias', 'head.weight']
    """
    names = list(names)
    if only is None:
        return set(names)
    if only == "last":
        layer = names[-1].rpartition(".")[0]
        chosen = {name for name in names if name.rpartition(".")[0] == layer}
        if not layer and chosen != {"weight", "bias"} and len(chosen) > 1:
            raise ValueError(f"names without a layer, {sorted(chosen)}, do not say which is last; pass a name pattern")
        return chosen
    chosen = {name for name in names if fnmatch.fnmatchcase(name, only)}
    if not chosen:
        raise ValueError(f"only={only!r} matches no parameter; there are {names}")
    return chosen


def step_sizes(lr: StepSize, moving: Mapping[str, Tensor]) -> dict[str, float | Tensor]:
    """One step size for each tensor that moves."""
    if isinstance(lr, Mapping):
        if lr.keys() != moving.keys():
            missing, unknown = sorted(moving.keys() - lr.keys()), sorted(lr.keys() - moving.keys())
            raise ValueError(f"step sizes must name the tensors that move: missing {missing}, unknown {unknown}")
        return dict(lr)
    return dict.fromkeys(moving, lr)


def check_steps(steps: int, noise: Tensor | None, needed: int) -> None:
    """Refuse a negative number of steps, and noise that does not cover them."""
    if steps < 0:
        raise ValueError(f"the number of steps must be 0 or more, got {steps}")
    if noise is not None and (noise.ndim == 0 or noise.shape[0] != needed):
        raise ValueError(
            f"noise must have {needed} rows, one for each evaluation of the loss, got {tuple(noise.shape)}"
        )


def at_step(noise: Tensor | None, s: int) -> tuple[Tensor, ...]:
    """The extra argument of the loss at step s: none, or that step's noise."""
    return () if noise is None else (noise[s],)
