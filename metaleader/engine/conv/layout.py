"""The layout of the flat parameters of a chain's convolutions, and the patches of their inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metaleader.engine.conv.trace import Layer
from metaleader.gradient.selection import Params


class Plan:
    """The layout of the flat parameters of a chain's convolutions, and the sizes of its images.

    The input of the first layer is patches of the images, so its weight is that of a 1x1 convolution.

    Args:
        layers: the convolutions.
        size: (height, width) of the images.
        multiple: the number of inputs of the first layer is padded with zeros to a multiple of this.

    Attributes:
        sizes: (height, width) of every layer's input, then of the last layer's output.
        inputs: the number of inputs of each layer, kernel * kernel * channels, padded for the first layer.
        starts: the offset of each layer's weight; its batch norm's scale and shift come before it.
        total: the number of flat parameters per task.
        largest: the number of elements in the patches of one image, the maximum over layers.
    """

    def __init__(self, layers: tuple[Layer, ...], size: tuple[int, int], multiple: int = 1) -> None:
        self.layers = layers
        self.sizes = [size]
        self.inputs: list[int] = []
        self.starts: list[int] = []
        at = 0
        for i, layer in enumerate(layers):
            high, wide = self.sizes[-1]
            reach = 2 * layer.padding - layer.kernel
            self.sizes.append(((high + reach) // layer.stride + 1, (wide + reach) // layer.stride + 1))
            width = layer.kernel**2 * layer.channels
            self.inputs.append(-(-width // multiple) * multiple if i == 0 else width)
            at += 2 * layer.channels if i else 0
            self.starts.append(at)
            at += self.inputs[-1] * layer.filters
        self.total = at
        outputs = (high * wide for high, wide in self.sizes[1:])
        self.largest = max(inputs * output for inputs, output in zip(self.inputs, outputs, strict=True))

    def weight(self, flat: Tensor, i: int) -> Tensor:
        """The weight of layer i, (tasks, inputs, filters), as a view of the flat parameters."""
        stop = self.starts[i] + self.inputs[i] * self.layers[i].filters
        return flat[:, self.starts[i] : stop].unflatten(1, (self.inputs[i], self.layers[i].filters))

    def norm(self, flat: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """The scale and shift of the batch norm before layer i, (tasks, 1, channels) each."""
        channels, stop = self.layers[i].channels, self.starts[i]
        return flat[:, None, stop - 2 * channels : stop - channels], flat[:, None, stop - channels : stop]

    def flatten(self, params: Params) -> Tensor:
        """The parameters of the convolutions, (tasks, ...) each, as one tensor, (tasks, total)."""
        tensors = []
        for i, layer in enumerate(self.layers):
            if layer.norm:
                tensors += [params[f"{layer.norm}.weight"], params[f"{layer.norm}.bias"]]
            weight = params[layer.weight].permute(0, 3, 4, 2, 1).flatten(1, 3)
            tensors.append(F.pad(weight, (0, 0, 0, self.inputs[i] - weight.shape[1])).flatten(1))
        return torch.cat(tensors, 1)

    def unflatten(self, flat: Tensor) -> Params:
        """The inverse of `flatten`."""
        params = {}
        for i, layer in enumerate(self.layers):
            if layer.norm:
                scale, shift = self.norm(flat, i)
                params |= {f"{layer.norm}.weight": scale[:, 0], f"{layer.norm}.bias": shift[:, 0]}
            weight = self.weight(flat, i)[:, : layer.kernel**2 * layer.channels]
            window = (layer.kernel, layer.kernel, layer.channels)
            params[layer.weight] = weight.unflatten(1, window).permute(0, 4, 3, 1, 2)
        return params

    def patches(self, images: Tensor) -> Tensor:
        """The input of the first layer, (tasks, rows, inputs), from images (tasks, images, channels, height, width)."""
        layer = self.layers[0]
        columns = columns_of(images.permute(0, 1, 3, 4, 2), layer)
        return F.pad(columns, (0, self.inputs[0] - columns.shape[2]))


def columns_of(images: Tensor, layer: Layer) -> Tensor:
    """Patches (tasks, rows, kernel * kernel * channels) of images (tasks, images, height, width, channels)."""
    pad = layer.padding
    return windows_of(F.pad(images, (0, 0, pad, pad, pad, pad)), layer)


def windows_of(images: Tensor, layer: Layer) -> Tensor:
    """Patches of images that are already padded, as in `columns_of`."""
    windows = images.unfold(2, layer.kernel, layer.stride).unfold(3, layer.kernel, layer.stride)
    return windows.permute(0, 1, 2, 3, 5, 6, 4).flatten(4).flatten(1, 3)
