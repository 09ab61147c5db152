"""The layout of the flat parameters of a chain's convolutions."""

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

    def weights(self, flat: Tensor) -> list[Tensor]:
        """The weight of each layer, (tasks, inputs, filters), as views of the flat parameters."""
        views = []
        for start, inputs, layer in zip(self.starts, self.inputs, self.layers, strict=True):
            weight = flat[:, start : start + inputs * layer.filters]
            views.append(weight.unflatten(1, (inputs, layer.filters)))
        return views

    def norms(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The scale and shift, (tasks, 1, channels) each, of the batch norms before the second and later layers."""
        views = []
        for stop, layer in zip(self.starts[1:], self.layers[1:], strict=True):
            middle = stop - layer.channels
            views.append((flat[:, None, middle - layer.channels : middle], flat[:, None, middle:stop]))
        return views

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
        params, weights, norms = {}, self.weights(flat), self.norms(flat)
        for i, layer in enumerate(self.layers):
            if layer.norm:
                scale, shift = norms[i - 1]
                params |= {f"{layer.norm}.weight": scale[:, 0], f"{layer.norm}.bias": shift[:, 0]}
            weight = weights[i][:, : layer.kernel**2 * layer.channels]
            window = (layer.kernel, layer.kernel, layer.channels)
            params[layer.weight] = weight.unflatten(1, window).permute(0, 4, 3, 1, 2)
        return params
