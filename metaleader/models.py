"""The paper's networks and an MLP: plain `torch.nn` modules with a last layer named `head`.

Batch norm always uses the statistics of the current batch, as in MAML: a batch has datapoints of a single task.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def mlp(inputs: int, outputs: int, hidden: Sequence[int] = (40, 40)) -> nn.Module:
    """Return a multilayer perceptron with ReLU.

    >>> mlp(1, 1)(torch.zeros(7, 1)).shape
    torch.Size([7, 1])
    """
    widths = [inputs, *hidden]
    layers: list[tuple[str, nn.Module]] = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        layers += [(f"linear{i}", nn.Linear(fan_in, fan_out)), (f"relu{i}", nn.ReLU())]
    return nn.Sequential(OrderedDict([*layers, ("head", nn.Linear(widths[-1], outputs))]))


def conv_net(classes: int, image_size: int = 28, channels: int = 3, filters: int = 32, layers: int = 5) -> nn.Module:
    """Return the paper's network for Rainbow MNIST and CIFAR-100: 3x3 convolutions with batch norm and ReLU.

    With stride 2, images of 28x28 have the sizes 28, 14, 7, 4, 2, 1. Batch norm cancels a bias, so convolutions have
    none.

    >>> conv_net(10)(torch.zeros(4, 3, 28, 28)).shape
    torch.Size([4, 10])
    """
    modules: list[tuple[str, nn.Module]] = []
    size = image_size
    for i in range(layers):
        modules += _conv_block(i, channels if i == 0 else filters, filters, kernel=3, stride=2)
        size = (size + 1) // 2
    head = nn.Linear(filters * size * size, classes)
    return nn.Sequential(OrderedDict([*modules, ("flatten", nn.Flatten()), ("head", head)]))


def pose_net(
    outputs: int = 4,
    channels: int = 3,
    filters: int = 16,
    strides: Sequence[int] = (2, 2, 2, 1),
    hidden: Sequence[int] = (200, 200),
    dense_norm: bool = True,
) -> nn.Module:
    """Return the paper's network for pose: 5x5 convolutions, spatial soft-argmax and dense layers.

    All hidden layers have ReLU and batch norm; with `dense_norm=False` the dense layers have no batch norm, as in the
    authors' code.

    >>> pose_net()(torch.zeros(4, 3, 64, 64)).shape
    torch.Size([4, 4])
    """
    modules: list[tuple[str, nn.Module]] = []
    for i, stride in enumerate(strides):
        modules += _conv_block(i, channels if i == 0 else filters, filters, kernel=5, stride=stride)
    modules.append(("points", SoftArgmax()))
    widths = [2 * filters, *hidden]
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        modules.append((f"linear{i}", nn.Linear(fan_in, fan_out, bias=not dense_norm)))
        if dense_norm:
            modules.append((f"dense_norm{i}", nn.BatchNorm1d(fan_out, track_running_stats=False)))
        modules.append((f"dense_relu{i}", nn.ReLU()))
    return nn.Sequential(OrderedDict([*modules, ("head", nn.Linear(widths[-1], outputs))]))


class SoftArgmax(nn.Module):
    """Spatial soft-argmax: maps feature maps (N, C, H, W) to their expected positions (N, 2 C) in [-1, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the expected x of all channels, followed by the expected y."""
        height, width = x.shape[-2:]
        weights = torch.softmax(x.flatten(-2), -1).unflatten(-1, (height, width))
        across = torch.linspace(-1, 1, width, dtype=x.dtype, device=x.device)
        down = torch.linspace(-1, 1, height, dtype=x.dtype, device=x.device)
        return torch.cat([(weights.sum(-2) * across).sum(-1), (weights.sum(-1) * down).sum(-1)], -1)


class TaskLogits(nn.Module):
    """The last layer of a net with one output per global class; it selects the logits of the task's classes.

    The labels of a task are positions in the `classes` of `begin(name, classes=...)`. This layer maps them to global
    classes, so that all tasks with a class share its output. Without `classes`, it returns all logits.

    >>> TaskLogits(3)(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 2., 3.]])
    """

    classes: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.register_buffer("classes", torch.arange(num_classes), persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        """Select the columns of the task's classes from (N, classes), in the order of its labels."""
        return logits.gather(1, self.classes.expand(len(logits), -1))


def _conv_block(i: int, fan_in: int, fan_out: int, kernel: int, stride: int) -> list[tuple[str, nn.Module]]:
    return [
        (f"conv{i}", nn.Conv2d(fan_in, fan_out, kernel, stride=stride, padding=kernel // 2, bias=False)),
        (f"norm{i}", nn.BatchNorm2d(fan_out, track_running_stats=False)),
        (f"relu{i}", nn.ReLU()),
    ]
