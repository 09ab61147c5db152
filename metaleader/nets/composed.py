"""Layers as elementary operations whose own kernels have no second derivative, or none that is batched over tasks.

The functions take the arguments of `torch.nn.functional`, and the layers take the place of torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Size = int | Sequence[int]


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.hardsigmoid`, which has no second derivative."""
    return F.relu6(input + 3) / 6


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """`torch.nn.functional.interpolate`, with "nearest-exact" as a choice of rows and columns."""
    if mode != "nearest-exact" or antialias or align_corners is not None:
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    num_dims = input.ndim - 2
    sizes, scales = (v if isinstance(v, Sequence) else [v] * num_dims for v in (size, scale_factor))
    for dim, (new_size, scale) in enumerate(zip(sizes, scales, strict=True), 2):
        positions = torch.arange(input.shape[dim], dtype=torch.float32, device=input.device)[None, None]
        chosen = F.interpolate(
            positions, new_size, scale, "nearest-exact", recompute_scale_factor=recompute_scale_factor
        )
        input = input.index_select(dim, chosen.flatten().long())
    return input


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`torch.nn.functional.embedding`, whose derivative for several tasks can ignore `padding_idx` in torch 2.13."""
    if max_norm is not None or scale_grad_by_freq:
        raise ValueError("embedding takes no max_norm and no scale_grad_by_freq here")
    rows = F.embedding(input, weight)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % weight.shape[0])[..., None], rows.detach(), rows)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.bilinear`."""
    out = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return out if bias is None else out + bias


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`torch.nn.functional.embedding_bag` of bags of one size, (bags, indices)."""
    if offsets is not None or input.ndim != 2 or max_norm is not None or scale_grad_by_freq:
        raise ValueError(
            "embedding_bag takes indices of shape (rows, indices per row) here, without offsets, max_norm or"
            f" scale_grad_by_freq; got {tuple(input.shape)}"
        )
    rows = F.embedding(input, weight)
    rows = rows if per_sample_weights is None else rows * per_sample_weights[..., None]
    counts: Tensor | int = input.shape[1]
    if padding_idx is not None:
        kept = (input != padding_idx % weight.shape[0])[..., None]
        counts = kept.sum(1).clamp(min=1)
        empty = -math.inf if mode == "max" else 0.0
        rows = torch.where(kept, rows, empty)
    if mode == "max":
        largest = rows.max(1).values
        return torch.where(largest == -math.inf, 0.0, largest)
    return rows.sum(1) / counts if mode == "mean" else rows.sum(1)


def max_unpool(
    input: Tensor,
    indices: Tensor,
    kernel_size: _Size,
    stride: _Size | None = None,
    padding: _Size = 0,
    output_size: Sequence[int] | None = None,
    num_dims: int = 2,
) -> Tensor:
    """`torch.nn.functional.max_unpool1d` and others, by the number of dimensions."""
    each = [value if isinstance(value, Sequence) else [value] * num_dims for value in (kernel_size, padding)]
    strides = each[0] if stride is None else stride if isinstance(stride, Sequence) else [stride] * num_dims
    default = [
        (size - 1) * step - 2 * pad + kernel
        for size, step, kernel, pad in zip(input.shape[-num_dims:], strides, *each, strict=True)
    ]
    shape = default if output_size is None else list(output_size)[-num_dims:]
    zeros = input.new_zeros(*input.shape[:-num_dims], math.prod(shape))
    flat = zeros.scatter(-1, indices.flatten(-num_dims), input.flatten(-num_dims))
    return flat.unflatten(-1, shape)


class Upsample(nn.Upsample):
    """`nn.Upsample`, whose mode "nearest-exact" is batched over tasks."""

    def forward(self, input: Tensor) -> Tensor:
        """Interpolate (N, C, ...)."""
        again = self.recompute_scale_factor
        return interpolate(input, self.size, self.scale_factor, self.mode, self.align_corners, again)


class Hardsigmoid(nn.Hardsigmoid):
    """`nn.Hardsigmoid` by `hardsigmoid`."""

    def forward(self, input: Tensor) -> Tensor:
        """Map each number to [0, 1]."""
        return hardsigmoid(input)


class Embedding(nn.Embedding):
    """`nn.Embedding` by `embedding`."""

    def forward(self, input: Tensor) -> Tensor:
        """The rows of the weights with these numbers."""
        return embedding(input, self.weight, self.padding_idx)


class Bilinear(nn.Bilinear):
    """`nn.Bilinear` by `bilinear`."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Map pairs of rows."""
        return bilinear(input1, input2, self.weight, self.bias)


class EmbeddingBag(nn.EmbeddingBag):
    """`nn.EmbeddingBag` by `embedding_bag`."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """The sum, mean or maximum of each row's embeddings."""
        options = {"mode": self.mode, "per_sample_weights": per_sample_weights, "padding_idx": self.padding_idx}
        return embedding_bag(input, self.weight, offsets, **options)


class MaxUnpool1d(nn.MaxUnpool1d):
    """`nn.MaxUnpool1d` by `max_unpool`."""

    def forward(self, input: Tensor, indices: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Put each maximum in its place among zeros."""
        return max_unpool(input, indices, self.kernel_size, self.stride, self.padding, output_size, 1)


class MaxUnpool2d(nn.MaxUnpool2d):
    """`nn.MaxUnpool2d` by `max_unpool`."""

    def forward(self, input: Tensor, indices: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Put each maximum in its place among zeros."""
        return max_unpool(input, indices, self.kernel_size, self.stride, self.padding, output_size, 2)


class MaxUnpool3d(nn.MaxUnpool3d):
    """`nn.MaxUnpool3d` by `max_unpool`."""

    def forward(self, input: Tensor, indices: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Put each maximum in its place among zeros."""
        return max_unpool(input, indices, self.kernel_size, self.stride, self.padding, output_size, 3)
