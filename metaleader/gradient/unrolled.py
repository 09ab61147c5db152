"""The meta-gradient by differentiating through all inner steps at once.

`torch.func.vmap` batches the loss over the tasks; `torch.autograd` differentiates it, inner steps included. This is the
fastest form in plain operations, because no derivative passes through `torch.func`. The activations of all inner steps
are alive at the same time, so `meta_gradient` uses it where they fit into memory, and the adjoint recursion elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from metaleader.gradient.selection import LossFn, Params
from metaleader.system.machine import memory_bytes


class TooLargeError(Exception):
    """The activations of all inner steps would not fit into memory."""


def unrolled_sums(
    loss_fn: LossFn,
    moving: Params,
    fixed: Params,
    inner: Any,
    support: Any,
    query: Any,
    noise: Tensor | None = None,
    *,
    lr_gradient: bool = False,
    side_by_side: bool = False,
    budget: int | None = None,
) -> tuple[Tensor, Params, Params]:
    """Sums over tasks of the losses, their gradients by name, and those of the step sizes.

    Args:
        loss_fn: a scalar loss of (params, batch), for one task.
        moving: the parameters that move in the inner loop.
        fixed: the other parameters.
        inner: the inner loop; `inner.lr` maps each moving tensor to its step size.
        support: the batches to adapt on, (tasks, ...).
        query: the batches to measure on, (tasks, ...).
        noise: dropout seeds, (inner steps + 1, tasks), or None.
        lr_gradient: whether the step sizes are differentiated.
        side_by_side: whether every tensor, learned step sizes too, has a leading learner dimension.
        budget: the number of bytes that may be held for the backward pass; None sets no limit.

    Raises:
        TooLargeError: after the first inner step, if the activations of all steps would exceed the budget.
    """
    dim = int(side_by_side)
    num_tasks = tree_leaves(query)[0].shape[dim]
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in (moving | fixed).items()}
        rates: dict[str, float | Tensor] = dict(inner.lr)
        if lr_gradient:
            rates = {n: _scalar(r, moving[n]).detach().requires_grad_() for n, r in rates.items()}
        fixed = {name: leaves[name] for name in fixed}
        theta = {name: leaves[name] for name in moving}
        if inner.steps:  # every task has parameters of its own
            theta = {
                name: v.unsqueeze(dim).expand(*v.shape[:dim], num_tasks, *v.shape[dim:]) for name, v in theta.items()
            }
        losses = functools.partial(_losses, loss_fn, fixed, dim, bool(inner.steps))
        total: Any = 0
        for s in range(inner.steps):
            held = HeldBytes() if s == 0 and budget is not None else None
            with held or torch.enable_grad():
                loss = losses(theta, support, noise, s)
                gradient = _gradient(loss.sum(), theta, create_graph=not inner.first_order)
            if held is not None and budget is not None and held.total * inner.steps > budget:
                raise TooLargeError
            theta = {name: _stepped(value, gradient[name], rates[name], dim) for name, value in theta.items()}
            if inner.every_step:
                total = total + losses(theta, query, noise, inner.steps).sum(-1) / inner.steps
        if not (inner.every_step and inner.steps):
            total = losses(theta, query, noise, inner.steps).sum(-1)
        learned = {n: r for n, r in rates.items() if isinstance(r, Tensor) and r.requires_grad}
        found = _gradient(total.sum(), leaves | {f"rate of {n}": r for n, r in learned.items()})
    by_rate = {name: found.pop(f"rate of {name}") for name in learned}
    return total.detach(), found, by_rate


def _losses(
    loss_fn: LossFn, fixed: Params, dim: int, per_task: bool, theta: Params, batch: Any, noise: Tensor | None, s: int
) -> Tensor:
    """The loss of every task, ([learners,] tasks), with the dropout seeds of evaluation s."""

    def one_task(theta: Params, fixed: Params, batch: Any, *noise: Tensor) -> Tensor:
        return loss_fn({**fixed, **theta}, batch, *noise)

    extra = () if noise is None else (noise.select(dim, s),)
    function = vmap(one_task, in_dims=(0 if per_task else None, None, 0) + (0,) * len(extra))
    return (vmap(function) if dim else function)(theta, fixed, batch, *extra)


def _scalar(rate: float | Tensor, like: Tensor) -> Tensor:
    """A step size as a tensor."""
    return torch.as_tensor(rate, dtype=like.dtype, device=like.device)


def _stepped(value: Tensor, gradient: Tensor, rate: float | Tensor, dim: int) -> Tensor:
    """One gradient step, theta - D g(theta); learned step sizes of learners side by side are (learners,)."""
    if not isinstance(rate, Tensor):
        return torch.sub(value, gradient, alpha=rate)
    return value - rate.reshape(rate.shape + (1,) * (value.ndim - rate.ndim)) * gradient


def _gradient(total: Tensor, inputs: Mapping[str, Tensor], create_graph: bool = False) -> Params:
    """The gradient by name, zero for tensors that the total does not depend on."""
    if not total.requires_grad:
        return {name: torch.zeros_like(value) for name, value in inputs.items()}
    found: Sequence[Tensor] = torch.autograd.grad(
        total, list(inputs.values()), create_graph=create_graph, materialize_grads=True
    )
    return dict(zip(inputs, found, strict=True))


class HeldBytes(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes that are held for backward passes while it is active."""

    def __init__(self) -> None:
        self.total = 0
        self._storages: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is used twice
        super().__init__(self._pack, lambda tensor: tensor)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._storages.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage
            self.total += min(storage.nbytes(), tensor.nbytes)  # the tensor may be a small view, or expanded
        return tensor


def default_budget(device: torch.device) -> int:
    """The bytes that a meta-gradient may hold: a quarter of the memory of the device, free or not.

    It is the same in every call, so that the last bits of a result do not depend on other programs.
    """
    return memory_bytes(device) // 4
