"""Programs that the engine builds once per shape: fast gradients, and several updates in one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.engine.compiled import CompiledGradient, check_curvature
from metaleader.engine.conv.gradient import ChainGradient
from metaleader.engine.conv.layout import Plan
from metaleader.engine.conv.selfcheck import agrees
from metaleader.engine.conv.torch_ops import TorchPasses
from metaleader.engine.conv.trace import Chain, find_chain
from metaleader.engine.objective import Objective
from metaleader.gradient.selection import Params
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, ClassBatch

# (params, support, query, noise) -> losses (learners,) and gradients by name; every tensor has a learner dimension
Gradient = Callable[..., tuple[Tensor, Params]]


class Chains:
    """The networks seen so far as chains of convolutions, where they are such chains."""

    def __init__(self) -> None:
        self._chains: dict[Network, Chain | None] = {}

    def gradient(
        self, objective: Objective, weight: Tensor, batch: Batch | ClassBatch, compiled: bool
    ) -> ChainGradient | None:
        """The gradient of a network that is a chain; None for other networks.

        Args:
            objective: the loss to differentiate.
            weight: any parameter, for its device and dtype.
            batch: datapoints, (tasks, rows, ...).
            compiled: whether the parts in torch operations are compiled.
        """
        network = objective.network
        if type(network) is not Network:
            return None  # a subclass may have another loss
        size = _image_size(network, tree_map(lambda leaf: leaf[0], batch.x))
        if size is None:
            return None
        if network not in self._chains:
            chain = find_chain(network)
            self._chains[network] = chain if chain is not None and agrees(chain, batch, size) else None
        chain = self._chains[network]
        if chain is None:
            return None
        passes = TorchPasses(Plan(chain.layers, size), compiled and not weight.is_cuda)
        if weight.is_cuda and weight.dtype == torch.float32:
            with contextlib.suppress(ImportError):  # Triton comes with torch on Linux only
                from metaleader.engine.conv.triton import TritonPasses

                passes = TritonPasses(Plan(chain.layers, size, 16)) if TritonPasses.takes(chain.layers) else passes
        return ChainGradient(chain, objective, passes, compiled)


def compiled_gradient(objective: Objective, flat: Tensor, support: Any, noise: Tensor | None) -> Gradient:
    """The gradient of a network by torch.compile, if its second derivative is right there."""
    check_curvature(objective, objective.layout.named(flat), support, noise)
    return CompiledGradient(objective)


class OuterStep(Protocol):
    """An optimiser that changes tensors in place, the flat parameters among them."""

    flat: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a step changes."""
        ...

    def step(self, gradients: Tensor, norms: Tensor, lr: Tensor) -> None:
        """Take one step down gradients of known norms."""
        ...


class Updates:
    """Several updates, one after the other, the optimiser's steps included."""

    def __init__(
        self, gradient: Callable[..., tuple[Tensor, Tensor]], make: Callable[[dict[str, Tensor]], OuterStep]
    ) -> None:
        self._gradient, self._make = gradient, make

    def __call__(
        self, tensors: dict[str, Tensor], lrs: Tensor, support: Any, query: Any, noise: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The tensors after the updates, and the losses and gradient norms of each, (updates, 2, learners)."""
        outer = self._make({name: value.clone() for name, value in tensors.items()})
        watched = []
        for i, lr in enumerate(lrs.unbind()):
            batches = tree_map(lambda leaf: leaf if leaf is None else leaf[i], (support, query, noise))  # noqa: B023
            losses_and_norms, gradients = self._gradient(outer.flat, *batches)
            outer.step(gradients, losses_and_norms[1], lr)
            watched.append(losses_and_norms)
        return outer.tensors, torch.stack(watched)


def _image_size(network: Network, x: Any) -> tuple[int, int] | None:
    """The height and width of one task's images after preprocessing; None for other inputs."""
    images = network.preprocess(x)
    return (images.shape[2], images.shape[3]) if isinstance(images, Tensor) and images.ndim == 4 else None
