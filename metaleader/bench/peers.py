"""The same gradient by other implementations: a loop over tasks, higher, torchopt."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from metaleader.bench.errors import distance
from metaleader.bench.work import Work
from metaleader.gradient.selection import Params
from metaleader.losses import Loss
from metaleader.nets.functional import scale_uint8
from metaleader.tasks import Batch


class PeerWork(Protocol):
    """What the gradients here read of a work; both kinds of work have it."""

    @property
    def model(self) -> Callable[[], nn.Module]:
        """Builds the network."""
        ...

    @property
    def loss(self) -> Loss:
        """The loss."""
        ...

    @property
    def inner_steps(self) -> int:
        """The number of inner steps."""
        ...

    @property
    def inner_lr(self) -> float:
        """The step size of the inner loop."""
        ...


def loop_gradient(work: PeerWork, params: Params, support: Batch, query: Batch) -> Params:
    """The meta-gradient as commonly written: torch's layers, one task at a time, autograd through all inner steps."""
    module = build_module(work, params)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for i in range(len(query.y)):
        adapted = dict(leaves)
        for _ in range(work.inner_steps):
            loss = _task_loss(work, functools.partial(functional_call, module, adapted), support, i)
            gradients = torch.autograd.grad(loss, list(adapted.values()), create_graph=True)
            adapted = {n: adapted[n] - work.inner_lr * g for n, g in zip(adapted, gradients, strict=True)}
        loss = _task_loss(work, functools.partial(functional_call, module, adapted), query, i)
        for name, value in zip(total, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            total[name] += value / len(query.y)
    return total


def find_peers(
    work: Work, params: Params, support: Batch, query: Batch, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """For each peer, its version and the distance of its gradient to the loop's, or the reason why it is skipped."""
    expected = loop_gradient(work, params, support, query)
    result: dict[str, dict[str, Any]] = {}
    for name in names:
        gradient = PEERS[name]
        try:
            importlib.import_module(name)
        except ImportError as error:
            result[name] = {"skipped": f"not installed ({error}); pip install 'metaleader[bench]'"}
            continue
        try:
            error_vs_loop = distance(gradient(work, params, support, query), expected)
        except Exception as error:
            result[name] = {"skipped": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
            continue
        result[name] = {"version": importlib.metadata.version(name), "distance_to_loop": error_vs_loop}
    return result


def higher_gradient(work: PeerWork, module: nn.Module, support: Batch, query: Batch) -> Params:
    """The meta-gradient at the parameters of a module by higher, which adapts one task at a time."""
    import higher  # pyright: ignore[reportMissingImports]

    module.zero_grad()
    optimizer = torch.optim.SGD(module.parameters(), lr=work.inner_lr)
    for i in range(len(query.y)):
        with higher.innerloop_ctx(module, optimizer, copy_initial_weights=False) as (net, steps):
            for _ in range(work.inner_steps):
                steps.step(_task_loss(work, net, support, i))
            (_task_loss(work, net, query, i) / len(query.y)).backward()
    return _gradients(dict(module.named_parameters()))


def torchopt_gradient(work: PeerWork, module: nn.Module, support: Batch, query: Batch) -> Params:
    """The meta-gradient at the parameters of a module by torchopt, which adapts one task at a time."""
    import torchopt  # pyright: ignore[reportMissingImports]

    module.zero_grad()
    initial = dict(module.named_parameters())
    optimizer = torchopt.MetaSGD(module, lr=work.inner_lr)
    net_state = torchopt.extract_state_dict(module, by="reference")
    optimizer_state = torchopt.extract_state_dict(optimizer, by="reference")
    for i in range(len(query.y)):
        for _ in range(work.inner_steps):
            optimizer.step(_task_loss(work, module, support, i))
        (_task_loss(work, module, query, i) / len(query.y)).backward()
        torchopt.recover_state_dict(module, net_state)
        torchopt.recover_state_dict(optimizer, optimizer_state)
    return _gradients(initial)


def _on_new_module(function: Callable[..., Params], work: Work, params: Params, *batches: Batch) -> Params:
    return function(work, build_module(work, params), *batches)


PEERS: dict[str, Callable[..., Params]] = {
    "higher": functools.partial(_on_new_module, higher_gradient),
    "torchopt": functools.partial(_on_new_module, torchopt_gradient),
}


def build_module(work: PeerWork, params: Params) -> nn.Module:
    """The network of a work with copies of the given parameters."""
    module = work.model()
    for name, value in module.named_parameters():
        value.data = params[name].detach().clone()
    return module


def _gradients(leaves: Mapping[str, Tensor]) -> Params:
    return {name: value.grad for name, value in leaves.items() if value.grad is not None}


def _task_loss(work: PeerWork, net: Callable[[Tensor], Tensor], batch: Batch, i: int) -> Tensor:
    return work.loss(net(scale_uint8(batch.x[i])), batch.y[i]).mean()
