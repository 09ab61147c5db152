"""The gradient of an update of a chain: passes through the convolutions, and the head by torch between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.engine.compiled import compile_whole, compiling
from metaleader.engine.conv.head import Head
from metaleader.engine.conv.layout import Plan
from metaleader.engine.conv.trace import Chain
from metaleader.engine.objective import LOG_LR, Objective, learned_rates, without_rates
from metaleader.gradient.inner import Params
from metaleader.tasks import Batch, ClassBatch


class Passes(Protocol):
    """The four passes through the convolutions; `TorchPasses`, or `TritonPasses` on a GPU."""

    plan: Plan

    def forward(self, flat: Tensor, patches: Tensor) -> tuple[Tensor, Any]:
        """The last convolution's output, and what the other passes need."""
        ...

    def backward(self, flat: Tensor, saved: Any, slope: Tensor) -> Any:
        """The gradient with respect to the flat parameters, in parts that `whole` and `descend` add up."""
        ...

    def forward_tangent(self, flat: Tensor, saved: Any, v: Tensor) -> tuple[Tensor, Any]:
        """The tangent of `forward` in direction v of the parameters, and what `backward_tangent` needs of it."""
        ...

    def backward_tangent(self, flat: Tensor, saved: Any, v: Tensor, moved: Any, slope_dot: Tensor) -> Any:
        """The tangent of `backward`: the Hessian times v, in parts."""
        ...

    def whole(self, parts: Any) -> Tensor:
        """The sum of the parts, (tasks, total)."""
        ...

    def descend(self, base: Tensor, parts: Any, rates: Tensor | None) -> Tensor:
        """Subtract the sum of the parts, times step sizes if there are any."""
        ...


# The size of the largest tensor that a chain works with on the CPU.
_CPU_NUMBERS = 2**22


