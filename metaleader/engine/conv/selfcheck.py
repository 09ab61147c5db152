"""Whether a chain does what its network does: both are run once, in float64, before the chain is trusted.

Tracing shows what a forward did with a stand-in for a tensor. What it does under another context, with parameters that
it reads past torch, or in a backward of its own is not in the graph.
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
    """Compare loss and meta-gradient of one inner step, on a few rows of a task or two.

    Args:
        chain: what is not trusted yet.
        batch: datapoints, (tasks, rows, ...).
        size: (height, width) of the images as the network sees them.
    """
    network = _in_double(chain.network)
    few = batch._replace(x=_few(batch.x), y=_few(batch.y))
    if isinstance(few, ClassBatch):
        few = few._replace(classes=few.classes[:_TASKS])
    # Away from where scales are one and shifts zero.
    params = {name: value.double() + 0.1 * torch.cos(_count(value)) for name, value in network.params().items()}
    inner = Inner(0.1, 1)
    one = lambda tree: tree_map(lambda leaf: leaf[None], tree)  # noqa: E731
    try:
        loss, right = meta_gradient(network.loss_fn, params, few, few, inner.lr, inner.steps)
        doubled = dataclasses.replace(chain, network=network)
        own = ChainGradient(doubled, Objective(network, inner), TorchPasses(Plan(chain.layers, size)), compiled=False)
        found_loss, found = own(one(params), one(few), one(few))
    except Exception:  # a user's module or loss, in another dtype than its own
        return False
    error = torch.stack([(found[name][0] - value).norm() for name, value in right.items()]).max()
    length = torch.stack([value.norm() for value in right.values()]).max()
    return bool(error <= 1e-6 * length) and bool((found_loss[0] - loss).abs() <= 1e-6 * loss.abs())


def _in_double(network: Network) -> Network:
    copied, preprocess = copy.copy(network), network.preprocess
    copied.preprocess = lambda x: double(preprocess(x))
    return copied


def _few(tree: Tree) -> Tree:
    return double(tree_map(lambda leaf: leaf[:_TASKS, :_ROWS], tree))


def _count(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).view(tensor.shape)
