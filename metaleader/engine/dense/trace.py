"""Find the layers of a multilayer perceptron: linear layers with one activation between them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from metaleader.engine.graphs import graph_of, has_hooks, only_input
from metaleader.gradient.selection import Params
from metaleader.losses import squared_error, takes_labels
from metaleader.nets.functional import Network, scale_uint8
from metaleader.nets.layers import Linear

Activation = Literal["relu", "tanh", "sigmoid", "silu", "gelu"]

_CALLS: dict[Any, Activation] = {
    **dict.fromkeys([F.relu, torch.relu, "relu"], "relu"),
    **dict.fromkeys([F.tanh, torch.tanh, "tanh"], "tanh"),
    **dict.fromkeys([F.sigmoid, torch.sigmoid, "sigmoid"], "sigmoid"),
    F.silu: "silu",
    F.gelu: "gelu",
    F.leaky_relu: "relu",
}
_MODULES: dict[type[nn.Module], Activation] = {
    nn.ReLU: "relu",
    nn.LeakyReLU: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
}
_FUNCTIONS = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu}


class Layer(NamedTuple):
    """A linear layer: the names of its parameters and its widths."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Perceptron:
    """A multilayer perceptron.

    Attributes:
        layers: from the input to the output.
        activation: the function between the layers.
        negative_slope: of a leaky ReLU; 0 for other activations.
        flatten: whether the input is flattened to rows first.
        labels: whether the loss is cross-entropy with labels, instead of the squared error.
        smoothing: the label smoothing of the cross-entropy.
    """

    layers: tuple[Layer, ...]
    activation: Activation
    negative_slope: float
    flatten: bool
    labels: bool
    smoothing: float

    @property
    def width(self) -> int:
        """The largest number of inputs or outputs of a layer."""
        return max(max(layer.inputs, layer.outputs) for layer in self.layers)

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """The output for rows of preprocessed inputs, in operations of torch."""
        x = x.flatten(1) if self.flatten else x
        for i, layer in enumerate(self.layers):
            x = self._activate(x) if i else x
            x = F.linear(x, params[layer.weight], None if layer.bias is None else params[layer.bias])
        return x

    def _activate(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.negative_slope) if self.negative_slope else _FUNCTIONS[self.activation](x)


def find_perceptron(network: Network) -> Perceptron | None:
    """The layers of a network that is a multilayer perceptron with a loss that the kernel knows; None for others.

    Tracing can misread a network: compare its result with the network before use.
    """
    module, loss = network.module, network.loss
    options = loss.keywords if isinstance(loss, functools.partial) else {}
    known = _is_squared_error(loss) or (takes_labels(loss) and options.keys() <= {"smoothing"})
    if isinstance(loss, functools.partial) and loss.args:
        return None
    tied = len(list(module.parameters())) != len(list(module.named_parameters(remove_duplicate=False)))
    if not known or network.preprocess is not scale_uint8 or network.has_dropout or network.frozen or tied:
        return None
    graph = graph_of(module, nn.Linear)
    found = None if graph is None else _layers(graph, module)
    if found is None or {n for layer in found[0] for n in layer[:2] if n} != {n for n, _ in module.named_parameters()}:
        return None
    layers, (activation, slope), flatten = found
    return Perceptron(layers, activation, slope, flatten, takes_labels(loss), float(options.get("smoothing", 0.0)))


def _is_squared_error(loss: Any) -> bool:
    """Whether the mean of a loss over datapoints is the mean squared error of all outputs."""
    return loss in (squared_error, F.mse_loss) or (type(loss) is nn.MSELoss and loss.reduction != "sum")


def _layers(graph: fx.Graph, module: nn.Module) -> tuple[tuple[Layer, ...], tuple[Activation, float], bool] | None:
    """The layers, the activation between them and its slope, and whether the input is flattened; None for others."""
    node, layers, activations, flatten = only_input(graph), [], [], False
    expects_linear = True
    while node is not None and len(node.users) == 1:
        (user,) = node.users
        if user.op == "output":
            same = user.args == (node,) and len(set(activations)) <= 1 and not expects_linear
            return (tuple(layers), activations[0] if activations else ("relu", 0.0), flatten) if same else None
        layer = module.get_submodule(str(user.target)) if user.op == "call_module" else None
        if (
            user.args != (node,)
            or user.kwargs.keys() - {"inplace", "negative_slope"}
            or (layer is not None and has_hooks(layer))
        ):
            return None
        if expects_linear and not layers and not flatten and type(layer) is nn.Flatten:
            if (layer.start_dim, layer.end_dim) != (1, -1):
                return None
            flatten = True
        elif expects_linear and type(layer) in (nn.Linear, Linear):
            assert isinstance(layer, nn.Linear)
            bias = None if layer.bias is None else f"{user.target}.bias"
            layers.append(Layer(f"{user.target}.weight", bias, layer.in_features, layer.out_features))
            expects_linear = False
        else:
            activation = _MODULES.get(type(layer)) if layer is not None else _CALLS.get(user.target)
            if activation is None or expects_linear or getattr(layer, "approximate", "none") != "none":
                return None
            slope = getattr(layer, "negative_slope", user.kwargs.get("negative_slope", 0.0))
            if not isinstance(slope, float | int) or slope < 0:
                return None
            activations.append((activation, float(slope)))
            expects_linear = True
        node = user
    return None
