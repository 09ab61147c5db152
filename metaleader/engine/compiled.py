"""The gradient of any network that compiles: the adjoint recursion over pieces that went through torch.compile.

The adjoint step of the recursion is the vector-Jacobian product of the inner step,

    lambda_s = (d theta_{s+1} / d theta_s)^T lambda_{s+1},

so compiling the inner step together with its backward gives both; the activations that an inner step leaves behind are
its linearisation, kept until the adjoint step asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.engine.determinism import tf32
from metaleader.engine.objective import Objective, learned_rates, without_rates
from metaleader.gradient.inner import Params, inner_gradient, inner_step, scalar_loss, split, step_sizes
from metaleader.system.machine import cache_folder


class CompiledGradient:
    """The adjoint recursion over compiled pieces; every tensor has replicas in front, then tasks."""

    def __init__(self, objective: Objective, keep_linearisations: bool) -> None:
        self.objective = objective
        self.keep = keep_linearisations
        # The first step starts from parameters that all tasks share.
        self._first = compile_whole(functools.partial(self._step, shared=True))
        self._later = compile_whole(functools.partial(self._step, shared=False))
        self._query = compile_whole(functools.partial(self._query_gradient, shared=objective.inner_steps == 0))

    @torch.no_grad()
    def __call__(self, params: Params, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        """Losses (replicas,) and gradients."""
        with compiling():
            num_tasks = tree_leaves(query)[0].shape[1]
            chunk = self.objective.chunk or num_tasks
            total: tuple[Tensor, Params] | None = None
            for start in range(0, num_tasks, chunk):
                part = lambda leaf: leaf[:, start : start + chunk]  # noqa: B023, E731
                extra = None if noise is None else noise[:, :, start : start + chunk]
                sums = self._sums(params, tree_map(part, support), tree_map(part, query), extra)
                total = sums if total is None else tree_map(torch.add, total, sums)
            return tree_map(lambda value: value / num_tasks, total)

    def _sums(self, params: Params, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        moving, fixed = split(without_rates(params), self.objective.only)
        # Learned step sizes are parameters that do not move.
        fixed |= {name: value for name, value in params.items() if name not in moving | fixed}
        path: list[tuple[Callable[..., Params], Params, Params | None, Tensor | None]] = []
        theta, step = moving, self._first
        for s in range(self.objective.inner_steps):
            at = None if noise is None else noise[:, s]
            before, after = self._run(step, theta, fixed, support, at)
            kept = after if self.keep and not self.objective.first_order else None
            path.append((step, before, kept, at))
            theta, step = {name: value.detach() for name, value in after.items()}, self._later
        last = None if noise is None else noise[:, self.objective.inner_steps]
        found = self._query(theta, fixed, query, last)
        while path:
            step, before, after, at = path.pop()
            if not self.objective.first_order:
                found = self._adjoint(found, step, before, after, moving, fixed, support, at)
            if self.objective.every_step and path:
                own = {name: before[name].detach() for name in moving}
                found = tree_map(torch.add, found, self._query(own, fixed, query, last))
        losses, lam, lam_fixed = found
        if self.objective.first_order and self.objective.inner_steps:
            lam = {name: value.sum(1) for name, value in lam.items()}
        if self.objective.every_step and self.objective.inner_steps:
            losses, lam, lam_fixed = tree_map(
                lambda value: value / self.objective.inner_steps, (losses, lam, lam_fixed)
            )
        return losses, {name: (lam | lam_fixed)[name] for name in params}

    def _adjoint(
        self,
        found: tuple[Tensor, Params, Params],
        step: Callable[..., Params],
        before: Params,
        after: Params | None,
        moving: Params,
        fixed: Params,
        support: Any,
        noise: Tensor | None,
    ) -> tuple[Tensor, Params, Params]:
        """The adjoint step of an inner step, which is taken anew where its linearisation was not kept."""
        losses, lam, lam_fixed = found
        if after is None:
            before, after = self._run(step, before, fixed, support, noise)
        inputs = [before[name] for name in moving] + [before[name] for name in fixed]
        slopes = torch.autograd.grad([after[n] for n in moving], inputs, [lam[n] for n in moving], allow_unused=True)
        lam_fixed = dict(lam_fixed)
        for name, value in zip(fixed, slopes[len(moving) :], strict=True):
            lam_fixed[name] = lam_fixed[name] if value is None else lam_fixed[name] + value
        return losses, dict(zip(moving, slopes[: len(moving)], strict=True)), lam_fixed

    def _run(
        self, step: Callable[..., Params], theta: Params, fixed: Params, support: Any, noise: Tensor | None
    ) -> tuple[Params, Params]:
        """An inner step with its linearisation: the leaves it was taken from, and where it led."""
        before = {name: theta[name].detach() for name in theta} | {name: fixed[name].detach() for name in fixed}
        if not self.objective.first_order:
            before = {name: value.requires_grad_() for name, value in before.items()}
        with torch.set_grad_enabled(not self.objective.first_order):
            after = step({n: before[n] for n in theta}, {n: before[n] for n in fixed}, support, noise)
        return before, after

    def _step(self, theta: Params, fixed: Params, support: Any, noise: Tensor | None, shared: bool) -> Params:
        def one(theta: Params, fixed: Params, support: Any, *noise: Tensor) -> Params:
            rates = learned_rates(fixed) or step_sizes(self.objective.inner_lr, theta)
            return inner_step(self.objective.loss_fn, theta, fixed, rates, support, *noise)

        extra = () if noise is None else (noise,)
        over_tasks = vmap(one, in_dims=(None if shared else 0, None, 0) + (0,) * len(extra))
        return vmap(over_tasks)(theta, fixed, support, *extra)

    def _query_gradient(
        self, theta: Params, fixed: Params, query: Any, noise: Tensor | None, shared: bool
    ) -> tuple[Tensor, Params, Params]:
        """Sums over tasks of the losses and of the gradients of what tasks share; one gradient a task of what moved."""

        def total(theta: Params, fixed: Params, query: Any, *noise: Tensor) -> Tensor:
            one = lambda m, b, *n: scalar_loss(self.objective.loss_fn, {**fixed, **m}, b, *n)  # noqa: E731
            return vmap(one, in_dims=(None if shared else 0, 0) + (0,) * len(noise))(theta, query, *noise).sum()

        extra = () if noise is None else (noise,)
        (lam, lam_fixed), losses = vmap(grad_and_value(total, argnums=(0, 1)))(theta, fixed, query, *extra)
        return losses, lam, lam_fixed


def check_curvature(objective: Objective, params: Params, support: Any, noise: Tensor | None) -> None:
    """Refuse a network whose second derivative torch gets wrong when tasks are vmapped inside of it.

    The compiled modes differentiate the inner steps of many tasks, a gradient over vmap. There torch 2.13 holds the
    statistics of a norm with a scale constant (batch_norm, layer_norm, instance_norm). The eager mode vmaps the second
    derivative of one task, which is right; both are taken here of two tasks.
    """
    if objective.first_order or objective.inner_steps == 0:
        return
    params = {name: value[0].detach() for name, value in without_rates(params).items()}
    moving = split(params, objective.only)[0]
    support = tree_map(lambda leaf: leaf[0, :2], support)
    extra = () if noise is None else (noise[0, 0, :2],)

    def slope(params: Params, support: Any, *noise: Tensor) -> Tensor:
        held = {name: value for name, value in params.items() if name not in moving}
        gradient = inner_gradient(objective.loss_fn, {name: params[name] for name in moving}, held, support, *noise)
        # Along a direction in which every tensor, a small scale too, has its share.
        return torch.stack([(value.flatten() * torch.cos(_count(value))).mean() for value in gradient.values()]).sum()

    many = lambda function: vmap(function, in_dims=(None, 0) + (0,) * len(extra))  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH), tf32(False):
        right = tree_map(lambda value: value.sum(0), many(grad(slope))(params, support, *extra))
        found = grad(lambda *inputs: many(slope)(*inputs).sum())(params, support, *extra)
    size = float(torch.stack([value.norm() for value in right.values()]).max())
    error = float(torch.stack([(found[name] - right[name]).norm() for name in right]).max())
    # Rounding gives 2e-7, the flaw 1e-3 and more.
    if error > 1e-4 * size:
        raise ValueError(
            f"torch's second derivative of it is off by {error / size:.1g} when tasks are batched, as with norms that"
            " have a scale (layer_norm, instance_norm, batch_norm as functions)"
        )


def _count(tensor: Tensor) -> Tensor:
    return torch.arange(1, tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for fixed shapes, in one piece; what is compiled is kept in the project's cache.

    Left to itself, Inductor takes the time of several versions of a sum on the GPU and keeps the fastest, another one
    when the machine is busy, and so other last bits. It is told not to as an option of this function: as a setting
    of the whole program it holds for the first function only, since torch sets it back after every tracing.
    """
    # Where nothing is set, torch sets a folder among the temporary ones, sometimes before we come here.
    with contextlib.suppress(OSError, KeyError, ImportError):
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        if chosen is None or chosen == default_cache_dir():
            folder = cache_folder() / "compiled"
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return torch.compile(function, dynamic=False, fullgraph=True, options={"deterministic": True})


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Settings under which compiled pieces are called.

    Every learner and shape has its own compiled entry under one code object, so dynamo's limit of 8 is raised. What
    Inductor advises (TF32, another softmax) is not for the user, and must not stop a program whose warnings are errors.
    Fused attention has no second derivative; the plain one has.
    """
    import torch._dynamo.config  # takes a second, and eager programs do without it

    limits = torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=1024)
    with limits, sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
