"""The meta-gradient (Eq. 5 of the paper), exact, by the adjoint recursion instead of unrolling.

For inner steps theta_{s+1} = theta_s - D g(theta_s), D the diagonal of step sizes and g the support gradient,

    lambda_K = gradient of the query loss at theta_K
    lambda_s = lambda_{s+1} - H(theta_s) (D lambda_{s+1})        H: Hessian of the support loss
    meta-gradient = mean over tasks of lambda_0
    gradient of a step size = - sum over s of <g(theta_s), lambda_{s+1}> over the tensors it moves

(with a loss after every inner step, each lambda_s, s > 0, also has its share of the query gradient at theta_s)
so that the activations of one step are alive at a time, whatever the number of inner steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from metaleader.gradient.inner import (
    LossFn,
    Params,
    StepSize,
    check_steps,
    inner_gradient,
    inner_step,
    scalar_loss,
    split,
    step_sizes,
)
from metaleader.tasks import num_rows, rows, shapes


@overload
def meta_gradient(
    loss_fn: LossFn,
    params: Mapping[str, Tensor],
    support: Any,
    query: Any,
    inner_lr: StepSize = ...,
    inner_steps: int = ...,
    first_order: bool = ...,
    chunk: int | None = ...,
    *,
    only: str | None = ...,
    noise: Tensor | None = ...,
    every_step: bool = ...,
    lr_gradient: Literal[False] = ...,
) -> tuple[Tensor, Params]: ...


@overload
def meta_gradient(
    loss_fn: LossFn,
    params: Mapping[str, Tensor],
    support: Any,
    query: Any,
    inner_lr: StepSize = ...,
    inner_steps: int = ...,
    first_order: bool = ...,
    chunk: int | None = ...,
    *,
    only: str | None = ...,
    noise: Tensor | None = ...,
    every_step: bool = ...,
    lr_gradient: Literal[True],
) -> tuple[Tensor, Params, Tensor | Params]: ...


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
) -> tuple[Tensor, Params] | tuple[Tensor, Params, Tensor | Params]:
    """The mean query loss after `inner_steps` steps on the support sets, and its exact gradient.

    Tensors in `support` and `query` have a leading task dimension. For several replicas side by side (seeds, each with
    its own parameters and tasks), `torch.func.vmap` this function: every tensor then has the replicas in front.

    Args:
        loss_fn: a scalar loss of (params, batch), for one task.
        params: the initialisation, shared by all tasks.
        support: the batches to adapt on, (tasks, ...); not looked at with 0 inner steps.
        query: the batches to measure on, (tasks, ...).
        inner_lr: one step size, or one for each tensor that moves, by name.
        inner_steps: the number of inner steps; 0 gives the plain mean loss and its gradient.
        first_order: leave the second derivatives out: the query gradient at the adapted parameters.
        chunk: how many tasks are held at a time (all, if None); bounds the memory, changes only the rounding.
        only: which parameters move in the inner loop: None for all, "last", or a name pattern. All get a gradient.
        noise: integers, (inner_steps + 1, tasks), handed to `loss_fn` as its third argument, so that an adjoint step
            sees the dropout mask of its inner step; the last row is for the query loss.
        every_step: take the mean of the query losses after each inner step, instead of that after the last.
        lr_gradient: also return the gradient with respect to `inner_lr`, in the same form.

    Returns:
        The loss and its gradient by parameter name, and with `lr_gradient` the gradient of the step sizes.

    >>> loss_fn = lambda params, batch: 0.5 * (params["w"] - batch).square().sum()
    >>> targets = torch.tensor([1.0, 3.0])
    >>> meta_gradient(loss_fn, {"w": torch.tensor(0.0)}, targets, targets, inner_lr=0.5, inner_steps=1)
    (tensor(0.6250), {'w': tensor(-0.5000)})
    """
    check_steps(inner_steps, noise, needed=inner_steps + 1)
    num_tasks = num_rows(query)
    _check_tasks(num_tasks, support if inner_steps else query, query, noise, chunk)
    moving, fixed = split(params, only)
    rates = step_sizes(inner_lr, moving)

    def one_task(support: Any, query: Any, *noise: Tensor) -> _Result:
        back = not first_order or lr_gradient or every_step
        return _one_task(
            loss_fn, moving, fixed, rates, support, query, noise, inner_steps, first_order, every_step, back
        )

    # Tasks are vmapped from outside: torch 2.13 gives a wrong second derivative of batch norm for grad over vmap.
    many_tasks = vmap(one_task, in_dims=(0, 0) + (() if noise is None else (1,)))
    totals: _Result | None = None
    # Fused attention has no second derivative; the plain one has.
    with sdpa_kernel(SDPBackend.MATH):
        for start in range(0, num_tasks, chunk or num_tasks):
            part = slice(start, start + (chunk or num_tasks))
            extra = () if noise is None else (noise[:, part],)
            results = many_tasks(rows(support, part), rows(query, part), *extra)
            sums = tree_map(lambda value: value.sum(0), results)
            totals = sums if totals is None else tree_map(torch.add, totals, sums)
    loss, gradient, rate_gradient = tree_map(lambda total: total / num_tasks, totals)
    gradient = {name: gradient[name] for name in params}
    if not lr_gradient:
        return loss, gradient
    if isinstance(inner_lr, Mapping):
        return loss, gradient, rate_gradient
    return loss, gradient, torch.stack(list(rate_gradient.values())).sum()


class _Result(NamedTuple):
    loss: Tensor
    gradient: Params
    rate_gradient: Params


def _one_task(
    loss_fn: LossFn,
    moving: Params,
    fixed: Params,
    rates: dict[str, float | Tensor],
    support: Any,
    query: Any,
    noise: tuple[Tensor, ...],
    inner_steps: int,
    first_order: bool,
    every_step: bool,
    back: bool,
) -> _Result:
    """Query loss, its gradient, and what needs the way back: the step sizes' gradient, losses on the way; one task."""
    at = lambda s: tuple(row[s] for row in noise)  # noqa: E731

    def walk(theta: Params, start: int, stop: int) -> list[Params]:
        """The path theta_start .. theta_stop."""
        path = [theta]
        for s in range(start, stop):
            path.append(inner_step(loss_fn, path[-1], fixed, rates, support, *at(s)))
        return path

    # The path is kept at every stride-th step and walked again in between: memory grows with the root of the number of
    # steps. Up to 15 steps the stride is 1, and nothing is computed twice.
    stride = max(1, math.isqrt(inner_steps) // 2)
    kept = [moving]
    for start in range(0, inner_steps, stride):
        kept.append(walk(kept[-1], start, min(start + stride, inner_steps))[-1])

    def query_loss(moving: Params, fixed: Params) -> Tensor:
        return scalar_loss(loss_fn, {**fixed, **moving}, query, *at(inner_steps))

    query_gradient = grad_and_value(query_loss, argnums=(0, 1))
    (lam, lam_fixed), loss = query_gradient(kept.pop(), fixed)
    rate_gradient = {name: torch.zeros_like(loss) for name in moving}
    path: list[Params] = []
    for s in reversed(range(inner_steps)) if back else ():
        if not path:
            path = walk(kept.pop(), s - s % stride, s)

        def inner_products(moving: Params, fixed: Params) -> Params:
            gradient = inner_gradient(loss_fn, moving, fixed, support, *at(s))  # noqa: B023
            return {name: (gradient[name] * lam[name]).sum() for name in moving}  # noqa: B023

        def dot(moving: Params, fixed: Params) -> tuple[Tensor, Params]:
            products = inner_products(moving, fixed)
            return torch.stack([rates[name] * product for name, product in products.items()]).sum(), products

        theta = path.pop()
        if first_order:
            products = inner_products(theta, fixed)
        else:
            (hessian, hessian_fixed), products = grad(dot, argnums=(0, 1), has_aux=True)(theta, fixed)
            lam = {name: lam[name] - hessian[name] for name in lam}
            lam_fixed = {name: lam_fixed[name] - hessian_fixed[name] for name in lam_fixed}
        rate_gradient = {name: rate_gradient[name] - products[name] for name in moving}
        if every_step and s > 0:
            own, own_loss = query_gradient(theta, fixed)
            loss, (lam, lam_fixed) = loss + own_loss, tree_map(torch.add, (lam, lam_fixed), own)
    # All of it is linear in the lambdas.
    share = 1 / inner_steps if every_step and inner_steps else 1.0
    return tree_map(lambda value: value * share, _Result(loss, lam | lam_fixed, rate_gradient))


def _check_tasks(num_tasks: int, support: Any, query: Any, noise: Tensor | None, chunk: int | None) -> None:
    leading = {shape[0] for tree in (support, query) for shape in _leading(tree)}
    if leading != {num_tasks} or num_tasks == 0:
        raise ValueError(
            "support and query must share a leading dimension of one or more tasks, got support"
            f" {shapes(support)} and query {shapes(query)}"
        )
    if noise is not None and noise.shape[1:] != (num_tasks,):
        raise ValueError(f"noise must have one column a task ({num_tasks}), got shape {tuple(noise.shape)}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")


def _leading(tree: Any) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    tree_map(lambda leaf: found.append(tuple(leaf.shape)), tree)
    return found
