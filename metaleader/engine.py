"""The engine room: how the gradient of an update is run: eagerly, compiled, or captured in a CUDA graph.

Whatever the mode, the gradient is that of `meta_gradient`, which the eager mode simply calls. The compiled modes use
one more fact: the adjoint step of the recursion is the vector-Jacobian product of the inner step,

    lambda_s = (d theta_{s+1} / d theta_s)^T lambda_{s+1},

so compiling the inner step together with its backward gives both; the activations that an inner step leaves behind are
its linearisation, kept until the adjoint step asks for it.

Learners of one shape run side by side: every tensor then has a leading replica dimension.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.inner import LossFn, Params, StepSize, inner_gradient, inner_step, scalar_loss, split, step_sizes
from metaleader.metagrad import meta_gradient

Mode = Literal["auto", "eager", "compiled", "captured"]
# (params, support, query, noise) -> loss, gradient
Gradient = Callable[[Params, Any, Any, Tensor | None], tuple[Tensor, Params]]

_log = logging.getLogger("metaleader")
# Below these numbers of planned updates, compiling takes longer than it saves.
_WORTH_COMPILING = {"cpu": 3000, "cuda": 300}


@dataclass(frozen=True, eq=False)
class Objective:
    """What an update minimises: the arguments of `meta_gradient` that stay the same from update to update."""

    loss_fn: LossFn
    inner_lr: StepSize = 0.1
    inner_steps: int = 0
    first_order: bool = False
    chunk: int | None = None
    only: str | None = None

    def gradient(self, params: Params, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        """Loss and gradient of one learner, eagerly."""
        return meta_gradient(
            self.loss_fn,
            params,
            support,
            query,
            self.inner_lr,
            self.inner_steps,
            self.first_order,
            self.chunk,
            only=self.only,
            noise=noise,
        )


class Engine:
    """Runs the gradients of one or more learners of one shape.

    Args:
        mode: "eager"; "compiled" with torch.compile; "captured", compiled and replayed as a CUDA graph; or "auto": the
            fastest that pays for the planned number of updates.
        planned_updates: what "auto" decides by.
        keep_linearisations: False computes each inner step's activations anew for its adjoint step: slower, but the
            memory of the compiled modes no longer grows with the number of inner steps.

    Attributes:
        mode: the mode in use; a network that does not compile falls back to "eager", with a message.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        planned_updates: int = 0,
        device: torch.device | str = "cpu",
        keep_linearisations: bool = True,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"engine must be one of {', '.join(get_args(Mode))}; got {mode!r}")
        kind = torch.device(device).type
        if mode == "captured" and kind != "cuda":
            raise ValueError(f"engine 'captured' needs a CUDA device, got {device}; use 'compiled'")
        if mode == "auto":
            pays = planned_updates >= _WORTH_COMPILING.get(kind, 10**9)
            mode = ("captured" if kind == "cuda" else "compiled") if pays else "eager"
        self.mode: Mode = mode
        self.keep_linearisations = keep_linearisations
        self._programs: dict[Any, Gradient] = {}

    def gradient(
        self, objective: Objective, params: Params, support: Any, query: Any, noise: Tensor | None
    ) -> tuple[Tensor, Params]:
        """Losses (replicas,) and gradients of all learners; every tensor has a leading replica dimension.

        Noise is (replicas, inner_steps + 1, tasks).
        """
        with convolutions_as_matmul():
            return self._gradient(objective, params, support, query, noise)

    def _gradient(
        self, objective: Objective, params: Params, support: Any, query: Any, noise: Tensor | None
    ) -> tuple[Tensor, Params]:
        if self.mode == "eager":
            return self._eager(objective, params, support, query, noise)
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in _tensors((params, support, query, noise)))
        key = (objective, shapes)
        if key not in self._programs:
            try:
                _check_curvature(objective, params, support, noise)
                program = _Compiled(objective, self.keep_linearisations)
                program(params, support, query, noise)
                self._programs[key] = _Captured(program) if self.mode == "captured" else program
            except Exception as error:
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                _log.warning("the network does not compile, going on eagerly: %s", reason)
                self.mode = "eager"
                return self._eager(objective, params, support, query, noise)
        return self._programs[key](params, support, query, noise)

    def _eager(
        self, objective: Objective, params: Params, support: Any, query: Any, noise: Tensor | None
    ) -> tuple[Tensor, Params]:
        if len(next(iter(params.values()))) == 1:
            first = lambda tree: tree_map(lambda leaf: leaf[0], tree)  # noqa: E731
            loss, gradient = objective.gradient(
                first(params), first(support), first(query), None if noise is None else noise[0]
            )
            return loss[None], {name: value[None] for name, value in gradient.items()}
        in_dims = (0, 0, 0, None if noise is None else 0)
        return vmap(objective.gradient, in_dims=in_dims)(params, support, query, noise)


