"""Sums over shards in a fixed order: the same bits for every number of processes.

Shards lo .. hi-1 are added as the sum of the first half and the sum of the second, and so are the halves. With a power
of two of processes, the shards of a process are one branch of this tree: it adds them itself, and sends one number
instead of many. Products come before the sums, so that no sum is fused with a product, which rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metaleader.distributed.group import Group

# From so many bytes to receive on, processes add slices of the sum and exchange these: two messages instead of one, and
# fewer bytes.
_SLICES_FROM = 2**20


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors in the order of the tree."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return tree_sum(parts[:middle]) + tree_sum(parts[middle:])


def sum_over_shards(group: Group, parts: Sequence[Tensor], what: str, slices_from: int = _SLICES_FROM) -> Tensor:
    """The sum over the shards of all processes.

    Args:
        group: the processes, each with equally many shards.
        parts: one tensor for each shard of this process, of one shape.
        what: for error messages.
        slices_from: the number of bytes to receive from which on the processes add slices of the sum.
    """
    if group.size == 1:
        return tree_sum(parts)
    is_branch = group.size & (group.size - 1) == 0
    sent = tree_sum(parts)[None] if is_branch else torch.stack(list(parts))
    if sent.numel() * sent.element_size() * group.size < slices_from:
        return tree_sum(group.gather(sent, what).flatten(0, 1).unbind())
    flat = sent.flatten(1)
    width = -(-flat.shape[1] // group.size)
    padded = flat.new_zeros(len(flat), group.size * width)
    padded[:, : flat.shape[1]] = flat
    # (processes, shards of each, width): the slice of this process, of all shards in their order.
    received = group.transpose(padded.view(len(flat), group.size, width).transpose(0, 1), what)
    total = tree_sum(received.flatten(0, 1).unbind())
    return group.gather(total, what).flatten()[: flat.shape[1]].view(sent.shape[1:])
