"""Replacements for torch's layers in a functional module, with the same parameters under the same names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metaleader.gradient.meta import in_transform
from metaleader.system.tracing import is_traced


class BatchNorm(nn.Module):
    """Batch norm by the statistics of the current batch, with the parameters and buffers of the layer it replaces.

    If `keep_next` is set, the statistics of the next call are kept and used by all later calls. Variances are biased,
    as in `torch.nn.BatchNorm2d` in training. A batch with one value per channel gives the shift.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.eps = layer.eps
        self.register_parameter("weight", layer.weight)
        self.register_parameter("bias", layer.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name), persistent=getattr(layer, name) is not None)
        self.kept = False
        self.keep_next = False

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """In this context, all calls use the statistics of the first call."""
        before = self.running_mean, self.running_var
        self.keep_next = True
        try:
            yield
        finally:
            self.kept = self.keep_next = False
            self.running_mean, self.running_var = before

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each channel (dimension 1)."""
        dims = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        if self.kept:
            assert self.running_mean is not None
            assert self.running_var is not None
            centred, variance = x - self.running_mean.view(shape), self.running_var.view(shape)
        else:
            mean = x.mean(dims, keepdim=True)
            centred = x - mean
            variance = (centred * centred).mean(dims, keepdim=True)
            if self.keep_next:
                self.running_mean, self.running_var = mean.flatten(), variance.flatten()
                self.kept, self.keep_next = True, False
        scaled = centred * torch.rsqrt(variance + self.eps)
        if self.weight is None or self.bias is None:
            return scaled
        return scaled * self.weight.view(shape) + self.bias.view(shape)


class Conv2d(nn.Module):
    """A convolution that is fast with a separate weight per task, as one matrix product.

    torch's native kernels would run a grouped convolution, which is three times slower on a GPU. The native kernels are
    used for one weight, and for operations on the CPU that are not compiled, where they are faster.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        assert not isinstance(layer.padding, str)
        self.stride: tuple[int, ...] = layer.stride
        self.padding: tuple[int, ...] = layer.padding
        self.register_parameter("weight", layer.weight)  # pyright: ignore[reportArgumentType]
        self.register_parameter("bias", layer.bias)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def replaces(layer: nn.Conv2d) -> bool:
        """Whether a layer is supported: one group, no dilation, numeric zero padding."""
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        return plain and not isinstance(layer.padding, str)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (N, C, H, W)."""
        if not is_traced() and not _is_batched_on_gpu(x):
            return F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
        (down, across), (pad_y, pad_x) = self.stride, self.padding
        num, channels = x.shape[:2]
        filters, _, high, wide = self.weight.shape
        x = F.pad(x, (pad_x, pad_x, pad_y, pad_y))
        height, width = (x.shape[2] - high) // down + 1, (x.shape[3] - wide) // across + 1
        # Slices: the second derivative of `Tensor.unfold` has no batching rule, and compilers fuse them.
        taps = [
            x[:, :, i : i + down * (height - 1) + 1 : down, j : j + across * (width - 1) + 1 : across]
            for i in range(high)
            for j in range(wide)
        ]
        columns = torch.stack(taps, 2).permute(1, 2, 0, 3, 4)
        columns = columns.reshape(channels * high * wide, num * height * width)
        out = (self.weight.reshape(filters, -1) @ columns).view(filters, num, height, width).transpose(0, 1)
        return out if self.bias is None else out + self.bias.view(1, -1, 1, 1)


def _is_batched_on_gpu(x: Tensor) -> bool:
    """Whether vmap batches the operations on a GPU."""
    return x.is_cuda and in_transform()


class Linear(nn.Linear):
    """A linear layer that is fused with neighbouring operations if it is small and compiled for a GPU.

    A matrix product would be a separate kernel, and so would each of its derivatives.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map rows (N, features)."""
        if not self.fuses(input):
            return super().forward(input)
        out = (input[:, None] * self.weight).sum(-1)
        return out if self.bias is None else out + self.bias

    def fuses(self, input: Tensor) -> bool:
        """Whether an input is mapped by a sum of products instead of a matrix product."""
        # Test the size last: a program compiled for the CPU must not be specialised on it.
        if not (is_traced() and input.is_cuda):
            return False
        return input.ndim == 2 and input.shape[0] * self.weight.numel() <= 2**16


class SeededDropout(nn.Module):
    """Dropout whose mask depends only on a seed and the position: identical on every device, and repeatable.

    If a module calls the layer several times, each call has a different mask (calls are counted in `num_calls`).

    Args:
        p: the probability that an element or channel is zeroed.
        channels: whether whole channels are zeroed, as in `nn.Dropout2d`.
    """

    seed: Tensor

    def __init__(self, p: float, channels: bool) -> None:
        super().__init__()
        self.p = p
        self.channels = channels
        self.num_calls = 0
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements, or channels, and scale the rest."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return torch.zeros_like(x)
        shape = x.shape[:2] + (1,) * (x.ndim - 2) if self.channels else x.shape
        position = torch.arange(shape.numel(), device=x.device).view(shape)
        # Hash the position before adding the seed: otherwise the masks of two seeds would be shifted copies.
        bits = _hash(_hash(position) + _hash(self.seed + 0x9E3779B9 * self.num_calls))
        self.num_calls += 1
        return x * (bits >= int(self.p * 2**32)) / (1 - self.p)


def _hash(x: Tensor) -> Tensor:
    """Hash integers to 32 uniform bits (an xor-multiply finaliser); products do not overflow int64."""
    x = x & 0xFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)
