"""Compare a chain with its network: both are run once in float64 before the chain is used.

Tracing records the operations of a forward on a proxy instead of a tensor. The graph does not show context managers
such as `no_grad`, parameters that are read without torch, or a custom backward.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.engine.conv.gradient import ChainGradient
from metaleader.engine.conv.layout import Plan
from metaleader.engine.conv.torch_ops import TorchPasses
from metaleader.engine.conv.trace import Chain
from metaleader.engine.objective import Objective
from metaleader.gradient.meta import Inner, meta_gradient
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, ClassBatch, Tree, double

_TASKS, _ROWS = 2, 6


@torch.no_grad()
def agrees(chain: Chain, batch: Batch | ClassBatch, size: tuple[int, int]) -> bool:
    """Whether a chain gives the network's loss and meta-gradient of one inner step on a few rows of up to two tasks.

    Args:
        chain: the chain to check.
        batch: datapoints, (tasks, rows, ...).
        size: (height, width) of the images after preprocessing.

    Returns:
        False also if the network or its loss fails in float64.
    """
    network = _in_double(chain.network)
    sample = batch._replace(x=_first_rows(batch.x), y=_first_rows(batch.y))
    if isinstance(sample, ClassBatch):
        sample = sample._replace(classes=sample.classes[:_TASKS])
    # Perturb the parameters, so that scales are not all one and shifts not all zero.
    params = {name: value.double() + 0.1 * torch.cos(_indices(value)) for name, value in network.params().items()}
    inner = Inner(0.1, 1)
    one_learner = lambda tree: tree_map(lambda leaf: leaf[None], tree)  # noqa: E731
    try:
        loss, expected = meta_gradient(network.loss_fn, params, sample, sample, inner.lr, inner.steps)
        doubled = dataclasses.replace(chain, network=network)
        passes = TorchPasses(Plan(chain.layers, size))
        program = ChainGradient(doubled, Objective(network, inner), passes, compiled=False)
        chain_loss, gradient = program(one_learner(params), one_learner(sample), one_learner(sample))
    except Exception:  # a user's module or loss may not support float64
        return False
    error = torch.stack([(gradient[name][0] - value).norm() for name, value in expected.items()]).max()
    length = torch.stack([value.norm() for value in expected.values()]).max()
    return bool(error <= 1e-6 * length) and bool((chain_loss[0] - loss).abs() <= 1e-6 * loss.abs())


def _in_double(network: Network) -> Network:
    copied, preprocess = copy.copy(network), network.preprocess
    copied.preprocess = lambda x: double(preprocess(x))
    return copied


def _first_rows(tree: Tree) -> Tree:
    return double(tree_map(lambda leaf: leaf[:_TASKS, :_ROWS], tree))


def _indices(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).view(tensor.shape)
