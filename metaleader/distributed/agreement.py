"""Comparison of settings, versions and data between processes, which must be equal for equal results."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metaleader.distributed.group import Group
from metaleader.tasks import Tree, tensors_of

# The bytes of a tensor that are compared; of longer ones a sample.
_SAMPLE = 2**18
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def agree(group: Group, facts: Mapping[str, Any], what: str) -> None:
    """Raise ValueError on all processes if a fact differs between them; the message names it and its values.

    Args:
        group: the processes; all must call.
        facts: values by name, in nested dicts; functions and objects are compared by name and type.
        what: for error messages.
    """
    if group.size == 1:
        return
    flat = json.loads(json.dumps(_flat(facts, "")))
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).digest()
    digests = group.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), what)
    if bool((digests == digests[0]).all()):
        return
    by_rank = group.exchange(flat, what)
    names = list(dict.fromkeys(name for values in by_rank for name in values))
    for name in names:
        values = [values.get(name, "missing") for values in by_rank]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise ValueError(
                f"the processes differ in {name} ({what}): it is {values[0]} on rank 0 and {values[other]} on rank"
                f" {other}; start all processes with the same command, versions and data"
            )


def digest_of(tree: Tree) -> str:
    """A digest of tensors: of shapes, dtypes and content; of large tensors, of a sample of evenly spaced rows."""
    digest = hashlib.sha256()
    for leaf in tensors_of(tree):
        digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        digest.update(_sample(leaf.detach()).tobytes())
    return digest.hexdigest()[:16]


def _sample(leaf: Tensor) -> np.ndarray:
    num = leaf.shape[0] if leaf.ndim else 1
    size = leaf.numel() * leaf.element_size()
    if size > _SAMPLE and num > 1:
        kept = max(2, num * _SAMPLE // size)
        leaf = leaf[torch.linspace(0, num - 1, kept, dtype=torch.float64).round().long().to(leaf.device)]
    return leaf.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _flat(value: Any, path: str) -> dict[str, Any]:
    """Plain values by path."""
    if isinstance(value, Mapping):
        return {
            k: v for name, item in value.items() for k, v in _flat(item, f"{path}.{name}" if path else name).items()
        }
    if callable(value):
        return {path: getattr(value, "__qualname__", type(value).__qualname__)}
    return {path: _ADDRESS.sub("", repr(value))}
