"""Labels and ids of the images of n-way tasks, checked."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metaleader.memory.images import UNNAMED, Images


def checked_labels(y: Any, ways: Sequence[int]) -> list[int]:
    """The local labels of a batch of a task with these classes."""
    if not ways:
        raise ValueError("observe before begin: call begin(name, classes=[...]) to open a task first")
    if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point() or y.dtype == torch.bool:
        raise ValueError("observe: the labels of an n-way task must be one integer per datapoint")
    labels = y.tolist()
    wrong = [label for label in labels if not 0 <= label < len(ways)]
    if wrong:
        raise ValueError(
            f"observe: label {wrong[0]} is not in 0..{len(ways) - 1}; labels are positions in the task's"
            f" classes {list(ways)}"
        )
    return labels


def checked_ids(
    ids: Sequence[int] | Tensor | None, labels: list[int], ways: Sequence[int], images: Images
) -> list[int]:
    """The ids of a batch of a task, or `UNNAMED`; rejects an id that images of another class have."""
    if ids is None:
        return [UNNAMED] * len(labels)
    names = integers_of(ids, "observe: ids")
    if len(names) != len(labels):
        raise ValueError(f"observe: {len(names)} ids for {len(labels)} datapoints; pass one id per datapoint")
    class_of: dict[int, int] = {}
    for name, label in zip(names, labels, strict=True):
        if name < 0:
            raise ValueError(f"observe: ids must not be negative, got {name}")
        position = images.position_of.get(name)
        known = None if position is None else images.classes[position]
        stored_class = class_of.setdefault(name, ways[label]) if known is None else known
        if stored_class != ways[label]:
            raise ValueError(
                f"observe: id {name} is of class {stored_class}, and is now said to be of class {ways[label]}"
            )
    return names


def integers_of(values: Any, where: str) -> list[int]:
    """A list of integers; `where` begins error messages."""
    array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype == np.uint64 and (array >= 2**63).any()):
        raise ValueError(f"{where} must be a list of integers, got {reprlib.repr(values)}")
    return array.tolist()
