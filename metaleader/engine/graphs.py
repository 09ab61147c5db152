"""The operations of a module as a graph of calls of its layers."""

from __future__ import annotations

from torch import fx, nn


def graph_of(module: nn.Module, layer: type[nn.Module]) -> fx.Graph | None:
    """The graph of a module's forward down to layers of a class, or None if it cannot be used.

    A graph cannot be used if tracing fails, if a traced module has hooks, if a layer is called twice, if the result
    of a call is unused (an in-place change), or if `forward` is an attribute of the instance, which is not traced.
    """
    tracer = _Tracer(layer)
    if "forward" in vars(module):
        return None
    if any(not tracer.is_leaf_module(child, "") and has_hooks(child) for child in module.modules()):
        return None
    try:
        graph = tracer.trace(module)
    except Exception:  # a user's forward may raise anything when called with a proxy instead of a tensor
        return None
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    unused = [node for node in graph.nodes if not node.users and node.op not in ("placeholder", "output")]
    return graph if len(called) == len(set(called)) and not unused else None


def only_input(graph: fx.Graph) -> fx.Node | None:
    """The input of a graph; None if it has several."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return inputs[0] if len(inputs) == 1 else None


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module runs more than its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


class _Tracer(fx.Tracer):
    """Traces into modules that contain layers of a class; these layers and all other modules are leaves."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self._layer = layer

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self._layer) or not any(isinstance(child, self._layer) for child in m.modules())
