"""Split a network into a chain: its leading convolutions, and a head that contains all later operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from metaleader.engine.graphs import graph_of, has_hooks, only_input
from metaleader.nets.functional import Network
from metaleader.nets.layers import BatchNorm, Conv2d


class Layer(NamedTuple):
    """A convolution of a chain and the batch norm of its input; the first layer has no batch norm."""

    weight: str
    norm: str | None
    eps: float
    channels: int
    filters: int
    kernel: int
    stride: int
    padding: int


@dataclass(frozen=True)
class Chain:
    """A network split into convolutions and a head.

    Attributes:
        network: the whole network.
        layers: the convolutions.
        head: all operations from the last convolution's batch norm on; its parameters keep their names.
        silent: parameters without effect on the output: the biases of the convolutions, which batch norm cancels, and
            parameters that forward does not use.
    """

    network: Network
    layers: tuple[Layer, ...]
    head: nn.Module
    silent: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The names of all parameters of the network."""
        return [name for name, _ in self.network.module.named_parameters()]

    @property
    def head_names(self) -> list[str]:
        """The names of the parameters of the head."""
        return [name for name, _ in self.head.named_parameters()]


def find_chain(network: Network) -> Chain | None:
    """Split a network that begins with a plain convolution, batch norm and ReLU; return None for any other network.

    Modules that contain convolutions are traced with torch.fx; if tracing fails, the network is not a chain. Tracing
    can misread a network: compare the chain with the network before use (`metaleader.engine.selfcheck.agrees`).
    """
    module = network.module
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if network.has_dropout or network.frozen or len(names) != len(dict(module.named_parameters())):
        return None
    graph = graph_of(module, Conv2d)
    layers: list[Layer] = []
    silent: list[str] = []
    norm: tuple[str, BatchNorm] | None = None
    last: fx.Node | None = None
    node = only_input(graph) if graph is not None else None
    while node is not None and (block := _block_after(node, module)) is not None:
        last, (name, conv), (norm_name, after), node = block
        filters, channels, kernel, _ = conv.weight.shape
        before = (norm[0], norm[1].eps) if norm else (None, 0.0)
        layers.append(Layer(f"{name}.weight", *before, channels, filters, kernel, conv.stride[0], conv.padding[0]))
        silent += [f"{name}.bias"] if conv.bias is not None else []
        norm = norm_name, after
    if last is None or graph is None:
        return None
    head = _head(module, graph, last)
    head_params = {name for name, _ in head.named_parameters()}
    norms = {f"{layer.norm}.{kind}" for layer in layers if layer.norm for kind in ("weight", "bias")}
    body_params = norms | {layer.weight for layer in layers}
    if head_params & (body_params | set(silent)):
        return None
    silent += [name for name in names if name not in body_params | head_params | set(silent)]
    return Chain(network, tuple(layers), head, tuple(silent))


def _block_after(
    node: fx.Node, module: nn.Module
) -> tuple[fx.Node, tuple[str, Conv2d], tuple[str, BatchNorm], fx.Node] | None:
    """The convolution, batch norm and ReLU after a node: the convolution's node, two named layers, ReLU's node."""
    path = [node]
    while len(path) < 4:
        users = list(path[-1].users)
        if len(users) != 1 or users[0].args != (path[-1],) or users[0].kwargs.keys() - {"inplace"}:
            return None
        path += users
    modules = [module.get_submodule(str(at.target)) if at.op == "call_module" else None for at in path[1:]]
    conv, norm, relu = modules
    if type(conv) is not Conv2d or type(norm) is not BatchNorm or norm.weight is None or norm.bias is None:
        return None
    if type(relu) is not nn.ReLU and (path[3].op, path[3].target) not in _RELU_CALLS:
        return None
    square = all(len(set(pair)) == 1 for pair in (conv.stride, conv.padding, conv.weight.shape[2:]))
    if not square or any(child is not None and has_hooks(child) for child in modules):
        return None
    return path[1], (str(path[1].target), conv), (str(path[2].target), norm), path[3]


_RELU_CALLS = {("call_function", F.relu), ("call_function", torch.relu), ("call_method", "relu")}


def _head(module: nn.Module, graph: fx.Graph, last: fx.Node) -> nn.Module:
    """A module of the operations after the last convolution, with the output of that convolution as its input.

    Parameters keep their names. The graph is changed in place.
    """
    first = only_input(graph)
    assert first is not None
    with graph.inserting_after(first):
        features = graph.placeholder("features")
    last.replace_all_uses_with(features)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op != "output" and node is not features:
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(module, graph)
