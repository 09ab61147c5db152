"""Programs that the engine builds once per shape: fast gradients, and several updates in one."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.engine.compiled import CompiledGradient, check_curvature
from metaleader.engine.conv.gradient import ChainGradient
from metaleader.engine.conv.layout import Plan
from metaleader.engine.conv.torch_ops import TorchPasses
from metaleader.engine.conv.trace import Chain, find_chain
from metaleader.engine.dense.gradient import DenseGradient
from metaleader.engine.dense.trace import Perceptron, find_perceptron
from metaleader.engine.objective import Objective
from metaleader.engine.selfcheck import agrees
from metaleader.gradient.meta import Inner, meta_gradient
from metaleader.gradient.selection import Params
from metaleader.nets.functional import Network
from metaleader.system.text import short_text
from metaleader.tasks import Batch, ClassBatch

_log = logging.getLogger("metaleader")
# (params, support, query, noise) -> losses (learners,) and gradients by name; every tensor has a learner dimension
Gradient = Callable[..., tuple[Tensor, Params]]
# (flat, support, query, noise) -> losses and norms (2, learners) and flat gradients (learners, number of parameters)
FlatGradient = Callable[..., tuple[Tensor, Tensor]]
# The devices on which multilayer perceptrons have kernels of their own
_DENSE_DEVICES = ("cpu", "cuda")


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
            agree = chain is not None and agrees(network, batch, functools.partial(_chain_gradient, chain, size))
            self._chains[network] = chain if agree else None
        chain = self._chains[network]
        if chain is None:
            return None
        passes = TorchPasses(Plan(chain.layers, size), compiled and not weight.is_cuda)
        if weight.is_cuda and weight.dtype == torch.float32:
            with contextlib.suppress(ImportError):  # Triton comes with torch on Linux only
                from metaleader.engine.conv.triton import TritonPasses

                passes = TritonPasses(Plan(chain.layers, size, 16)) if TritonPasses.takes(chain.layers) else passes
        return ChainGradient(chain, objective, passes, compiled)


def _chain_gradient(
    chain: Chain, size: tuple[int, int], network: Network, inner: Inner, params: Params, sample: Batch | ClassBatch
) -> tuple[Tensor, Params]:
    """The loss and gradient of a sample by a chain."""
    one_learner = lambda tree: tree_map(lambda leaf: leaf[None], tree)  # noqa: E731
    passes = TorchPasses(Plan(chain.layers, size))
    program = ChainGradient(replace(chain, network=network), Objective(network, inner), passes, compiled=False)
    loss, gradient = program(one_learner(params), one_learner(sample), one_learner(sample))
    return loss[0], {name: value[0] for name, value in gradient.items()}


class Perceptrons:
    """The networks seen so far as multilayer perceptrons, where they are such networks."""

    def __init__(self) -> None:
        self._perceptrons: dict[Network, Perceptron | None] = {}

    def has_kernel(self, objective: Objective, rows: int) -> bool:
        """Whether an objective probably has a kernel, for batches of up to this number of rows; tried by `gradient`."""
        network, params = objective.network, objective.params()
        single = all(value.dtype == torch.float32 for value in params.values())
        if type(network) is not Network or objective.task_gradient is not None or network.num_classes or not single:
            return False
        found = find_perceptron(network)
        device = next(iter(params.values())).device
        return found is not None and DenseGradient.suits(found, objective, rows, device)

    def gradient(self, objective: Objective, flat: Tensor, support: Any, query: Any) -> FlatGradient | None:
        """The gradient of a multilayer perceptron by kernels of its own; None for other networks, losses and devices.

        Args:
            objective: the loss to differentiate.
            flat: the parameters, (learners, number of parameters).
            support: (learners, tasks, ...).
            query: (learners, tasks, ...).
        """
        network = objective.network
        if type(network) is not Network or flat.device.type not in _DENSE_DEVICES or flat.dtype != torch.float32:
            return None
        if network not in self._perceptrons:
            found = find_perceptron(network)
            batch = tree_map(lambda leaf: leaf[0], query)
            agree = found is not None and agrees(network, batch, functools.partial(_perceptron_gradient, found))
            self._perceptrons[network] = found if agree else None
        perceptron = self._perceptrons[network]
        if perceptron is None:
            return None
        if not DenseGradient.takes(perceptron, objective, support, query):
            return None
        program = DenseGradient(perceptron, objective, flat.device)
        try:
            program(flat, support, query, None)  # compiles the kernels
        except (OSError, RuntimeError) as error:  # of a compiler or the driver
            _log.warning("the kernels for multilayer perceptrons cannot be used: %s", short_text(error))
            return None
        return program


def _perceptron_gradient(
    perceptron: Perceptron, network: Network, inner: Inner, params: Params, sample: Batch | ClassBatch
) -> tuple[Tensor, Params]:
    """The loss and gradient of a sample by the layers of a multilayer perceptron."""

    def loss_fn(params: Params, batch: Batch | ClassBatch) -> Tensor:
        return network.mean_loss(perceptron.predict(params, network.preprocess(batch.x)), batch.y)

    return meta_gradient(loss_fn, params, sample, sample, inner.lr, inner.steps)


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
