"""Parameters as one tensor: what an optimiser moves in one launch, and a graph takes in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Form:
    """Names and shapes of parameters, and so the place of each in a flat tensor.

    >>> form = Form({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
    >>> form.named(torch.arange(6.0))["bias"]
    tensor([4., 5.])
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._shapes = {name: value.shape for name, value in params.items()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor, (..., number of parameters), by name."""
        named = zip(self._shapes.items(), flat.split(self._sizes, -1), strict=True)
        return {name: part.view(flat.shape[:-1] + shape) for (name, shape), part in named}

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `named`, as a new tensor."""
        leading = next(iter(named.values())).ndim - len(next(iter(self._shapes.values())))
        parts = (named[name] for name in self._shapes)
        return torch.cat([part.reshape(*part.shape[:leading], -1) for part in parts], -1)
