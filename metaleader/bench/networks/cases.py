"""The networks to compare, their data, and the exact gradient of each task.

Legend of shapes: T tasks, N datapoints, S tokens or time steps, D features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from metaleader import losses, models
from metaleader.bench.peers import loop_gradient
from metaleader.gradient.selection import Params
from metaleader.losses import Loss
from metaleader.tasks import Batch, double, rng, to_device


@dataclass(frozen=True)
class Case:
    """A network and the shape of its updates.

    Attributes:
        title: the network in words.
        model: builds the network as a user writes it.
        shape: of one datapoint.
        outputs: the number of classes, or with `regression` of values to predict.
        regression: whether the loss is the squared error instead of cross-entropy.
        written_out: builds a module with the same parameters in elementary operations, for the other libraries and the
            exact gradient; None uses `model`.
        tasks: tasks per update.
        cpu_tasks: tasks per update on the CPU, if fewer.
        gpu_only: whether the network is left out on the CPU unless it is asked for.
        support: support datapoints per task.
        query: query datapoints per task.
        inner_steps: the number of inner steps.
        inner_lr: the step size of the inner loop.
    """

    title: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    outputs: int = 10
    regression: bool = False
    written_out: Callable[[], nn.Module] | None = None
    tasks: int = 25
    cpu_tasks: int | None = None
    gpu_only: bool = False
    support: int = 10
    query: int = 10
    inner_steps: int = 5
    inner_lr: float = 0.1

    @property
    def loss(self) -> Loss:
        """The loss of one datapoint."""
        return losses.squared_error if self.regression else losses.cross_entropy

    @property
    def elementary(self) -> Case:
        """The same work with the network in elementary operations."""
        return replace(self, model=self.written_out or self.model)

    def on(self, device: torch.device) -> Case:
        """The work on a device."""
        return replace(self, tasks=self.cpu_tasks) if device.type == "cpu" and self.cpu_tasks else self

    def datapoints(self, num: int, *key: int) -> Batch:
        """Random inputs in float32 with random targets."""
        draw = rng("bench networks", *key)
        x = torch.from_numpy(draw.standard_normal((num, *self.shape), dtype="float32"))
        if self.regression:
            return Batch(x, torch.from_numpy(draw.uniform(-1, 1, (num, self.outputs)).astype("float32")))
        return Batch(x, torch.from_numpy(draw.integers(self.outputs, size=num)))


class Inputs(NamedTuple):
    """The inputs of an update, and the exact gradients of its first tasks, (tasks, ...) by name."""

    params: Params
    support: Batch
    query: Batch
    exact: Params


def make_inputs(case: Case, device: torch.device, exact_tasks: int = 5) -> Inputs:
    """Draw the inputs of an update, and compute the gradient of each of the first tasks alone in float64.

    The gradient is that of torch's own layers by autograd through all inner steps, one task at a time.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = case.model()
    params = {name: value.detach().clone() for name, value in module.named_parameters()}
    width = case.support + case.query
    flat = case.datapoints(case.tasks * width, 0)
    data = tree_map(lambda leaf: leaf.unflatten(0, (case.tasks, width)), flat)
    support: Batch = tree_map(lambda leaf: leaf[:, : case.support].contiguous(), data)
    query: Batch = tree_map(lambda leaf: leaf[:, case.support :].contiguous(), data)
    doubled = to_device((double(params), double(support), double(query)), device)
    gradients = [
        exact_gradient(case, doubled[0], *one_task(doubled[1:], i)) for i in range(min(exact_tasks, case.tasks))
    ]
    return Inputs(params, support, query, {name: torch.stack([g[name].cpu() for g in gradients]) for name in params})


