"""The gradient of any network that compiles: the adjoint recursion over a function compiled by torch.compile.

The adjoint step needs the derivative of the inner gradients g at theta_s,

    lambda_s = lambda_{s+1} - H(theta_s) (D lambda_{s+1}),

so the compiled gradients of the tasks and their backward function are enough. The activations of g are its
linearisation, which is kept for its adjoint step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.engine.determinism import tf32
from metaleader.engine.kernels import bundled
from metaleader.engine.objective import LOG_LR, Objective, learned_rates, without_rates
from metaleader.gradient.adjoint import adjoint
from metaleader.gradient.attention import plain_attention
from metaleader.gradient.meta import inner_gradient, sum_over_chunks
from metaleader.gradient.selection import Params, split, step_sizes
from metaleader.system.machine import cache_folder


class CompiledGradient:
    """The meta-gradient by compiled functions; every tensor has leading learner and task dimensions.

    One function, the gradients of tasks that have parameters of their own, serves for all inner steps and for the query
    gradient, so torch compiles it and its backward function only.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._gradients = compile_whole(self._task_gradients)
        self._query = compile_whole(functools.partial(self._query_gradient, shared=objective.inner.steps == 0))

    @torch.no_grad()
    def __call__(self, params: Params, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        """Losses, (learners,), and gradients by name."""
        num_tasks = tree_leaves(query)[0].shape[1]
        sums = functools.partial(self._sums, params)
        with compiling():
            total = sum_over_chunks(
                sums, self.objective.inner.tasks_at_once or num_tasks, support, query, noise, task_dim=1
            )
            return tree_map(lambda value: value / num_tasks, total)

    def _sums(self, params: Params, support: Any, query: Any, noise: Tensor | None = None) -> tuple[Tensor, Params]:
        """Sums over tasks of the losses and the gradients."""
        inner = self.objective.inner
        num_tasks = tree_leaves(query)[0].shape[1]
        moving, fixed = split(without_rates(params), inner.only)
        learned = learned_rates(params)
        rates = learned or step_sizes(inner.lr, moving)
        same_shapes = [leaf.shape for leaf in tree_leaves(support)] == [leaf.shape for leaf in tree_leaves(query)]
        noise_at = lambda s: None if noise is None else noise[:, s]  # noqa: E731

        def gradients(theta: Params, batch: Any, s: int, linearise: bool) -> tuple[Params, Tensor, Params]:
            """The leaves of evaluation s, the losses and the gradients of all tasks, with the graph between them."""
            before = {name: value.detach() for name, value in (theta | fixed).items()}
            if linearise:
                before = {name: value.requires_grad_() for name, value in before.items()}
            with torch.set_grad_enabled(linearise):
                found = self._gradients(
                    {n: before[n] for n in theta}, {n: before[n] for n in fixed}, batch, noise_at(s)
                )
            return before, *found

        def step(s: int, theta: Params) -> tuple[Params, Any]:
            before, _, gradient = gradients(theta, support, s, not inner.first_order)
            after = stepped(theta, {name: value.detach() for name, value in gradient.items()}, rates)
            return after, None if inner.first_order else (before, gradient)

        def query_gradient(theta: Params) -> tuple[Tensor, Any]:
            zeros = {LOG_LR + name: torch.zeros_like(rate) for name, rate in learned.items()}
            if fixed or not inner.steps:
                losses, lam, lam_fixed = self._query(theta, fixed, query, noise_at(inner.steps))
                return losses, (lam, lam_fixed | zeros)
            # With a graph that is not used, the code compiled for the inner steps is used again.
            _, losses, lam = gradients(theta, query, inner.steps, same_shapes and not inner.first_order)
            return losses.detach().sum(1), ({name: value.detach() for name, value in lam.items()}, zeros)

        def pullback(s: int, theta: Params, saved: Any, after: Params, lambdas: Any) -> Any:
            lam, lam_fixed = lambdas
            if saved is None:
                before, _, gradient = gradients(theta, support, s, True)
            else:
                before, gradient = saved
            inputs = [before[name] for name in (*moving, *fixed)]
            # H is linear: one step size for all tensors is applied to the product, which saves writing D lambda.
            one_rate = _one_rate(rates)
            scaled = {n: v if one_rate else v * _wide(rates[n], v) for n, v in lam.items()}
            products = torch.autograd.grad(
                [gradient[n] for n in moving], inputs, [scaled[n] for n in moving], materialize_grads=True
            )
            by_name = dict(zip((*moving, *fixed), products, strict=True))
            by_name |= {LOG_LR + n: (gradient[n].detach() * scaled[n]).flatten(1).sum(1) for n in learned}
            alphas = dict.fromkeys(by_name, one_rate or 1.0)
            return stepped(lam, by_name, alphas), stepped(lam_fixed, by_name, alphas)

        theta = {name: value.unsqueeze(1) for name, value in moving.items()}
        theta = {name: value.expand(-1, num_tasks, *value.shape[2:]).contiguous() for name, value in theta.items()}
        back = None if inner.first_order else pullback
        losses, (lam, lam_fixed) = adjoint(
            theta if inner.steps else moving, inner.steps, step, query_gradient, back, inner.every_step
        )
        if inner.steps:
            lam = {name: value.sum(1) for name, value in lam.items()}
        return losses, {name: (lam | lam_fixed)[name] for name in params}

    def _task_gradients(self, theta: Params, fixed: Params, batch: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        """The loss of each task, (learners, tasks), and its gradient with respect to the parameters of the task."""

        def one_task(theta: Params, fixed: Params, batch: Any, *noise: Tensor) -> tuple[Params, Tensor]:
            return grad_and_value(lambda m: self.objective.network.loss_fn({**fixed, **m}, batch, *noise))(theta)

        extra = () if noise is None else (noise,)
        over_tasks = vmap(one_task, in_dims=(0, None, 0) + (0,) * len(extra))
        gradient, losses = vmap(over_tasks)(theta, fixed, batch, *extra)
        return losses, gradient

    def _query_gradient(
        self, theta: Params, fixed: Params, query: Any, noise: Tensor | None, shared: bool
    ) -> tuple[Tensor, Params, Params]:
        """Sums over tasks of the losses and of the gradients of shared parameters, and other gradients per task."""
        loss_fn = self.objective.network.loss_fn

        def total(theta: Params, fixed: Params, query: Any, *noise: Tensor) -> Tensor:
            one_task = lambda m, b, *n: loss_fn({**fixed, **m}, b, *n)  # noqa: E731
            return vmap(one_task, in_dims=(None if shared else 0, 0) + (0,) * len(noise))(theta, query, *noise).sum()

        extra = () if noise is None else (noise,)
        (lam, lam_fixed), losses = vmap(grad_and_value(total, argnums=(0, 1)))(theta, fixed, query, *extra)
        return losses, lam, lam_fixed


def stepped(theta: Params, gradient: Params, rates: Mapping[str, float | Tensor]) -> Params:
    """A gradient step of several learners, theta - D g(theta); learned step sizes are (learners,)."""
    one_rate = _one_rate(rates)
    if not theta or one_rate is None:
        return {name: value - _wide(rates[name], value) * gradient[name] for name, value in theta.items()}
    subtract = torch._foreach_sub  # pyright: ignore[reportPrivateImportUsage]
    values = subtract(list(theta.values()), [gradient[name] for name in theta], alpha=one_rate)
    return dict(zip(theta, values, strict=True))


def _one_rate(rates: Mapping[str, float | Tensor]) -> float | None:
    """The step size of all tensors, if it is one number and not 0."""
    first = next(iter(rates.values()), None)
    same = not isinstance(first, Tensor) and all(rate is first or rate == first for rate in rates.values())
    return first or None if same else None  # pyright: ignore[reportReturnType]


def _wide(rate: float | Tensor, like: Tensor) -> float | Tensor:
    """A step size that can be multiplied with tensors of several learners."""
    return rate.view(-1, *[1] * (like.ndim - 1)) if isinstance(rate, Tensor) else rate


def check_curvature(objective: Objective, params: Params, support: Any, noise: Tensor | None) -> None:
    """Reject a network whose second derivative is wrong for grad over vmap.

    The compiled inner steps of many tasks are differentiated: grad over vmap. There torch 2.13 holds the statistics of
    a norm with a scale constant (batch_norm, layer_norm, instance_norm).
    """
    error = curvature_error(objective, params, support, noise, by_autograd=False)
    # Rounding gives 2e-7, the wrong derivative 1e-3 and more.
    if error > 1e-4:
        raise ValueError(
            f"torch's second derivative of the network is wrong by {error:.1g} when tasks are batched, as with"
            " norms that have a scale (layer_norm, instance_norm, batch_norm as functions)"
        )


def curvature_error(
    objective: Objective, params: Params, support: Any, noise: Tensor | None, by_autograd: bool
) -> float:
    """The relative error of the second derivative of two tasks that are batched before they are differentiated.

    vmap of the second derivative of one task is right. It is compared with `torch.autograd` (`by_autograd`) or
    `torch.func.grad` over vmap. Without second derivatives, the error is 0. Arguments have a learner dimension.
    """
    if objective.inner.first_order or objective.inner.steps == 0:
        return 0.0
    params = {name: value[0].detach() for name, value in without_rates(params).items()}
    moving = split(params, objective.inner.only)[0]
    support = tree_map(lambda leaf: leaf[0, :2], support)
    extra = () if noise is None else (noise[0, 0, :2],)

    def slope(params: Params, support: Any, *noise: Tensor) -> Tensor:
        fixed = {name: value for name, value in params.items() if name not in moving}
        theta = {name: params[name] for name in moving}
        gradient = inner_gradient(objective.network.loss_fn, theta, fixed, support, *noise)
        # The direction gives every tensor, even a small scale, an equal weight.
        return torch.stack([(value.flatten() * torch.cos(_count(value))).mean() for value in gradient.values()]).sum()

    many = lambda function: vmap(function, in_dims=(None, 0) + (0,) * len(extra))  # noqa: E731
    with plain_attention(), tf32(False):
        right = tree_map(lambda value: value.sum(0), many(grad(slope))(params, support, *extra))
        if by_autograd:
            found = _slope_by_autograd(objective, params, moving, support, extra)
        else:
            found = grad(lambda *inputs: many(slope)(*inputs).sum())(params, support, *extra)
    size = float(torch.stack([value.norm() for value in right.values()]).max())
    error = float(torch.stack([(found[name] - right[name]).norm() for name in right]).max())
    return error / size if size > 0 else 0.0


def _slope_by_autograd(
    objective: Objective, params: Params, moving: Params, support: Any, extra: tuple[Tensor, ...]
) -> Params:
    """The derivative of `slope` in `curvature_error`, summed over tasks, as `gradient.unrolled` would take it."""
    num_tasks = tree_leaves(support)[0].shape[0]
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        theta = {name: leaves[name].expand(num_tasks, *leaves[name].shape) for name in moving}
        fixed = {name: value for name, value in leaves.items() if name not in moving}
        one_task = lambda m, b, *n: objective.network.loss_fn({**fixed, **m}, b, *n)  # noqa: E731
        losses = vmap(one_task)(theta, support, *extra)
        gradient = torch.autograd.grad(losses.sum(), list(theta.values()), create_graph=True, materialize_grads=True)
        slopes = [(v.reshape(len(v), -1) * torch.cos(_count(v[0]))).mean(1).sum() for v in gradient]
        total = torch.stack(slopes).sum()
        if not total.requires_grad:
            return {name: torch.zeros_like(value) for name, value in params.items()}
        found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def _count(tensor: Tensor) -> Tensor:
    return torch.arange(1, tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for fixed shapes, in one graph; compiled code is stored in the project's cache folder.

    By default Inductor times several versions of a sum on the GPU and keeps the fastest, so a busy machine changes the
    last bits. The `deterministic` option of each function prevents that. The global setting would hold for the first
    function only, since torch resets it after every tracing.
    """
    use_project_cache()
    return torch.compile(function, dynamic=False, fullgraph=True, options={"deterministic": True})


def use_project_cache() -> None:
    """Store compiled code in the project's cache folder, unless the user has chosen another one."""
    # If the variable is unset, torch sets it to a temporary folder, sometimes before this line runs.
    with contextlib.suppress(OSError, KeyError, ImportError):
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        if chosen is None or chosen == default_cache_dir():
            folder = cache_folder() / "compiled"
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Settings under which compiled functions are called.

    Every learner and shape has its own compiled entry under one code object, so dynamo's limit of 8 is raised.
    Inductor's advice (TF32, another softmax) is suppressed, since it would stop a program whose warnings are errors.
    Fused attention has no second derivative; the plain implementation has one.
    """
    import torch._dynamo.config  # takes a second, which eager programs save

    use_project_cache()
    limits = torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=1024, allow_rnn=True)
    with limits, plain_attention(), bundled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
