"""Compare programs with the network itself before they are used.

A traced network is run once in float64. Tracing records the operations of a forward on a proxy instead of a tensor. The
graph does not show context managers such as `no_grad`, parameters that are read without torch, or a custom backward.

A compiled gradient is compared with the eager one on single tasks: compilers make errors too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.gradient.meta import Inner, meta_gradient
from metaleader.gradient.selection import Params
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, ClassBatch, Tree, double, tensors_of

_TASKS, _ROWS = 2, 6
# A task agrees up to this relative distance. Where ReLUs have other signs by rounding, tasks differ by 1e-4 to 0.6, so
# several are tried until one agrees.
_AGREES, _TRIED_TASKS = 1e-3, 8
# Of a network in float64, inner steps, parameters, and the batch of several tasks that is support and query: the loss
# and the gradient by name
SampleGradient = Callable[[Network, Inner, Params, Batch | ClassBatch], tuple[Tensor, Params]]


@torch.no_grad()
def agrees(network: Network, batch: Batch | ClassBatch, gradient: SampleGradient) -> bool:
    """Whether a function gives the network's loss and meta-gradient of one inner step on a few rows of up to two tasks.

    Args:
        network: the network.
        batch: datapoints, (tasks, rows, ...).
        gradient: the function to check.

    Returns:
        False also if the network or its loss fails in float64.
    """
    network = _in_double(network)
    sample = batch._replace(x=_first_rows(batch.x), y=_first_rows(batch.y))
    if isinstance(sample, ClassBatch):
        sample = sample._replace(classes=sample.classes[:_TASKS])
    # Perturb the parameters, so that scales are not all one and shifts not all zero.
    params = {name: value.double() + 0.1 * torch.cos(_indices(value)) for name, value in network.params().items()}
    inner = Inner(0.1, 1)
    try:
        loss, expected = meta_gradient(network.loss_fn, params, sample, sample, inner.lr, inner.steps)
        traced_loss, traced = gradient(network, inner, params, sample)
    except Exception:  # a user's module or loss may not support float64
        return False
    error = torch.stack([(traced[name] - value).norm() for name, value in expected.items()]).max()
    length = torch.stack([value.norm() for value in expected.values()]).max()
    return bool(error <= 1e-6 * length) and bool((traced_loss - loss).abs() <= 1e-6 * loss.abs())


def _in_double(network: Network) -> Network:
    copied, preprocess = copy.copy(network), network.preprocess
    copied.preprocess = lambda x: double(preprocess(x))
    return copied


def _first_rows(tree: Tree) -> Tree:
    return double(tree_map(lambda leaf: leaf[:_TASKS, :_ROWS], tree))


def _indices(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).view(tensor.shape)


@torch.no_grad()
def check_compiled(
    compiled: Callable[..., tuple[Tensor, Tensor]],
    eager: Callable[..., tuple[Tensor, Tensor]],
    flat: Tensor,
    support: Any,
    query: Any,
) -> None:
    """Compare a compiled gradient with the eager one.

    Args:
        compiled: of (flat, support, query, noise), for the number of tasks of these batches.
        eager: likewise, for any number of tasks.
        flat: the parameters, (learners, number of parameters).
        support: (learners, tasks, ...).
        query: (learners, tasks, ...).

    Raises:
        RuntimeError: if the gradients of the first tasks all differ.
    """
    num_tasks, least = tensors_of(query)[0].shape[1], float("inf")
    for i in range(min(_TRIED_TASKS, num_tasks)):
        one = tree_map(lambda leaf: leaf if leaf is None else leaf[:, i : i + 1], (support, query))  # noqa: B023
        # The same task in every place: the mean gradient is that of the task. Copies have the strides of the batches.
        fill = lambda leaf: leaf if leaf is None else leaf.clone().copy_(leaf[:, i : i + 1].expand_as(leaf))  # noqa: B023, E731
        same = tree_map(fill, (support, query))
        expected = eager(flat, *one, None)[1]
        errors = torch.linalg.vector_norm(compiled(flat, *same, None)[1] - expected, dim=1)
        lengths = torch.linalg.vector_norm(expected, dim=1)
        if bool((errors <= _AGREES * lengths).any()) or not bool(torch.isfinite(expected).all()):
            return
        least = min(least, float((errors / lengths).min()))
    raise RuntimeError(f"the compiled gradient differs from the eager one by {least:.1g} of its length")