def exact_gradient(case: Case, params: Params, support: Batch, query: Batch) -> Params:
    """The mean gradient by the loop over tasks, without fused attention, which has no second derivative."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        return loop_gradient(case.elementary, params, support, query)


def one_task(batches: Any, i: int, repeat: int = 1) -> Any:
    """The data of task i, with a task dimension of size `repeat`."""
    return tree_map(lambda leaf: leaf[i : i + 1].expand(repeat, *leaf.shape[1:]).contiguous(), batches)


def save_inputs(inputs: Inputs, path: Path) -> None:
    """Write inputs to a file."""
    params, support, query, exact = inputs
    batches = {
        f"{name}.{key}": leaf
        for name, b in (("support", support), ("query", query))
        for key, leaf in b._asdict().items()
    }
    trees = {"params": params, "exact": exact, "batch": batches}
    save_file(
        {f"{kind}/{name}": value.contiguous() for kind, tree in trees.items() for name, value in tree.items()}, path
    )


def load_inputs(path: Path) -> Inputs:
    """Read inputs from a file."""
    trees: dict[str, Params] = {"params": {}, "exact": {}, "batch": {}}
    for key, value in load_file(path).items():
        kind, _, name = key.partition("/")
        trees[kind][name] = value
    batch = trees["batch"]
    support, query = (Batch(batch[f"{name}.x"], batch[f"{name}.y"]) for name in ("support", "query"))
    return Inputs(trees["params"], support, query, trees["exact"])


class Encoder(nn.Module):
    """Transformer layers over tokens (N, S, D), the mean over tokens, and a linear head."""

    def __init__(self, width: int, layers: int, heads: int, outputs: int, tokens: int, patch: int = 0) -> None:
        """With `patch`, the input is an image with 3 channels, cut into patches, and the norms come first."""
        super().__init__()
        vision = patch > 0
        if vision:
            self.patches = nn.Conv2d(3, width, patch, patch)
            self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
            self.last_norm = nn.LayerNorm(width)
        options: dict[str, Any] = {"activation": "gelu", "norm_first": True} if vision else {}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, **options)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, outputs)
        self.vision = vision

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, outputs)."""
        if self.vision:
            x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head((self.last_norm(x) if self.vision else x).mean(1))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with group norm, and a 1x1 convolution as shortcut where the shape changes."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, fan_out)
        self.shortcut = nn.Conv2d(fan_in, fan_out, 1, stride, bias=False) if stride > 1 or fan_in != fan_out else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, channels, height, width)."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """A convolution and three residual blocks with group norm, the mean over positions, and a linear head."""

    def __init__(self, outputs: int, width: int = 16, groups: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, padding=1, bias=False)
        self.stem_norm = nn.GroupNorm(groups, width)
        shapes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.blocks = nn.ModuleList(ResidualBlock(*shape, groups) for shape in shapes)
        self.head = nn.Linear(4 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, outputs)."""
        x = torch.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """A GRU over (N, S, D), and a linear head on its last state."""

    def __init__(self, recurrence: Callable[[int, int], nn.Module], features: int, width: int, outputs: int) -> None:
        super().__init__()
        self.gru = recurrence(features, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, outputs)."""
        return self.head(self.gru(x)[0][:, -1])


class WrittenOutGRU(nn.Module):
    """The equations of `nn.GRU`, one layer, in elementary operations; dynamo does not trace a subclass of `nn.GRU`."""

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        for name, value in nn.GRU(features, width).named_parameters():
            self.register_parameter(name, nn.Parameter(value.detach()))
        self.width = width

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return all states, (N, S, width)."""
        inputs = nn.functional.linear(x, self.weight_ih_l0, self.bias_ih_l0)
        state = x.new_zeros(len(x), self.width)
        states = []
        for i in range(x.shape[1]):
            reset_x, update_x, new_x = inputs[:, i].chunk(3, -1)
            reset_h, update_h, new_h = nn.functional.linear(state, self.weight_hh_l0, self.bias_hh_l0).chunk(3, -1)
            new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
            update = torch.sigmoid(update_x + update_h)
            state = (1 - update) * new + update * state
            states.append(state)
        return torch.stack(states, 1), None


def _gru(recurrence: Callable[..., nn.Module], features: int, width: int, outputs: int) -> nn.Module:
    return Recurrent(recurrence, features, width, outputs)


CASES: dict[str, Case] = {
    "mlp": Case("MLP 1-40-40-1", functools.partial(models.mlp, 1, 1), (1,), 1, regression=True, inner_lr=0.01),
    "digits": Case(
        "conv net of rainbow-digits", functools.partial(models.conv_net, 10, 16, 3, 16, 3), (3, 16, 16), cpu_tasks=8
    ),
    "conv": Case("conv net of the paper", functools.partial(models.conv_net, 10), (3, 28, 28), gpu_only=True),
    "transformer": Case(
        "transformer, 2 layers, 16 tokens of 32", functools.partial(Encoder, 32, 2, 4, 10, 16), (16, 32), inner_lr=0.01
    ),
    "resnet": Case("ResNet, 3 residual blocks", functools.partial(ResNet, 10), (3, 28, 28), inner_lr=0.01),
    "vit": Case(
        "ViT, 3 layers, 16 patches of 64", functools.partial(Encoder, 64, 3, 4, 10, 16, 7), (3, 28, 28), inner_lr=0.01
    ),
    "gru": Case(
        "GRU of 32, 20 steps",
        functools.partial(_gru, functools.partial(nn.GRU, batch_first=True), 4, 32, 1),
        (20, 4),
        1,
        regression=True,
        written_out=functools.partial(_gru, WrittenOutGRU, 4, 32, 1),
        inner_lr=0.01,
    ),
}