class _Compiled:
    """The adjoint recursion over compiled pieces; every tensor has replicas in front, then tasks."""

    def __init__(self, objective: Objective, keep_linearisations: bool) -> None:
        self.objective = objective
        self.keep = keep_linearisations
        # The first step starts from parameters that all tasks share.
        self._first = _compile(functools.partial(self._step, shared=True))
        self._later = _compile(functools.partial(self._step, shared=False))
        self._query = _compile(functools.partial(self._query_gradient, shared=objective.inner_steps == 0))

    @torch.no_grad()
    def __call__(self, params: Params, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        with _compiling():
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
        moving, fixed = split(params, self.objective.only)
        path: list[tuple[Callable[..., Params], Params, Params | None, Tensor | None]] = []
        theta, step = moving, self._first
        for s in range(self.objective.inner_steps):
            at = None if noise is None else noise[:, s]
            before, after = self._run(step, theta, fixed, support, at)
            kept = after if self.keep and not self.objective.first_order else None
            path.append((step, before, kept, at))
            theta, step = {name: value.detach() for name, value in after.items()}, self._later
        at = None if noise is None else noise[:, self.objective.inner_steps]
        losses, lam, lam_fixed = self._query(theta, fixed, query, at)
        if self.objective.first_order:
            lam = {name: value.sum(1) if path else value for name, value in lam.items()}
            return losses, {name: (lam | lam_fixed)[name] for name in params}
        while path:
            step, before, after, at = path.pop()
            if after is None:
                before, after = self._run(step, before, fixed, support, at)
            inputs = [before[name] for name in moving] + [before[name] for name in fixed]
            found = torch.autograd.grad([after[n] for n in moving], inputs, [lam[n] for n in moving], allow_unused=True)
            lam = dict(zip(moving, found[: len(moving)], strict=True))
            for name, value in zip(fixed, found[len(moving) :], strict=True):
                lam_fixed[name] = lam_fixed[name] if value is None else lam_fixed[name] + value
        return losses, {name: (lam | lam_fixed)[name] for name in params}

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
        rates = step_sizes(self.objective.inner_lr, theta)

        def one(theta: Params, fixed: Params, support: Any, *noise: Tensor) -> Params:
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


class _Captured:
    """A compiled gradient as one CUDA graph: inputs are copied in, outputs copied out."""

    def __init__(self, program: _Compiled) -> None:
        self._program = program
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: tuple[Tensor, Params] | None = None

    def __call__(self, params: Params, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        if self._graph is None:
            self._capture(params, support, query, noise)
        for held, given in zip(self._inputs, _tensors((params, support, query, noise)), strict=True):
            held.copy_(given)
        assert self._graph is not None
        self._graph.replay()
        return tree_map(torch.clone, self._outputs)

    def _capture(self, params: Params, support: Any, query: Any, noise: Tensor | None) -> None:
        static = tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (params, support, query, noise)
        )
        self._inputs = _tensors(static)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._program(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outputs = self._program(*static)
        self._graph = graph


def _check_curvature(objective: Objective, params: Params, support: Any, noise: Tensor | None) -> None:
    """Refuse a network whose second derivative torch gets wrong when tasks are vmapped inside of it.

    The compiled modes differentiate the inner steps of many tasks, a gradient over vmap. There torch 2.13 holds the
    statistics of a norm with a scale constant (batch_norm, layer_norm, instance_norm). The eager mode vmaps the second
    derivative of one task, which is right; both are taken here of two tasks.
    """
    if objective.first_order or objective.inner_steps == 0:
        return
    params = {name: value[0].detach() for name, value in params.items()}
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


@contextlib.contextmanager
def convolutions_as_matmul() -> Iterator[None]:
    """Let convolutions use TF32 only where matrix products do: torch has it on for the ones and off for the others.

    TF32 puts errors of many per cent into a meta-gradient of five steps, so it is for those who ask for it
    (`torch.set_float32_matmul_precision("high")`).
    """
    if not torch.cuda.is_available():
        yield
        return
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """TF32 on or off, in matrix products and convolutions alike."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _count(tensor: Tensor) -> Tensor:
    return torch.arange(1, tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if leaf is not None]


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
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
