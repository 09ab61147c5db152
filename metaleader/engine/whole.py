"""A whole program, inner steps and their derivatives included, as one compiled graph.

The operations of one call are recorded, those of torch.autograd too, and the graph is compiled by Inductor. A call then
has no overhead per inner step, and neighbouring operations are fused across forward and backward passes. Compiling
takes time in proportion to the number of operations, so this is for small programs on the CPU; on a GPU, where an MLP
took more than 45 s to compile, and for larger programs, see `engine.compiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from metaleader.engine.compiled import compiling, use_project_cache
from metaleader.engine.objective import Objective
from metaleader.engine.products import rewrite_products
from metaleader.system.tracing import tracing

# A gradient of more operations is compiled in pieces. Inductor takes about a minute for 10,000 operations.
MAX_OPERATIONS = 4000
# The devices on which whole programs are compiled
DEVICES = ("cpu",)


def is_whole(objective: Objective, device: torch.device) -> bool:
    """Whether the gradient is compiled as a whole: unrolled, and of few operations."""
    return device.type in DEVICES and has_few_operations(objective) and bool(objective.inner.unroll)


def has_few_operations(objective: Objective) -> bool:
    """Whether the gradient is known to have so few operations that its calls take as long as its arithmetic."""
    return objective.operations is not None and objective.operations <= MAX_OPERATIONS


class WholeProgram:
    """A function of trees of tensors, compiled as one graph for the shapes and strides of its first inputs."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx  # takes a second, which eager programs save

        leaves, form = tree_flatten(inputs)
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        tensors = self._tensors(leaves)
        self._out_form: Any = None

        def flat(*tensors: Tensor) -> list[Tensor]:
            given = iter(tensors)
            filled = [
                next(given) if is_tensor else leaf for is_tensor, leaf in zip(self._is_tensor, leaves, strict=True)
            ]
            outputs, self._out_form = tree_flatten(function(*tree_unflatten(filled, form)))
            return outputs

        with torch.no_grad(), compiling(), tracing():
            graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
        if tensors[0].device.type == "cpu":
            rewrite_products(graph)
        with torch.no_grad(), compiling():
            self._graph = compile_graph(graph, tensors)

    def __call__(self, *inputs: Any) -> Any:
        """The result of the function for inputs of the shapes that it was compiled for."""
        with torch.no_grad():
            outputs = self._graph(*self._tensors(tree_flatten(inputs)[0]))
        return tree_unflatten(list(outputs), self._out_form)

    def _tensors(self, leaves: list[Any]) -> list[Tensor]:
        """The tensors among the leaves, all contiguous: the compiled code requires the strides it was compiled for."""
        return [leaf.contiguous() for leaf, is_tensor in zip(leaves, self._is_tensor, strict=True) if is_tensor]


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a recorded graph with Inductor; sums are not chosen by their time, as in `compile_whole`.

    With a shape environment, in which all shapes are constants, torch reads and writes its caches of compiled graphs.
    """
    import torch._inductor
    from torch._guards import TracingContext
    from torch._guards import tracing as compiler_context
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    use_project_cache()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with compiler_context(TracingContext(mode)):
        shapes: list[Any] = [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
        compiled: Any = torch._inductor.compile(graph, shapes, options={"deterministic": True})
    return compiled
