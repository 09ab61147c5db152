"""A network divided into the convolutions that its images go through first, and a head: the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from metaleader.nets.functional import Network
from metaleader.nets.layers import BatchNorm, Conv2d


class Layer(NamedTuple):
    """A convolution of a chain, with the batch norm before it (of its input; the first layer has none)."""

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
    """A network divided into convolutions and a head.

    Attributes:
        layers: the convolutions.
        head: the rest, from the last convolution's batch norm on; its parameters keep their names.
        silent: parameters without effect: the biases of convolutions, which batch norm takes out again, and what
            forward does not use.
    """

    network: Network
    layers: tuple[Layer, ...]
    head: nn.Module
    silent: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """All parameters of the network."""
        return [name for name, _ in self.network.module.named_parameters()]

    @property
    def head_names(self) -> list[str]:
        """The parameters of the head."""
        return [name for name, _ in self.head.named_parameters()]


def find_chain(network: Network) -> Chain | None:
    """Divide a network whose images go through a plain convolution, batch norm and ReLU first, however it is written.

    Its forward is traced with torch.fx as far as it holds convolutions; what cannot be traced is no chain. What comes
    of it is not to be trusted before it was compared with the network (`proof`).
    """
    module = network.module
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if network.has_dropout or len(names) != len(dict(module.named_parameters())):
        return None
    graph = _trace(module)
    layers: list[Layer] = []
    silent: list[str] = []
    norm: tuple[str, BatchNorm] | None = None
    last: fx.Node | None = None
    node = _only_input(graph) if graph is not None else None
    while node is not None and (block := _block_after(node, module)) is not None:
        last, (name, conv), (norm_name, after), node = block
        filters, channels, kernel, _ = conv.weight.shape
        before = (norm[0], norm[1].eps) if norm else (None, 0.0)
        layers.append(Layer(f"{name}.weight", *before, channels, filters, kernel, conv.stride[0], conv.padding[0]))
        silent += [f"{name}.bias"] if conv.bias is not None else []
        norm = norm_name, after
    if last is None or graph is None:
        return None
    head = _rest(module, graph, last)
    of_head = {name for name, _ in head.named_parameters()}
    norms = {f"{layer.norm}.{kind}" for layer in layers if layer.norm for kind in ("weight", "bias")}
    taken = norms | {layer.weight for layer in layers}
    if of_head & (taken | set(silent)):
        return None
    silent += [name for name in names if name not in taken | of_head | set(silent)]
    return Chain(network, tuple(layers), head, tuple(silent))


class _Tracer(fx.Tracer):
    """Goes into modules that hold convolutions, and no others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Conv2d) or not any(isinstance(part, Conv2d) for part in m.modules())


def _trace(module: nn.Module) -> fx.Graph | None:
    """The graph of a module's forward, or None.

    There is none with hooks, a layer that is called twice, a call for what it changes in place, a forward of the
    instance's own (which is not the one that would be traced), and where tracing fails.
    """
    tracer = _Tracer()
    if "forward" in vars(module):
        return None
    if any(not tracer.is_leaf_module(part, "") and _has_hooks(part) for part in module.modules()):
        return None
    try:
        graph = tracer.trace(module)
    except Exception:  # whatever a user's forward raises when it is shown no numbers
        return None
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    unused = [node for node in graph.nodes if not node.users and node.op not in ("placeholder", "output")]
    return graph if len(called) == len(set(called)) and not unused else None


def _only_input(graph: fx.Graph) -> fx.Node | None:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return inputs[0] if len(inputs) == 1 else None


def _block_after(
    node: fx.Node, module: nn.Module
) -> tuple[fx.Node, tuple[str, Conv2d], tuple[str, BatchNorm], fx.Node] | None:
    """A convolution, batch norm and ReLU that a node's output goes through: its node, the two layers, ReLU's node."""
    path = [node]
    while len(path) < 4:
        users = list(path[-1].users)
        if len(users) != 1 or users[0].args != (path[-1],) or users[0].kwargs.keys() - {"inplace"}:
            return None
        path += users
    parts = [module.get_submodule(str(at.target)) if at.op == "call_module" else None for at in path[1:]]
    conv, norm, relu = parts
    if type(conv) is not Conv2d or type(norm) is not BatchNorm or norm.weight is None or norm.bias is None:
        return None
    if type(relu) is not nn.ReLU and (path[3].op, path[3].target) not in _RELU_CALLS:
        return None
    square = all(len(set(pair)) == 1 for pair in (conv.stride, conv.padding, conv.weight.shape[2:]))
    if not square or any(part is not None and _has_hooks(part) for part in parts):
        return None
    return path[1], (str(path[1].target), conv), (str(path[2].target), norm), path[3]


_RELU_CALLS = {("call_function", F.relu), ("call_function", torch.relu), ("call_method", "relu")}


def _rest(module: nn.Module, graph: fx.Graph, last: fx.Node) -> nn.Module:
    """What a module does with the output of a convolution; parameters keep their names."""
    first = _only_input(graph)
    assert first is not None
    with graph.inserting_after(first):
        given = graph.placeholder("features")
    last.replace_all_uses_with(given)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op != "output" and node is not given:
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(module, graph)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
