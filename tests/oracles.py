"""Slow, obvious counterparts of the kernel, written without it: plain autograd, one task at a time."""

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.engine.engine import Engine
from metaleader.engine.objective import LOG_LR, Objective, learned_rates, without_rates
from metaleader.gradient.meta import meta_gradient
from metaleader.nets.layers import SeededDropout
from metaleader.tasks import rng

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
Rates = float | Mapping[str, float]


def normal(purpose: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that depend on the purpose and the shape alone."""
    return torch.from_numpy(rng(purpose, *shape).standard_normal(shape)).to(dtype)


def labels(purpose: str, classes: int, *shape: int) -> Tensor:
    return torch.from_numpy(rng(purpose, *shape).integers(classes, size=shape))


def unrolled(
    loss_fn: Callable[..., Tensor],
    params: Mapping[str, Tensor],
    support: Any,
    query: Any,
    lr: Rates,
    steps: int,
    moving: Iterable[str] | None = None,
    noise: Tensor | None = None,
    every_step: bool = False,
) -> tuple[Tensor, dict[str, Tensor], Any]:
    """The mean query loss, its gradient and that of the step sizes, by differentiating through every step."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    names = list(params if moving is None else moving)
    given = lr if isinstance(lr, Mapping) else {"": lr}
    rates = {name: torch.tensor(rate, dtype=torch.float64, requires_grad=True) for name, rate in given.items()}
    num_tasks = tree_leaves(query)[0].shape[0]
    losses = []
    with sdpa_kernel(SDPBackend.MATH):
        for i in range(num_tasks):
            extra = (lambda s, i=i: ()) if noise is None else (lambda s, i=i: (noise[s, i],))
            own_support, own_query = tree_map(lambda leaf, i=i: leaf[i], (support, query))
            adapted = dict(leaves)
            for s in range(steps):
                loss = loss_fn(adapted, own_support, *extra(s))
                gradients = torch.autograd.grad(loss, [adapted[name] for name in names], create_graph=True)
                for name, gradient in zip(names, gradients, strict=True):
                    adapted[name] = adapted[name] - rates[name if name in rates else ""] * gradient
                if every_step:
                    losses.append(loss_fn(adapted, own_query, *extra(steps)))
            if not every_step:
                losses.append(loss_fn(adapted, own_query, *extra(steps)))
        loss = torch.stack(losses).mean()
        found = torch.autograd.grad(loss, [*leaves.values(), *rates.values()], materialize_grads=True)
    gradient = dict(zip(leaves, found, strict=False))
    rate_gradient = dict(zip(rates, found[len(leaves) :], strict=True))
    return loss.detach(), gradient, rate_gradient if isinstance(lr, Mapping) else rate_gradient[""]


def module_loss(module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A scalar loss of (params, batch[, noise]) from torch's own layers, dropout replaying a learner's masks.

    The masks inside of attention are applied in place of torch's, whose functions are replaced during the call.
    """
    module = copy.deepcopy(module).train()
    masks: list[SeededDropout] = []
    attending: list[SeededDropout] = []
    for part in module.modules():
        if isinstance(part, _DROPOUT):
            masks.append(SeededDropout(part.p, not isinstance(part, nn.Dropout)))
            part.forward = lambda input, mask=masks[-1]: input * mask(torch.ones_like(input))
        elif isinstance(part, nn.MultiheadAttention) and part.dropout > 0:
            masks.append(SeededDropout(part.dropout, False))
            part.register_forward_pre_hook(lambda *_, mask=masks[-1]: attending.append(mask))

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, is_causal: bool) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if is_causal:
            mask = torch.zeros(scores.shape[-2:]).masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -math.inf)
        return attending[-1](torch.softmax(scores if mask is None else scores + mask, -1)) @ v

    def loss_fn(params: Mapping[str, Tensor], batch: Any, noise: Tensor | None = None) -> Tensor:
        for i, mask in enumerate(masks):
            mask.train(noise is not None)
            mask.num_calls = 0
            if noise is not None:
                mask.seed = noise + i
        with contextlib.ExitStack() as stack:
            if any(isinstance(part, nn.MultiheadAttention) and part.dropout > 0 for part in module.modules()):
                stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
                stack.enter_context(mock.patch.object(F, "dropout", lambda x, p: attending[-1](x)))
            return loss(functional_call(module, dict(params), (batch[0],)), batch[1])

    return loss_fn


def assert_close(actual: Any, expected: Any, relative: float = 1e-10) -> None:
    """Compare trees of tensors, each in norm; a tensor that is tiny beside the whole is measured against the whole."""
    flat, flat_expected = tree_leaves(actual), tree_leaves(expected)
    whole = torch.stack([torch.linalg.vector_norm(leaf.double()) for leaf in flat_expected]).norm()
    assert torch.isfinite(whole)
    assert whole > 0
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected)
    for leaf, leaf_expected in zip(flat, flat_expected, strict=True):
        assert leaf.shape == leaf_expected.shape
        size = torch.linalg.vector_norm(leaf_expected.double()).clamp(min=1e-3 * whole)
        error = torch.linalg.vector_norm(leaf.double() - leaf_expected.double()) / size
        assert error <= relative, f"relative error {error:.2e}"


class PeakMemory(TorchDispatchMode):
    """Count the bytes of the tensors alive at a time; what was there before does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in inputs:
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def free() -> None:
            self.live -= size
            del self._seen[key]

        self._seen[key] = weakref.finalize(storage, free)
        self.live += size
        self.peak = max(self.peak, self.live)


def engine_gradient(engine: Engine, objective: Objective, params: Any, support: Any, query: Any) -> tuple[Tensor, Any]:
    """Losses, (learners,), and gradients by name, as an engine computes them."""
    layout = objective.layout
    losses_and_norms, gradients = engine.gradient(objective, layout.flat(params), support, query, None)
    return losses_and_norms[0], layout.named(gradients)


def objective_gradient(objective: Objective, params: Any, support: Any, query: Any) -> tuple[Tensor, Any]:
    """Loss and gradient of one learner by `meta_gradient`, learned step sizes included."""
    inner, rates = objective.inner, learned_rates(params)
    loss, gradient, *by_rate = meta_gradient(
        objective.network.loss_fn,
        without_rates(params),
        support,
        query,
        rates or inner.lr,
        inner.steps,
        inner.first_order,
        only=inner.only,
        every_step=inner.every_step,
        lr_gradient=bool(rates),
    )
    return loss, gradient | {LOG_LR + name: by_rate[0][name] * rate for name, rate in rates.items()}
