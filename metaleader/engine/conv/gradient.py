"""The meta-gradient of a chain: passes through the convolutions, and torch's derivatives of the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.engine.compiled import compile_whole, compiling
from metaleader.engine.conv.layout import Plan
from metaleader.engine.conv.torch_ops import input_patches
from metaleader.engine.conv.trace import Chain
from metaleader.engine.objective import LOG_LR, Objective, learned_rates, without_rates
from metaleader.gradient.adjoint import adjoint
from metaleader.gradient.attention import plain_attention
from metaleader.gradient.meta import sum_over_chunks
from metaleader.gradient.selection import Params, moving_names
from metaleader.nets import calls
from metaleader.tasks import Batch, ClassBatch

# The size of the largest tensor that a chain works with on the CPU
_CPU_NUMBERS = 2**22


class Passes(Protocol):
    """The four passes through the convolutions; `TorchPasses`, or `TritonPasses` on a GPU."""

    plan: Plan

    def forward(self, flat: Tensor, patches: Tensor) -> tuple[Tensor, Any]:
        """The output of the last convolution, and the intermediate results for the other passes."""
        ...

    def backward(self, flat: Tensor, saved: Any, slope: Tensor) -> Any:
        """The gradient with respect to the flat parameters, as partial sums for `whole` and `descend`."""
        ...

    def forward_tangent(self, flat: Tensor, saved: Any, v: Tensor) -> tuple[Tensor, Any]:
        """The tangent of `forward` in direction v of the parameters, and the input of `backward_tangent`."""
        ...

    def backward_tangent(self, flat: Tensor, saved: Any, v: Tensor, moved: Any, slope_dot: Tensor) -> Any:
        """The tangent of `backward`: the Hessian times v, as partial sums."""
        ...

    def whole(self, parts: Any) -> Tensor:
        """The sum of the partial sums, (tasks, total)."""
        ...

    def descend(self, base: Tensor, parts: Any, rates: Tensor | None) -> Tensor:
        """Subtract the sum of the partial sums, multiplied by step sizes if given."""
        ...


class ChainGradient:
    """The meta-gradient of a chain, batched over learners; every tensor has leading learner and task dimensions.

    Args:
        chain: the network.
        objective: the loss to differentiate.
        passes: the passes through the convolutions.
        compiled: whether the head is compiled.
        keep: the largest number of inner steps whose intermediate results are kept for the adjoint steps; with more
            steps all are recomputed, and memory grows with the parameters only.
    """

    def __init__(self, chain: Chain, objective: Objective, passes: Passes, compiled: bool, keep: int = 5) -> None:
        self.chain, self.objective, self.passes, self.plan = chain, objective, passes, passes.plan
        self.keep = objective.inner.steps <= keep
        self.moving = moving_names(chain.names, objective.inner.only)
        self._head_names = chain.head_names
        # Whether the inner loop changes the output of the convolutions
        self._body_moves = bool(self.moving - {*self._head_names, *chain.silent})
        self._fixed_rates: _Rates | None = None
        self._compiled = compiled
        wrap = compile_whole if compiled else (lambda f: f)
        self._prepare, self._spread, self._collect = wrap(self._patches), wrap(self._per_task), wrap(self._mean)
        self._head_step, self._head_gradient = wrap(self._step_head), wrap(self._differentiate_head)
        self._head_adjoint = wrap(self._pull_back_head)

    @torch.no_grad()
    def __call__(
        self, params: Params, support: Batch | ClassBatch, query: Batch | ClassBatch, noise: None = None
    ) -> tuple[Tensor, Params]:
        """Losses, (learners,), and gradients by name."""
        learners, num_tasks = tree_leaves(query)[0].shape[:2]
        images = max(tree_leaves(batch)[0].shape[2] for batch in (support, query))
        chunk = self._chunk(num_tasks, learners * images, tree_leaves(query)[0].is_cuda)

        def share(support: Batch | ClassBatch, query: Batch | ClassBatch) -> tuple[Tensor, Params]:
            tasks = tree_leaves(query)[0].shape[1]
            support, query = tree_map(lambda leaf: leaf.flatten(0, 1), (support, query))
            flat, head = self._spread(params, tasks)
            through = self._through_all if self._body_moves or not self.objective.inner.steps else self._through_head
            return self._collect(params, through(flat, head, self._rates(params, tasks), support, query), num_tasks)

        # Fused attention, in the head, has no second derivative; the plain implementation has one.
        with compiling() if self._compiled else plain_attention():
            return sum_over_chunks(share, chunk, support, query, noise, task_dim=1)

    def _chunk(self, num_tasks: int, images: int, on_gpu: bool) -> int:
        """The number of tasks computed at a time."""
        chunk = self.objective.inner.tasks_at_once or num_tasks
        if on_gpu:
            return chunk
        # The CPU allocator keeps tensors of this size instead of returning their pages to the system.
        chunk = min(chunk, max(1, _CPU_NUMBERS // (images * self.plan.largest)))
        if not self._compiled:
            return chunk
        # A smaller last chunk would be compiled separately.
        divisor = max(size for size in range(1, chunk + 1) if num_tasks % size == 0)
        return divisor if 2 * divisor > chunk else chunk

    def _per_task(self, params: Params, tasks: int) -> tuple[Tensor, Params]:
        """The parameters of the convolutions, flat, and of the head, one copy for each task of each learner."""
        # For one learner an expanded tensor would remain a view, which kernels cannot read.
        spread = lambda value: value[:, None].expand(-1, tasks, *value.shape[1:]).contiguous().flatten(0, 1)  # noqa: E731
        return spread(self.plan.flatten(params)), {name: spread(params[name]) for name in self._head_names}

    def _mean(self, params: Params, result: _Result, num_tasks: int) -> tuple[Tensor, Params]:
        """The contribution of the computed tasks to the mean over `num_tasks` tasks."""
        learners = len(next(iter(params.values())))
        add = lambda value: value.unflatten(0, (learners, -1)).sum(1) / num_tasks  # noqa: E731
        named = lambda flat, head: (  # noqa: E731
            self.plan.unflatten(add(flat))
            | {name: add(value) for name, value in head.items()}
            | {name: torch.zeros_like(params[name]) for name in self.chain.silent}
        )
        gradient = named(result.lam, result.lam_head)
        if result.moves is not None:
            moves = named(result.moves, result.moves_head)
            gradient |= {LOG_LR + name: value.reshape(len(value), -1).sum(1) for name, value in moves.items()}
        return add(result.losses), {name: gradient[name].contiguous() for name in params}

    def _through_all(
        self, flat: Tensor, head: Params, rates: _Rates, support: Batch | ClassBatch, query: Batch | ClassBatch
    ) -> _Result:
        """Each task's loss, and its gradient with respect to the convolutions and the head."""
        inner, target = self.objective.inner, support[1:]
        patches = self._prepare(support.x) if inner.steps else flat
        query_patches = self._prepare(query.x)

        def step(s: int, theta: tuple[Tensor, Params]) -> tuple[tuple[Tensor, Params], Any]:
            flat, head, output, saved = self._inner_step(*theta, patches, target, rates)
            return (flat, head), (output, saved) if self.keep else None

        def query_gradient(theta: tuple[Tensor, Params]) -> tuple[Tensor, Any]:
            flat, head = theta
            output, saved = self.passes.forward(flat, query_patches)
            losses, slope, lam_head = self._head_gradient(output, head, query[1:])
            lam = self.passes.whole(self.passes.backward(flat, saved, slope))
            return losses, (lam, lam_head, *self._no_moves(flat, head))

        def pullback(s: int, theta: tuple[Tensor, Params], saved: Any, after: Any, lambdas: Any) -> Any:
            (flat, head), (lam, lam_head, moves, moves_head) = theta, lambdas
            if self.objective.learn_lr:
                moves, moves_head = tree_map(_add_product, (moves, moves_head), after, (flat, head), (lam, lam_head))
            output, saved = saved or self._inner_step(flat, head, patches, target, rates)[2:]
            v = lam * rates.flat
            output_dot, tangent = self.passes.forward_tangent(flat, saved, v)
            slope_dot, lam_head = self._head_adjoint(output, head, target, output_dot, lam_head, rates.head)
            partial = self.passes.backward_tangent(flat, saved, v, tangent, slope_dot)
            return self.passes.descend(lam, partial, None), lam_head, moves, moves_head

        back = None if inner.first_order else pullback
        losses, lambdas = adjoint((flat, head), inner.steps, step, query_gradient, back, inner.every_step)
        return _Result(losses, *lambdas)

    def _through_head(
        self, flat: Tensor, head: Params, rates: _Rates, support: Batch | ClassBatch, query: Batch | ClassBatch
    ) -> _Result:
        """The same where only the head moves: the convolutions see each image once, whatever the number of steps.

        The backward pass through the convolutions is linear in the slope at their output, so one pass of the sum of
        all slopes is enough.
        """
        inner, target = self.objective.inner, support[1:]
        output, saved = self.passes.forward(flat, self._prepare(support.x))
        query_output, query_saved = self.passes.forward(flat, self._prepare(query.x))
        zero_dot = torch.zeros_like(output)

        def step(s: int, head: Params) -> tuple[Params, None]:
            return self._head_step(output, head, target, rates.head)[1], None

        def query_gradient(head: Params) -> tuple[Tensor, Any]:
            losses, slope, lam_head = self._head_gradient(query_output, head, query[1:])
            return losses, (slope, lam_head, None, self._no_moves(flat, head)[1])

        def pullback(s: int, head: Params, saved: None, after: Params, lambdas: Any) -> Any:
            slope, lam_head, support_slope, moves_head = lambdas
            if self.objective.learn_lr:
                moves_head = tree_map(_add_product, moves_head, after, head, lam_head)
            slope_dot, lam_head = self._head_adjoint(output, head, target, zero_dot, lam_head, rates.head)
            return slope, lam_head, slope_dot if support_slope is None else support_slope + slope_dot, moves_head

        back = None if inner.first_order else pullback
        losses, lambdas = adjoint(head, inner.steps, step, query_gradient, back, inner.every_step)
        slope, lam_head, support_slope, moves_head = lambdas
        lam = self.passes.whole(self.passes.backward(flat, query_saved, slope))
        if support_slope is not None:
            lam = self.passes.descend(lam, self.passes.backward(flat, saved, support_slope), None)
        return _Result(losses, lam, lam_head, self._no_moves(flat, head)[0], moves_head)

    def _no_moves(self, flat: Tensor, head: Params) -> tuple[Tensor | None, Params]:
        """The initial sums of <theta_{s+1} - theta_s, lambda_{s+1}>; None where step sizes are not learned."""
        if not self.objective.learn_lr:
            return None, {}
        return torch.zeros_like(flat), {name: torch.zeros_like(value) for name, value in head.items()}

    @torch.no_grad()
    def adapted(self, params: Params, data: Batch | ClassBatch, steps: Sequence[int]) -> dict[int, Params]:
        """The parameters after each of these numbers of inner steps; every tensor has a leading learner dimension."""
        flat = self.plan.flatten(params)
        head = {name: params[name] for name in self._head_names}
        silent = {name: params[name] for name in self.chain.silent}
        rates, patches = self._rates(params), self._prepare(data.x)
        result: dict[int, Params] = {}
        with plain_attention():
            output = None if self._body_moves else self.passes.forward(flat, patches)[0]
            for s in range(max(steps) + 1):
                if s in steps:
                    result[s] = self.plan.unflatten(flat) | head | silent
                if s < max(steps) and output is not None:
                    head = self._head_step(output, head, data[1:], rates.head)[1]
                elif s < max(steps):
                    flat, head, _, _ = self._inner_step(flat, head, patches, data[1:], rates)
        return result

    def _inner_step(
        self, flat: Tensor, head: Params, patches: Tensor, target: Any, rates: _Rates
    ) -> tuple[Tensor, Params, Tensor, Any]:
        """Parameters after an inner step, the output of the convolutions, and their intermediate results."""
        output, saved = self.passes.forward(flat, patches)
        slope, head = self._head_step(output, head, target, rates.head)
        partial = self.passes.backward(flat, saved, slope)
        return self.passes.descend(flat, partial, rates.flat), head, output, saved

    def _patches(self, x: Tensor) -> Tensor:
        return input_patches(self.plan, vmap(self.chain.network.preprocess)(x))

    # The head, from the last batch norm on: derivatives of one task's loss, batched over tasks.

    def _head_loss(self, output: Tensor, head: Params, target: Any) -> Tensor:
        """The loss of one task, given the last convolution's output, (rows, filters).

        The target is the batch without its images: targets, and for a `ClassBatch` the classes of the task.
        """
        # Contiguous, as a convolution returns them: a user's `view` needs that.
        images = output.view(-1, *self.plan.sizes[-1], output.shape[-1]).permute(0, 3, 1, 2).contiguous()
        network = self.chain.network
        state = head | {f"{name}.classes": target[1] for name in network.task_logits if len(target) > 1}
        return network.mean_loss(calls.call(self.chain.head, state, images, network.own_code), target[0])

    def _differentiate_head(self, output: Tensor, head: Params, target: Any) -> tuple[Tensor, Tensor, Params]:
        """Each task's loss, and its gradient with respect to the last convolution's output and the head."""
        (slope, gradient), losses = vmap(grad_and_value(self._head_loss, argnums=(0, 1)))(output, head, target)
        return losses, slope, gradient

    def _step_head(self, output: Tensor, head: Params, target: Any, rates: Params) -> tuple[Tensor, Params]:
        """The slope at the output, and the head after an inner step."""

        def one_task(output: Tensor, head: Params, target: Any, rates: Params) -> tuple[Tensor, Params]:
            slope, gradient = grad(self._head_loss, argnums=(0, 1))(output, head, target)
            return slope, {name: value - self._rate(name, rates) * gradient[name] for name, value in head.items()}

        return vmap(one_task)(output, head, target, rates)

    def _pull_back_head(
        self, output: Tensor, head: Params, target: Any, output_dot: Tensor, lam: Params, rates: Params
    ) -> tuple[Tensor, Params]:
        """The tangent of the slope, and the adjoint step of the head: the gradient of <gradient, direction>."""

        def dot(output: Tensor, head: Params, target: Any, output_dot: Tensor, lam: Params, rates: Params) -> Tensor:
            slope, gradient = grad(self._head_loss, argnums=(0, 1))(output, head, target)
            products = [(gradient[n] * lam[n]).sum() * self._rate(n, rates) for n in gradient if n in self.moving]
            return torch.stack([(slope * output_dot).sum(), *products]).sum()

        slope_dot, change = vmap(grad(dot, argnums=(0, 1)))(output, head, target, output_dot, lam, rates)
        return slope_dot, {name: lam[name] - change[name] for name in lam}

    # Step sizes.

    def _rate(self, name: str, learned: Params) -> float | Tensor:
        """The step size of a parameter, from the learned ones if it is among them."""
        if name not in self.moving or name in learned:
            return learned[name] if name in self.moving else 0.0
        lr = self.objective.inner.lr
        rate = lr[name] if isinstance(lr, Mapping) else lr
        return rate.reshape(()) if isinstance(rate, Tensor) else rate

    def _rates(self, params: Params, tasks: int = 1) -> _Rates:
        """The step sizes; those that are tensors are read anew at each call."""
        if self._fixed_rates is not None:
            return self._fixed_rates
        learned = {name: rate.repeat_interleave(tasks, 0) for name, rate in learned_rates(params).items()}
        rows = len(next(iter(learned.values()))) if learned else 1

        def of_tensor(name: str, value: Tensor) -> Tensor:
            rate = self._rate(name, learned)
            if isinstance(rate, Tensor):
                return rate.reshape(-1, *[1] * (value.ndim - 1)).expand(rows, *value.shape[1:])
            return value.new_full((rows, *value.shape[1:]), rate)

        network_params = without_rates(params)
        flat = self.plan.flatten({name: of_tensor(name, value) for name, value in network_params.items()})
        rates = _Rates(flat, {name: rate for name, rate in learned.items() if name in self._head_names})
        if not any(isinstance(self._rate(name, learned), Tensor) for name in network_params):
            self._fixed_rates = rates
        return rates


class _Rates(NamedTuple):
    """Step sizes: of the flat parameters, (1 or tasks, total), and if they are learned, of the head, (tasks,) each."""

    flat: Tensor
    head: Params


class _Result(NamedTuple):
    """Of each task: the loss, its gradient, and if step sizes are learned, the products of moves and lambdas.

    With a step size exp(l), the derivative with respect to l is the sum over inner steps of
    <theta_{s+1} - theta_s, lambda_{s+1}> over the tensor that it moves.
    """

    losses: Tensor
    lam: Tensor
    lam_head: Params
    moves: Tensor | None
    moves_head: Params


def _add_product(total: Tensor, after: Tensor, before: Tensor, lam: Tensor) -> Tensor:
    return total + (after - before) * lam
