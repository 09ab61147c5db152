"""The source of the kernels for one network and one shape of batches: constants, then `kernel.cu`."""

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

    def constants(self) -> dict[str, int | float | list[int]]:
        """Sizes, and where arrays begin in the memory of a task, in floats."""
        layers = self.perceptron.layers
        widths = [layers[0].inputs, *(layer.outputs for layer in layers)]
        strides = [_stride(width) for width in widths]
        rows, targets = max(self.num_support, self.num_query), 1 if self.perceptron.labels else widths[-1]
        hidden = range(1, len(layers))

        params, weights, biases = _Region(), [], []
        for i in range(len(layers)):
            weights.append(params.take(widths[i + 1] * strides[i]))
            biases.append(params.take(widths[i + 1]))
        curved = self.perceptron.activation != "relu"
        one = _Region()  # a pass over rows: an inner step, or the query
        values = [-1, *(one.take(rows * strides[i]) for i in hidden)]
        arguments = [-1, *(one.take(rows * strides[i] * curved) for i in hidden)]
        below = [-1, *(one.take(rows * strides[i] * curved) for i in hidden)]
        slopes = [one.take(rows * strides[i + 1]) for i in range(len(layers))]
        share = one.take(rows * strides[-1] * self.perceptron.labels)
        arena = _Region()
        # The adjoint steps use the places of the query's parameters and pass again.
        places = {
            "THETA": arena.take(params.size * (self.steps + 1)),
            "LAMBDA": arena.take(params.size),
            "RATES": arena.take(2 * len(layers)),
            "SUPPORT_X": arena.take(rows * strides[0]),
            "QUERY_X": arena.take(rows * strides[0]),
            "SUPPORT_Y": arena.take(rows * targets),
            "QUERY_Y": arena.take(rows * targets),
            "ROW_LOSSES": arena.take(rows),
            "PASSES": arena.take(one.size * (self.steps + 1)),
        }
        return {
            "LAYERS": len(layers), "STEPS": self.steps, "SECOND": int(self.second),
            "SUPPORT": self.num_support, "QUERY": self.num_query, "TARGETS": targets,
            "LABELS": int(self.perceptron.labels), "SMOOTHING": float(self.perceptron.smoothing),
            "TOTAL": self.total, "WIDTH": widths, "STRIDE": strides,
            "WEIGHT": weights, "BIAS": biases, "PARAMS": params.size,
            "FLAT_WEIGHT": [weight for weight, _ in self.offsets], "FLAT_BIAS": [bias for _, bias in self.offsets],
            "VALUE": values, "ARGUMENT": arguments, "BELOW": below, "SLOPE": slopes, "SHARE": share, "PASS": one.size,
            **places, "ARENA": arena.size,
        }  # fmt: skip

    def arena(self) -> int:
        """The bytes of memory of a task."""
        size = self.constants()["ARENA"]
        assert isinstance(size, int)
        return 4 * size

    def source(self, shared: bool, threads: int = THREADS) -> str:
        """The source of the kernels; with `shared`, the memory of a task is shared memory, else scratch."""
        lines = ["#ifndef __CUDACC__", "#define __device__", "#endif"]
        lines += ["#define IN_SHARED_MEMORY"] if shared else []
        lines += [_constant(name, value) for name, value in self.constants().items()]
        lines += [f"constexpr int THREADS = {threads}, MAX_TILE = {_MAX_TILE};"]
        lines += [f"#define ACTIVATION {self.perceptron.activation.upper()}"]
        lines += [
            f"typedef {_TARGETS[self.targets[0]]} SupportTarget;",
            f"typedef {_TARGETS[self.targets[1]]} QueryTarget;",
        ]
        return "\n".join(lines) + "\n" + Path(__file__).with_name("kernel.cu").read_text(encoding="utf-8")

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
