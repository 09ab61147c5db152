"""Adaptation by gradient steps, and the exact meta-gradient of the loss after it (Eq. 5 of the paper).

The update procedure U takes inner steps theta_{s+1} = theta_s - D g(theta_s), where D is the diagonal of step sizes and
g the gradient of the support loss. Where memory allows, the meta-gradient is that of the unrolled inner loop
(`gradient.unrolled`), and elsewhere follows by the adjoint recursion (`gradient.adjoint`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.gradient.adjoint import add, adjoint
from metaleader.gradient.attention import plain_attention
from metaleader.gradient.selection import LossFn, Params, StepSize, check_steps, scalar_loss, split, step_sizes
from metaleader.gradient.unrolled import TooLargeError, default_budget, unrolled_sums


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
    """Take gradient steps on a batch and return the adapted parameters; `params` is left unchanged.

    The result is differentiable with respect to `params` and `lr`; call `adapt` under `torch.no_grad()` to avoid that.
    To adapt many tasks at once, apply `torch.func.vmap`.

    Args:
        loss_fn: a scalar loss of (params, batch).
        params: the initialisation.
        batch: the second argument of `loss_fn`, commonly a `Batch`.
        lr: one step size, or one for each tensor that moves, by name.
        steps: the number of steps; 0 returns the initialisation.
        only: which parameters move: None for all, "last" for the last layer, or a name pattern such as "head.*".
        noise: integers, (steps,), one per step, passed to `loss_fn` as its third argument to seed dropout.

    >>> loss_fn = lambda params, batch: (params["w"] - batch).square().sum()
    >>> adapt(loss_fn, {"w": torch.tensor(0.0)}, torch.tensor(1.0), lr=0.25, steps=2)
    {'w': tensor(0.7500)}
    """
    check_steps(steps, noise, rows=steps)
    rates = step_sizes(lr, split(params, only)[0])
    with plain_attention():
        return descend(scalar_loss(loss_fn), params, rates, batch, range(steps), noise)


def descend(
    loss_fn: LossFn,
    params: Mapping[str, Tensor],
    rates: Mapping[str, float | Tensor],
    batch: Any,
    steps: Sequence[int],
    noise: Tensor | None = None,
) -> Params:
    """Take the inner steps with the given numbers, which index `noise`; the tensors named in `rates` move."""
    moving = {name: value for name, value in params.items() if name in rates}
    fixed = {name: value for name, value in params.items() if name not in rates}
    for s in steps:
        moving = inner_step(loss_fn, moving, fixed, rates, batch, *(() if noise is None else (noise[s],)))
    return {name: moving[name] if name in moving else fixed[name] for name in params}


def inner_step(
    loss_fn: LossFn, moving: Params, fixed: Params, rates: Mapping[str, float | Tensor], batch: Any, *noise: Tensor
) -> Params:
    """One gradient step of the parameters that move: theta - D g(theta)."""
    gradient = inner_gradient(loss_fn, moving, fixed, batch, *noise)
    return {name: value - rates[name] * gradient[name] for name, value in moving.items()}


def inner_gradient(loss_fn: LossFn, moving: Params, fixed: Params, batch: Any, *noise: Tensor) -> Params:
    """The gradient of the loss with respect to the parameters that move."""
    return grad(lambda m: loss_fn({**fixed, **m}, batch, *noise))(moving)


class Inner(NamedTuple):
    """The inner loop of a meta-gradient: the arguments that stay the same from update to update."""

    lr: StepSize = 0.1
    steps: int = 5
    first_order: bool = False
    chunk: int | Literal["auto"] | None = None
    only: str | None = None
    every_step: bool = False
    unroll: bool | None = None

    @property
    def tasks_at_once(self) -> int | None:
        """The number of tasks computed at a time; None is all, also where a number has not been chosen yet."""
        return None if self.chunk == "auto" else self.chunk


@torch.no_grad()
def meta_gradient(
    loss_fn: LossFn,
    params: Mapping[str, Tensor],
    support: Any,
    query: Any,
    inner_lr: StepSize = 0.1,
    inner_steps: int = 5,
    first_order: bool = False,
    chunk: int | None = None,
    *,
    only: str | None = None,
    noise: Tensor | None = None,
    every_step: bool = False,
    lr_gradient: bool = False,
    unroll: bool | None = None,
) -> tuple[Any, ...]:
    """The mean query loss after `inner_steps` steps on the support sets, and its exact gradient.

    Tensors in `support` and `query` have a leading task dimension. For several seeds, each with its own parameters and
    tasks, apply `torch.func.vmap`: every tensor then has a leading seed dimension.

    Args:
        loss_fn: a scalar loss of (params, batch), for one task.
        params: the initialisation, shared by all tasks.
        support: the batches to adapt on, (tasks, ...); ignored with 0 inner steps.
        query: the batches to measure on, (tasks, ...).
        inner_lr: one step size, or one for each tensor that moves, by name.
        inner_steps: the number of inner steps; 0 gives the plain mean loss and its gradient.
        first_order: omit the second derivatives: the query gradient at the adapted parameters.
        chunk: the number of tasks computed at a time (None: all); bounds the memory and changes only the rounding.
        only: which parameters move in the inner loop: None for all, "last", or a name pattern. All get a gradient.
        noise: integers, (inner_steps + 1, tasks), passed to `loss_fn` as its third argument, so that an adjoint step
            sees the dropout mask of its inner step; the last row is for the query loss.
        every_step: take the mean of the query losses after each inner step, instead of the loss after the last.
        lr_gradient: also return the gradient with respect to `inner_lr`, in the form of `inner_lr`.
        unroll: True holds the activations of all inner steps, which is faster; False holds those of one at a time. None
            unrolls if they fit into a quarter of the memory of the device. It changes only the rounding. Under a
            transform of `torch.func` and in compiled functions, it is always False.

    Returns:
        The loss, its gradient by parameter name, and with `lr_gradient` the gradient of the step sizes.

    >>> loss_fn = lambda params, batch: 0.5 * (params["w"] - batch).square().sum()
    >>> targets = torch.tensor([1.0, 3.0])
    >>> meta_gradient(loss_fn, {"w": torch.tensor(0.0)}, targets, targets, inner_lr=0.5, inner_steps=1)
    (tensor(0.6250), {'w': tensor(-0.5000)})
    """
    check_steps(inner_steps, noise, rows=inner_steps + 1)
    _check_tasks(support if inner_steps else query, query, noise, chunk)
    moving, fixed = split(params, only)
    inner = Inner(step_sizes(inner_lr, moving), inner_steps, first_order, chunk, only, every_step, unroll)
    given = (scalar_loss(loss_fn), moving, fixed, inner, support, query, noise, lr_gradient)
    with plain_attention():
        loss, gradient, rate_gradient = mean_gradient(*given)
    gradient = {name: gradient[name] for name in params}
    if not lr_gradient:
        return loss, gradient
    if isinstance(inner_lr, Mapping):
        return loss, gradient, rate_gradient
    return loss, gradient, torch.stack(list(rate_gradient.values())).sum()


def mean_gradient(
    loss_fn: LossFn,
    moving: Params,
    fixed: Params,
    inner: Inner,
    support: Any,
    query: Any,
    noise: Tensor | None,
    lr_gradient: bool = False,
) -> tuple[Tensor, Params, Params]:
    """`meta_gradient` without its checks: `inner.lr` maps each moving tensor to its step size.

    The loss must return a scalar, and its attention must have a second derivative, as those of a `Network` do.
    """
    if inner.unroll is not False and not in_transform():
        with contextlib.suppress(TooLargeError):
            return unrolled_mean(loss_fn, moving, fixed, inner, support, query, noise, lr_gradient)
    return _adjoint_mean(loss_fn, moving, fixed, inner, support, query, noise, lr_gradient)


def _adjoint_mean(
    loss_fn: LossFn,
    moving: Params,
    fixed: Params,
    inner: Inner,
    support: Any,
    query: Any,
    noise: Tensor | None,
    lr_gradient: bool,
) -> tuple[Tensor, Params, Params]:
    """`mean_gradient` by the adjoint recursion."""
    # vmap is outermost: torch 2.13 gives a wrong second derivative of batch norm for torch.func.grad over vmap.
    one_task = lambda *batch: _task_gradient(loss_fn, moving, fixed, inner, lr_gradient, *batch)  # noqa: E731
    many_tasks = vmap(one_task, in_dims=(0, 0) + (() if noise is None else (1,)))

    def sums(*batch: Any) -> Any:
        return tree_map(lambda value: value.sum(0), many_tasks(*batch))

    num_tasks = tree_leaves(query)[0].shape[0]
    totals = sum_over_chunks(sums, inner.tasks_at_once or num_tasks, support, query, noise)
    return tree_map(lambda total: total / num_tasks, totals)


def unrolled_mean(
    loss_fn: LossFn,
    moving: Params,
    fixed: Params,
    inner: Inner,
    support: Any,
    query: Any,
    noise: Tensor | None,
    lr_gradient: bool = False,
    side_by_side: bool = False,
) -> tuple[Tensor, Params, Params]:
    """`mean_gradient` through the unrolled inner loop; also for learners side by side.

    Raises:
        TooLargeError: with `unroll=None`, if the activations of all inner steps exceed `default_budget`.
    """
    leaf, task_dim = tree_leaves(query)[0], int(side_by_side)
    num_tasks, budget = leaf.shape[task_dim], None if inner.unroll else default_budget(leaf.device)
    given = {"lr_gradient": lr_gradient, "side_by_side": side_by_side, "budget": budget}
    sums = functools.partial(unrolled_sums, loss_fn, moving, fixed, inner, **given)
    totals = sum_over_chunks(sums, inner.tasks_at_once or num_tasks, support, query, noise, task_dim)
    return tree_map(lambda total: total / num_tasks, totals)


def in_transform() -> bool:
    """Whether a transform of `torch.func` is active, or code is compiled: torch.autograd cannot be used there."""
    level = torch._C._functorch.maybe_current_level  # pyright: ignore[reportAttributeAccessIssue]
    return torch.compiler.is_compiling() or level() is not None


def sum_over_chunks(
    function: Callable[..., Any], chunk: int, support: Any, query: Any, noise: Tensor | None, task_dim: int = 0
) -> Any:
    """Call a function on at most `chunk` tasks at a time and add up its results.

    The task dimension of `support` and `query` is `task_dim`; that of `noise` is the next one.
    """
    num_tasks = tree_leaves(query)[0].shape[task_dim]
    if chunk >= num_tasks:
        return function(support, query, *(() if noise is None else (noise,)))
    total = None
    for start in range(0, num_tasks, chunk):
        size = min(chunk, num_tasks - start)
        batches = tree_map(lambda leaf: leaf.narrow(task_dim, start, size), (support, query))  # noqa: B023
        extra = () if noise is None else (noise.narrow(task_dim + 1, start, size),)
        result = function(*batches, *extra)
        total = result if total is None else tree_map(torch.add, total, result)
    return total


def _task_gradient(
    loss_fn: LossFn,
    moving: Params,
    fixed: Params,
    inner: Inner,
    lr_gradient: bool,
    support: Any,
    query: Any,
    *noise: Tensor,
) -> tuple[Tensor, Params, Params]:
    """Query loss of one task, its gradient, and the gradient of the step sizes."""
    rates, at = inner.lr, lambda s: tuple(row[s] for row in noise)
    assert isinstance(rates, Mapping)

    def step(s: int, theta: Params) -> tuple[Params, None]:
        return inner_step(loss_fn, theta, fixed, rates, support, *at(s)), None

    def query_loss(theta: Params, fixed: Params) -> Tensor:
        return loss_fn({**fixed, **theta}, query, *at(inner.steps))

    def query_gradient(theta: Params) -> tuple[Tensor, Any]:
        (lam, lam_fixed), loss = grad_and_value(query_loss, argnums=(0, 1))(theta, fixed)
        return loss, (lam, lam_fixed, dict.fromkeys(moving))

    def pullback(s: int, theta: Params, saved: None, after: Params, lambdas: Any) -> Any:
        lam, lam_fixed, rate_gradient = lambdas

        def inner_products(theta: Params, fixed: Params) -> Params:
            gradient = inner_gradient(loss_fn, theta, fixed, support, *at(s))
            return {name: (gradient[name] * lam[name]).sum() for name in moving}

        def dot(theta: Params, fixed: Params) -> tuple[Tensor, Params]:
            products = inner_products(theta, fixed)
            return torch.stack([rates[name] * product for name, product in products.items()]).sum(), products

        if inner.first_order:
            products = inner_products(theta, fixed)
        else:
            (hessian, hessian_fixed), products = grad(dot, argnums=(0, 1), has_aux=True)(theta, fixed)
            lam = {name: lam[name] - hessian[name] for name in lam}
            lam_fixed = {name: lam_fixed[name] - hessian_fixed[name] for name in lam_fixed}
        return lam, lam_fixed, {name: add(rate_gradient[name], -products[name]) for name in moving}

    back = pullback if lr_gradient or not inner.first_order else None
    loss, (lam, lam_fixed, rate_gradient) = adjoint(moving, inner.steps, step, query_gradient, back, inner.every_step)
    zero = torch.zeros_like(loss)
    return loss, lam | lam_fixed, {name: zero if value is None else value for name, value in rate_gradient.items()}


def _check_tasks(support: Any, query: Any, noise: Tensor | None, chunk: int | None) -> None:
    shapes = [tree_map(lambda leaf: tuple(leaf.shape), tree) for tree in (support, query)]
    leading = {leaf.shape[0] for leaf in tree_leaves((support, query))}
    if len(leading) != 1 or leading == {0}:
        raise ValueError(
            "support and query must share a leading dimension of one or more tasks, got support"
            f" {shapes[0]} and query {shapes[1]}"
        )
    if noise is not None and noise.shape[1:] != tuple(leading):
        raise ValueError(f"noise must have one column per task ({leading.pop()}), got shape {tuple(noise.shape)}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
