"""Trees of tensors and plain values, compared bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.learners import Learner


def copied(tree: Any) -> Any:
    """The tree with tensors of its own."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def snapshot(learner: Learner) -> dict[str, Any]:
    """A learner's state, which no later call changes."""
    return copied(learner.state_dict())


def require_equal(expected: Any, found: Any, message: str) -> None:
    """Raise an AssertionError with the message, and where, unless the trees are the same."""
    different = differences(expected, found)
    require(not different, f"{message}, at {', '.join(different[:5])}")


def require(condition: bool, message: str) -> None:
    """Raise an AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two trees differ in any bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        lone = [f"{path}/{key}" for key in one.keys() ^ other.keys()]
        pairs = [(one[key], other[key], f"{path}/{key}") for key in one if key in other]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        lone, pairs = [], [(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        same = (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(bits(one), bits(other))
        return [] if same else [path]
    else:
        return [] if type(one) is type(other) and one == other else [path]
    return lone + [found for pair in pairs for found in differences(*pair)]


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes, on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
