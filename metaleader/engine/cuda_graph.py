"""A program as one CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from metaleader.engine.compiled import compiling
from metaleader.gradient.attention import plain_attention
from metaleader.tasks import tensors_of


class Captured:
    """A program as one CUDA graph: inputs are copied in, outputs copied out.

    Args:
        program: called with inputs of fixed shapes; it must not wait for the device.
        inputs: of the first call.
        pool: the memory pool of the graph.
        compiled: whether the program has compiled parts.
    """

    def __init__(self, program: Callable[..., Any], inputs: tuple[Any, ...], pool: Any, compiled: bool) -> None:
        given = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
        static = tensors_of(given)
        # Grouped by dtype: torch copies a group of one dtype in one launch.
        dtypes = dict.fromkeys(leaf.dtype for leaf in static)
        self._groups = [[i for i, leaf in enumerate(static) if leaf.dtype == dtype] for dtype in dtypes]
        self._inputs = [[static[i] for i in group] for group in self._groups]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        settings = compiling if compiled else plain_attention
        with torch.cuda.stream(stream), settings():
            for _ in range(2):
                program(*given)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        stream = _main_stream(torch.cuda.current_device())
        # "thread_local": other threads may allocate memory during the capture.
        graph = torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        with graph, settings():
            outputs, self._out_form = tree_flatten(program(*given))
        self._outputs = outputs
        self._program = program

    def __call__(self, *inputs: Any) -> Any:
        """Replay the graph with inputs of the shapes that it was captured with."""
        leaves = tensors_of(inputs)
        for held, group in zip(self._inputs, self._groups, strict=True):
            torch._foreach_copy_(held, [leaves[i] for i in group])  # pyright: ignore[reportPrivateImportUsage]
        self._graph.replay()
        copies = torch._foreach_mul(self._outputs, 1)  # pyright: ignore[reportPrivateImportUsage]
        return tree_unflatten(list(copies), self._out_form)


@functools.cache
def _main_stream(device: int) -> torch.cuda.Stream:
    """The stream on which all graphs of a device are captured: pool memory is reused on one stream only.

    Its priority is high, so that kernels of side streams do not delay it.
    """
    return torch.cuda.Stream(device, priority=-1)
