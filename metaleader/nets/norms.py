"""Norms as elementary operations, whose second derivative is right however they are batched.

Under grad over vmap, torch 2.13 holds the statistics of layer_norm, instance_norm and batch_norm constant in the second
derivative. These functions take the arguments of `torch.nn.functional`, and the layers take the place of torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """`torch.nn.functional.layer_norm`."""
    out = _normalize(input, _last_dims(input, normalized_shape, "layer_norm"), eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`torch.nn.functional.rms_norm`."""
    dims = _last_dims(input, normalized_shape, "rms_norm")
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    out = input * torch.rsqrt((input * input).mean(dims, keepdim=True) + eps)
    return out if weight is None else out * weight


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`torch.nn.functional.group_norm`."""
    if input.ndim < 2 or input.shape[1] % num_groups:
        raise ValueError(
            f"group_norm: the input must be (N, C, ...) with a multiple of {num_groups} channels, got"
            f" {tuple(input.shape)}"
        )
    groups = input.reshape(input.shape[0], num_groups, -1)
    return _affine(_normalize(groups, (-1,), eps).reshape(input.shape), weight, bias)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.instance_norm`, without an update of running statistics."""
    if not use_input_stats:
        return _by_running(input, running_mean, running_var, weight, bias, eps)
    _reject_running(running_mean, running_var, "instance_norm", "use_input_stats=False")
    if math.prod(input.shape[2:]) == 1:
        raise ValueError(f"instance_norm: each instance must have several values per channel, got {tuple(input.shape)}")
    return _affine(_normalize(input, tuple(range(2, input.ndim)), eps), weight, bias)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm`, without an update of running statistics."""
    if not training:
        return _by_running(input, running_mean, running_var, weight, bias, eps)
    _reject_running(running_mean, running_var, "batch_norm", "training=False")
    dims = tuple(d for d in range(input.ndim) if d != 1)
    return _affine(_normalize(input, dims, eps), weight, bias)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` by `layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise over the last dimensions."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` by `rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the root mean square over the last dimensions."""
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` by `group_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise each group of channels (dimension 1)."""
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class _ByInstance(_InstanceNorm):
    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        return instance_norm(input, weight=self.weight, bias=self.bias, eps=self.eps)


class InstanceNorm1d(_ByInstance, nn.InstanceNorm1d):
    """`nn.InstanceNorm1d` by `instance_norm`."""


class InstanceNorm2d(_ByInstance, nn.InstanceNorm2d):
    """`nn.InstanceNorm2d` by `instance_norm`."""


class InstanceNorm3d(_ByInstance, nn.InstanceNorm3d):
    """`nn.InstanceNorm3d` by `instance_norm`."""


def _normalize(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift each channel (dimension 1)."""
    shape = (1, -1) + (1,) * (x.ndim - 2)
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _by_running(
    x: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    if mean is None or variance is None:
        raise ValueError("a norm by running statistics needs running_mean and running_var")
    shape = (1, -1) + (1,) * (x.ndim - 2)
    return _affine((x - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape), weight, bias)


def _reject_running(mean: Tensor | None, variance: Tensor | None, function: str, remedy: str) -> None:
    if mean is not None or variance is not None:
        raise ValueError(
            f"{function} would change running statistics; pass running_mean=None and running_var=None, or {remedy}"
        )


def _last_dims(x: Tensor, normalized_shape: Sequence[int], function: str) -> tuple[int, ...]:
    num = len(normalized_shape)
    if num == 0 or tuple(x.shape[-num:]) != tuple(normalized_shape):
        raise ValueError(
            f"{function}: the last dimensions of the input must be {tuple(normalized_shape)}, got {tuple(x.shape)}"
        )
    return tuple(range(-num, 0))
