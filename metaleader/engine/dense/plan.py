"""The source of the kernels for one network and one shape of batches: constants, then `kernel.cu` or `kernel.cpp`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from metaleader.engine.dense.trace import Perceptron

# The number of threads of a block, and the largest number of rows whose outputs a thread computes at once
THREADS, _MAX_TILE = 256, 8
_TARGETS = {
    torch.float32: "float",
    torch.int64: "long long",
    torch.int32: "int",
    torch.int16: "short",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
}


@dataclass(frozen=True)
class Plan:
    """All that the kernels are compiled for.

    Attributes:
        perceptron: the layers of the network.
        offsets: where the weight and the bias of each layer begin in the flat parameters; -1 without a bias.
        steps: the number of inner steps.
        second: whether the gradient is exact to second order.
        num_support: the number of datapoints of a support set.
        num_query: the number of datapoints of a query set.
        targets: the dtypes of the targets of support and query sets.
    """

    perceptron: Perceptron
    offsets: tuple[tuple[int, int], ...]
    steps: int
    second: bool
    num_support: int
    num_query: int
    targets: tuple[torch.dtype, torch.dtype]

    @property
    def total(self) -> int:
        """The number of parameters."""
        return sum(layer.outputs * (layer.inputs + (layer.bias is not None)) for layer in self.perceptron.layers)

    @property
    def widths(self) -> list[int]:
        """The numbers of inputs of all layers, and of outputs of the last."""
        layers = self.perceptron.layers
        return [layers[0].inputs, *(layer.outputs for layer in layers)]

    @property
    def num_targets(self) -> int:
        """The number of targets of a datapoint."""
        return 1 if self.perceptron.labels else self.widths[-1]

    def constants(self) -> dict[str, int | float | list[int]]:
        """The constants of both kernels."""
        return {
            "LAYERS": len(self.perceptron.layers), "WIDTH": self.widths, "TOTAL": self.total, "STEPS": self.steps,
            "SECOND": int(self.second), "SUPPORT": self.num_support, "QUERY": self.num_query,
            "TARGETS": self.num_targets, "LABELS": int(self.perceptron.labels),
            "SMOOTHING": float(self.perceptron.smoothing), "NEGATIVE_SLOPE": float(self.perceptron.negative_slope),
            "FLAT_WEIGHT": [weight for weight, _ in self.offsets],
            "FLAT_BIAS": [bias for _, bias in self.offsets],
        }  # fmt: skip

    def layout(self) -> dict[str, int | float | list[int]]:
        """Where arrays begin in the memory of a task on a GPU, in floats."""
        widths, layers = self.widths, range(len(self.perceptron.layers))
        strides, hidden = [_stride(width) for width in widths], layers[1:]
        rows, curved = max(self.num_support, self.num_query), self.perceptron.activation != "relu"
        params, weights, biases = _Region(), [], []
        for i in layers:
            weights.append(params.take(widths[i + 1] * strides[i]))
            biases.append(params.take(widths[i + 1]))
        one = _Region()  # a pass over rows: an inner step, or the query
        values = [-1, *(one.take(rows * strides[i]) for i in hidden)]
        arguments = [-1, *(one.take(rows * strides[i] * curved) for i in hidden)]
        below = [-1, *(one.take(rows * strides[i] * curved) for i in hidden)]
        slopes = [one.take(rows * strides[i + 1]) for i in layers]
        share = one.take(rows * strides[-1] * self.perceptron.labels)
        arena = _Region()
        # The adjoint steps use the places of the query's parameters and pass again.
        places = {
            "THETA": arena.take(params.size * (self.steps + 1)),
            "LAMBDA": arena.take(params.size),
            "RATES": arena.take(2 * len(layers)),
            "SUPPORT_X": arena.take(rows * strides[0]),
            "QUERY_X": arena.take(rows * strides[0]),
            "SUPPORT_Y": arena.take(rows * self.num_targets),
            "QUERY_Y": arena.take(rows * self.num_targets),
            "ROW_LOSSES": arena.take(rows),
            "PASSES": arena.take(one.size * (self.steps + 1)),
        }
        return {
            "STRIDE": strides, "WEIGHT": weights, "BIAS": biases, "PARAMS": params.size, "VALUE": values,
            "ARGUMENT": arguments, "BELOW": below, "SLOPE": slopes, "SHARE": share, "PASS": one.size,
            **places, "ARENA": arena.size,
        }  # fmt: skip

    def arena(self) -> int:
        """The bytes of memory of a task on a GPU."""
        size = self.layout()["ARENA"]
        assert isinstance(size, int)
        return 4 * size

    def cuda_source(self, shared: bool, threads: int = THREADS) -> str:
        """The source for a GPU; with `shared`, the memory of a task is shared memory, else scratch."""
        constants = self.constants() | self.layout() | {"THREADS": threads, "MAX_TILE": _MAX_TILE}
        lines = ["#ifndef __CUDACC__", "#define __device__", "#endif"]
        return self._source("kernel.cu", [*lines, *(["#define IN_SHARED_MEMORY"] if shared else [])], constants)

    def cpp_source(self) -> str:
        """The source for a CPU."""
        return self._source("kernel.cpp", ["#define __device__"], self.constants())

    def _source(self, name: str, lines: list[str], constants: dict[str, int | float | list[int]]) -> str:
        support, query = (_TARGETS[dtype] for dtype in self.targets)
        parts = [
            *lines,
            *(_constant(*pair) for pair in constants.items()),
            f"#define ACTIVATION {self.perceptron.activation.upper()}",
            f"typedef {support} SupportTarget;",
            f"typedef {query} QueryTarget;",
            Path(__file__).with_name(name).read_text(encoding="utf-8"),
        ]
        return "\n".join(parts)

    @staticmethod
    def takes_targets(dtype: torch.dtype) -> bool:
        """Whether the kernels read targets of this dtype."""
        return dtype in _TARGETS


class _Region:
    """A memory of floats, divided into parts that begin at multiples of four."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, size: int) -> int:
        """Where a new part begins."""
        begin, self.size = self.size, self.size + -(-size // 4) * 4
        return begin


def _stride(width: int) -> int:
    """The stride of rows: an odd multiple of four, so that vectors of four floats of eight rows use all banks."""
    fours = -(-width // 4)
    return 4 * (fours + 1 - fours % 2)


def _constant(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"__device__ constexpr int {name}[] = {{{', '.join(map(str, value))}}};"
    kind, suffix = ("float", "f") if isinstance(value, float) else ("int", "")
    return f"constexpr {kind} {name} = {value}{suffix};"
