"""Bitwise comparison of trees of tensors and plain values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.learners import Learner


def clone(tree: Any) -> Any:
    """Return a tree with cloned tensors."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def snapshot(learner: Learner) -> dict[str, Any]:
    """Return a copy of a learner's state."""
    return clone(learner.state_dict())


def require_equal(expected: Any, actual: Any, message: str) -> None:
    """Raise an AssertionError with the message and the differing paths unless the trees are equal."""
    paths = differences(expected, actual)
    require(not paths, f"{message}, at {', '.join(paths[:5])}")


def require(condition: bool, message: str) -> None:
    """Raise an AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths at which two trees differ in any bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        unmatched = [f"{path}/{key}" for key in one.keys() ^ other.keys()]
        pairs = [(one[key], other[key], f"{path}/{key}") for key in one if key in other]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        unmatched, pairs = [], [(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        same = (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(bits(one), bits(other))
        return [] if same else [path]
    else:
        return [] if type(one) is type(other) and one == other else [path]
    return unmatched + [difference for pair in pairs for difference in differences(*pair)]


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