class ChainGradient:
    """The gradient of an update of a chain, for learners side by side; every tensor has replicas in front, then tasks.

    Args:
        chain: the network.
        objective: what the update minimises.
        passes: the passes through the convolutions.
        compiled: whether the head goes through torch.compile.
        keep: how many inner steps' passes are kept for their adjoint steps; with more inner steps, all are computed
            anew, and memory grows with the parameters only.
    """

    def __init__(self, chain: Chain, objective: Objective, passes: Passes, compiled: bool, keep: int = 5) -> None:
        self.chain, self.objective, self.passes, self.plan = chain, objective, passes, passes.plan
        self.keep = objective.inner_steps <= keep
        self.head = Head(chain, objective, self.plan.sizes[-1])
        # Whether the inner loop changes what the convolutions make of the images.
        self._body_moves = bool(self.head.moving - {*chain.head_names, *chain.silent})
        self._fixed_rates: _Rates | None = None
        self._compiled = compiled
        wrap = compile_whole if compiled else (lambda f: f)
        self._prepare, self._step = wrap(self._prepare_images), wrap(self.head.step)
        self._query, self._curve = wrap(self.head.gradient), wrap(self.head.curve)
        self._spread, self._collect = wrap(self._spread_params), wrap(self._collect_tasks)

    @torch.no_grad()
    def __call__(
        self, params: Params, support: Batch | ClassBatch, query: Batch | ClassBatch, noise: None = None
    ) -> tuple[Tensor, Params]:
        """Losses (replicas,) and gradients."""
        # Fused attention, in the head, has no second derivative; the plain one has.
        with compiling() if self._compiled else sdpa_kernel(SDPBackend.MATH):
            return self._mean(params, support, query)

    def _mean(self, params: Params, support: Batch | ClassBatch, query: Batch | ClassBatch) -> tuple[Tensor, Params]:
        replicas, num_tasks = tree_leaves(query)[0].shape[:2]
        chunk = self.objective.chunk or num_tasks
        if not tree_leaves(query)[0].is_cuda:
            # Tensors that a CPU's allocator keeps, instead of asking the system for their pages each time.
            images = max(tree_leaves(batch)[0].shape[2] for batch in (support, query))
            most = _CPU_NUMBERS // (replicas * images * self.plan.largest)
            chunk = min(chunk, max(1, most))
            if self._compiled:
                # A smaller rest would be compiled once more.
                even = max(size for size in range(1, chunk + 1) if num_tasks % size == 0)
                chunk = even if 2 * even > chunk else chunk
        total: tuple[Tensor, Params] | None = None
        for start in range(0, num_tasks, chunk):
            part = lambda leaf: leaf[:, start : start + chunk]  # noqa: B023, E731
            share = self._part(params, tree_map(part, support), tree_map(part, query), num_tasks)
            total = share if total is None else tree_map(torch.add, total, share)
        assert total is not None
        return total

    def _part(
        self, params: Params, support: Batch | ClassBatch, query: Batch | ClassBatch, num_tasks: int
    ) -> tuple[Tensor, Params]:
        """What some of the tasks add to the mean."""
        tasks = tree_leaves(query)[0].shape[1]
        support, query = tree_map(lambda leaf: leaf.flatten(0, 1), (support, query))
        flat, head = self._spread(params, tasks)
        path = self._way_through_all if self._body_moves or not self.objective.inner_steps else self._way_through_head
        counted = self.objective.inner_steps if self.objective.every_step else 0
        found = path(flat, head, self._rates(params, tasks), support, query)
        return self._collect(params, found, num_tasks * max(counted, 1))

    def _spread_params(self, params: Params, tasks: int) -> tuple[Tensor, Params]:
        """The convolutions' parameters, flat, and the head's, for each task of each replica."""
        # Copies: of one replica, an expanded tensor would stay a view, which kernels cannot read.
        spread = lambda value: value[:, None].expand(-1, tasks, *value.shape[1:]).contiguous().flatten(0, 1)  # noqa: E731
        return spread(self.plan.flatten(params)), {name: spread(params[name]) for name in self.chain.head_names}

    def _collect_tasks(self, params: Params, found: _Found, number: int) -> tuple[Tensor, Params]:
        """Sums over tasks, divided by the number of losses that they add up."""
        replicas = len(next(iter(params.values())))
        add = lambda value: value.unflatten(0, (replicas, -1)).sum(1) / number  # noqa: E731
        named = lambda flat, head: (  # noqa: E731
            self.plan.unflatten(add(flat))
            | {name: add(value) for name, value in head.items()}
            | {name: torch.zeros_like(params[name]) for name in self.chain.silent}
        )
        gradient = named(found.lam, found.lam_head)
        if self.objective.learn_lr:
            along = named(found.along, found.along_head)
            gradient |= {LOG_LR + name: value.reshape(len(value), -1).sum(1) for name, value in along.items()}
        return add(found.losses), {name: gradient[name].contiguous() for name in params}

    def _way_through_all(
        self, flat: Tensor, head: Params, rates: _Rates, support: Batch | ClassBatch, query: Batch | ClassBatch
    ) -> _Found:
        """Each task's loss, and its gradient with respect to the convolutions and the head."""
        path: list[_Step] = []
        patches = self._prepare(support.x) if self.objective.inner_steps else flat
        for _ in range(self.objective.inner_steps):
            before = flat, head
            flat, head, y, saved = self._inner_step(flat, head, patches, support[1:], rates)
            path.append(_Step(*before, y, saved) if self.keep else _Step(*before))
        asked = self._prepare(query.x)
        losses, lam, lam_head = self._at_query(flat, head, asked, query[1:])
        along, along_head = self._no_moves(lam, lam_head)
        while path:
            after = flat, head
            flat, head, y, saved = path.pop()
            if self.objective.learn_lr:
                along, along_head = tree_map(_add_product, (along, along_head), after, (flat, head), (lam, lam_head))
            if not self.objective.first_order:
                if saved is None or y is None:
                    _, _, y, saved = self._inner_step(flat, head, patches, support[1:], rates)
                v = lam * rates.flat
                y_dot, moved = self.passes.forward_tangent(flat, saved, v)
                slope_dot, lam_head = self._curve(y, head, support[1:], y_dot, lam_head, rates.head)
                parts = self.passes.backward_tangent(flat, saved, v, moved, slope_dot)
                lam = self.passes.descend(lam, parts, None)
            if self.objective.every_step and path:
                own = self._at_query(flat, head, asked, query[1:])
                losses, lam, lam_head = tree_map(torch.add, (losses, lam, lam_head), own)
        return _Found(losses, lam, lam_head, along, along_head)

    def _no_moves(self, flat: Tensor, head: Params) -> tuple[Tensor, Params]:
        """Where the products of moves and lambdas begin; nothing is made where step sizes are not learned."""
        if not self.objective.learn_lr:
            return flat, head
        return torch.zeros_like(flat), {name: torch.zeros_like(value) for name, value in head.items()}

    def _at_query(self, flat: Tensor, head: Params, patches: Tensor, target: Any) -> tuple[Tensor, Tensor, Params]:
        """Each task's query loss and its gradient, there and then."""
        y, saved = self.passes.forward(flat, patches)
        losses, slope, gradient = self._query(y, head, target)
        return losses, self.passes.whole(self.passes.backward(flat, saved, slope)), gradient

    def _way_through_head(
        self, flat: Tensor, head: Params, rates: _Rates, support: Batch | ClassBatch, query: Batch | ClassBatch
    ) -> _Found:
        """The same where only the head moves: the convolutions see each image once, whatever the number of steps.

        A slope at their output goes back through them linearly, so those of all adjoint steps go as their sum.
        """
        y, saved = self.passes.forward(flat, self._prepare(support.x))
        path: list[Params] = []
        for _ in range(self.objective.inner_steps):
            path.append(head)
            head = self._step(y, head, support[1:], rates.head)[1]
        asked, saved_asked = self.passes.forward(flat, self._prepare(query.x))
        losses, slope, lam_head = self._query(asked, head, query[1:])
        still, curved = torch.zeros_like(y), torch.zeros_like(y)
        along, along_head = self._no_moves(flat, lam_head)
        while path:
            after, head = head, path.pop()
            if self.objective.learn_lr:
                along_head = tree_map(_add_product, along_head, after, head, lam_head)
            if not self.objective.first_order:
                slope_dot, lam_head = self._curve(y, head, support[1:], still, lam_head, rates.head)
                curved += slope_dot
            if self.objective.every_step and path:
                own = self._query(asked, head, query[1:])
                losses, slope, lam_head = tree_map(torch.add, (losses, slope, lam_head), own)
        lam = self.passes.whole(self.passes.backward(flat, saved_asked, slope))
        if not self.objective.first_order:
            lam = self.passes.descend(lam, self.passes.backward(flat, saved, curved), None)
        return _Found(losses, lam, lam_head, along, along_head)

    @torch.no_grad()
    def adapted(self, params: Params, data: Batch | ClassBatch, steps: Sequence[int]) -> dict[int, Params]:
        """The parameters after each of these numbers of inner steps on data with replicas in front."""
        with sdpa_kernel(SDPBackend.MATH):
            return self._adapted(params, data, steps)

    def _adapted(self, params: Params, data: Batch | ClassBatch, steps: Sequence[int]) -> dict[int, Params]:
        flat = self.plan.flatten(params)
        head = {name: params[name] for name in self.chain.head_names}
        rates = self._rates(params)
        patches = self._prepare(data.x)
        still = {name: params[name] for name in self.chain.silent}
        seen = None if self._body_moves else self.passes.forward(flat, patches)[0]
        found: dict[int, Params] = {}
        for s in range(max(steps) + 1):
            if s in steps:
                found[s] = self.plan.unflatten(flat) | head | still
            if s < max(steps) and seen is not None:
                head = self._step(seen, head, data[1:], rates.head)[1]
            elif s < max(steps):
                flat, head, _, _ = self._inner_step(flat, head, patches, data[1:], rates)
        return found

    def _inner_step(
        self, flat: Tensor, head: Params, patches: Tensor, target: Any, rates: _Rates
    ) -> tuple[Tensor, Params, Tensor, Any]:
        """Parameters after an inner step, and what its passes left behind."""
        out, saved = self.passes.forward(flat, patches)
        slope, after = self._step(out, head, target, rates.head)
        parts = self.passes.backward(flat, saved, slope)
        return self.passes.descend(flat, parts, rates.flat), after, out, saved

    def _prepare_images(self, x: Tensor) -> Tensor:
        return self.plan.patches(vmap(self.chain.network.preprocess)(x))

    def _rates(self, params: Params, tasks: int = 1) -> _Rates:
        """The step sizes; tensors are looked at anew each time."""
        if self._fixed_rates is not None:
            return self._fixed_rates
        learned = {name: rate.repeat_interleave(tasks, 0) for name, rate in learned_rates(params).items()}
        rows = len(next(iter(learned.values()))) if learned else 1

        def of_tensor(name: str, value: Tensor) -> Tensor:
            rate = self.head.rate(name, learned)
            if isinstance(rate, Tensor):
                return rate.reshape(-1, *[1] * (value.ndim - 1)).expand(rows, *value.shape[1:])
            return value.new_full((rows, *value.shape[1:]), rate)

        own = without_rates(params)
        flat = self.plan.flatten({name: of_tensor(name, value) for name, value in own.items()})
        rates = _Rates(flat, {name: rate for name, rate in learned.items() if name in self.chain.head_names})
        if not any(isinstance(self.head.rate(name, learned), Tensor) for name in own):
            self._fixed_rates = rates
        return rates


class _Rates(NamedTuple):
    """Step sizes: of the flat parameters, (1 or tasks, total), and where they are learned, of the head's, (tasks,)."""

    flat: Tensor
    head: Params


class _Found(NamedTuple):
    """Of each task: the loss, its gradient, and, where step sizes are learned, the products of moves and lambdas.

    With a step size exp(l), the derivative with respect to l is the sum over inner steps of
    <theta_{s+1} - theta_s, lambda_{s+1}> over the tensor that it moves.
    """

    losses: Tensor
    lam: Tensor
    lam_head: Params
    along: Tensor
    along_head: Params


def _add_product(total: Tensor, after: Tensor, before: Tensor, lam: Tensor) -> Tensor:
    return total + (after - before) * lam


class _Step(NamedTuple):
    """Where an inner step was taken from, and what its passes left behind, if that is kept."""

    flat: Tensor
    head: Params
    y: Tensor | None = None
    saved: Any = None
