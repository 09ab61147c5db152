"""Launch the kernels: the passes layer by layer, tile sizes, and a second CUDA stream."""
# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
import triton
from torch import Tensor

from metaleader.engine.conv.layout import Plan
from metaleader.engine.conv.trace import Layer
from metaleader.engine.conv.triton.conv import descend_kernel, forward_kernel, input_kernel, weight_kernel


@dataclass
class _Saved:
    """Per layer: outputs and their batch norm statistics, gradients at the input of ReLU and their statistics."""

    patches: Tensor
    y: list[Tensor]
    stats: list[Tensor]
    above: list[Tensor]
    above_stats: list[Tensor]


class _Division(NamedTuple):
    """The chunks of rows of each layer for the gradients of the weights, and the offsets of their partial sums.

    A partial sum of a layer covers its weight and the batch norm after it, in the order of the flat parameters.
    """

    chunks: list[int]
    starts: list[int]
    size: int
    # Per block of parameters: begin, end, offset of its first partial sum, distance to the next, their number.
    blocks: Tensor


class _Parts(NamedTuple):
    """A gradient as partial sums, (tasks, size of the division)."""

    values: Tensor
    division: _Division


class TritonPasses:
    """The four passes on a GPU, in float32; the plan needs `multiple=16`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._counts: dict[int, Tensor] = {}
        self._divisions: dict[tuple[int, int], _Division] = {}

    @staticmethod
    def takes(layers: Sequence[Layer]) -> bool:
        """Whether the kernels support these layers: 16, 32 or 64 filters each, sizes that tensor cores support."""
        return all(layer.filters in (16, 32, 64) for layer in layers)

    def forward(self, flat: Tensor, patches: Tensor) -> tuple[Tensor, _Saved]:
        """The output of the last convolution, and the intermediate results for the other passes."""
        assert flat.is_contiguous() and patches.is_contiguous(), "the kernels need contiguous tensors"  # noqa: PT018
        saved = _Saved(patches, [], [], [], [])
        for i in range(len(self.plan.layers)):
            y, stats = self._run_forward(i, flat, flat, saved, None)
            saved.y.append(y)
            saved.stats.append(stats)
        return saved.y[-1], saved

    def backward(self, flat: Tensor, saved: _Saved, slope: Tensor) -> _Parts:
        """The gradient, as partial sums."""
        return self._run_backward(flat, flat, saved, slope, None, slope)

    def forward_tangent(self, flat: Tensor, saved: _Saved, v: Tensor) -> tuple[Tensor, _Saved]:
        """The tangent of `forward`."""
        moved = _Saved(saved.patches, [], [], [], [])
        for i in range(len(self.plan.layers)):
            y, stats = self._run_forward(i, flat, v, saved, moved)
            moved.y.append(y)
            moved.stats.append(stats)
        return moved.y[-1], moved

    def backward_tangent(self, flat: Tensor, saved: _Saved, v: Tensor, moved: _Saved, slope_dot: Tensor) -> _Parts:
        """The Hessian times v, as partial sums."""
        return self._run_backward(flat, v, saved, saved.above[-1], moved, slope_dot)

    def descend(self, base: Tensor, parts: _Parts, rates: Tensor | None) -> Tensor:
        """Subtract the sum of the partial sums, multiplied by step sizes if given."""
        return self._add_up(base, parts, rates)

    def whole(self, parts: _Parts) -> Tensor:
        """The sum of the partial sums."""
        return self._add_up(None, parts, None)

    def _add_up(self, base: Tensor | None, parts: _Parts, rates: Tensor | None) -> Tensor:
        values, division = parts
        out = values.new_empty(len(values), self.plan.total)
        # One row of step sizes for all tasks, or one row per task.
        row = self.plan.total if rates is not None and len(rates) > 1 else 0
        descend_kernel[(len(division.blocks), len(values))](
            base, values, rates, out, division.blocks, self.plan.total, division.size, row,
            BLOCK=_BLOCK, RATED=rates is not None, BASED=base is not None,
        )  # fmt: skip
        return out

    def _run_forward(
        self, i: int, flat: Tensor, v: Tensor, saved: _Saved, moved: _Saved | None
    ) -> tuple[Tensor, Tensor]:
        layer, first, last = self.plan.layers[i], i == 0, i == len(self.plan.layers) - 1
        (high, wide), (out_high, out_wide) = self.plan.sizes[i : i + 2]
        tasks, images = len(flat), saved.patches.shape[1] // (self.plan.sizes[1][0] * self.plan.sizes[1][1])
        rows = images * out_high * out_wide
        block, depth, warps, stages = _forward_tile(rows, layer, first)
        blocks = triton.cdiv(rows, block)
        out = flat.new_empty(tasks, rows, layer.filters)
        part, stats = flat.new_empty(tasks, blocks, 2, layer.filters), flat.new_empty(tasks, 2, layer.filters)
        x = self._inputs(i, saved, moved)
        y, y_stats = (saved.y[i], saved.stats[i]) if moved else (out, stats)
        forward_kernel[(blocks, tasks)](
            *x, flat, v, y, y_stats, out, part, self._count(flat), stats,
            rows, x[0].shape[1], blocks, self.plan.total, self._norm_at(i), self.plan.starts[i],
            high, wide, out_high, out_wide,
            CIN=self.plan.inputs[0] if first else layer.channels, COUT=layer.filters, K=1 if first else layer.kernel,
            S=layer.stride, PAD=layer.padding, EPS=0.0 if last else self.plan.layers[i + 1].eps,
            BM=block, BK=depth, FIRST=first, SUMS=not last, TANGENT=moved is not None, PREC=_precision(),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out, stats

    def _run_backward(
        self, flat: Tensor, v: Tensor, saved: _Saved, slope: Tensor, moved: _Saved | None, slope_dot: Tensor
    ) -> _Parts:
        top = len(self.plan.layers) - 1
        division = self._division(flat, [y.shape[1] for y in saved.y])
        parts = _Parts(flat.new_empty(len(flat), division.size), division)
        # The gradient at the current layer and its statistics, and the same for its tangent; at the top, the slope.
        above = (slope.contiguous(), slope)
        above_dot = (slope_dot.contiguous(), slope_dot) if moved else above
        if moved is None:
            saved.above, saved.above_stats = [above[0]], [above[1]]
        with _Beside(flat.device) as beside:
            for i in reversed(range(top + 1)):
                y_dot = moved or saved
                slopes = (
                    *above, saved.y[i], saved.stats[i], *above_dot, y_dot.y[i], y_dot.stats[i], flat, v,
                )  # fmt: skip
                # No later kernel needs the gradients of the weights, so they run on the second stream.
                with beside.stream(slopes):
                    self._run_weight(i, saved, moved, slopes, parts)
                if i == 0:
                    break
                found = self._run_input(i, saved, moved, slopes)
                if moved is None:
                    above = above_dot = found
                    saved.above.insert(0, found[0])
                    saved.above_stats.insert(0, found[1])
                else:
                    above, above_dot = (saved.above[i - 1], saved.above_stats[i - 1]), found
        return parts

    def _run_weight(
        self, i: int, saved: _Saved, moved: _Saved | None, slopes: tuple[Tensor, ...], parts: _Parts
    ) -> None:
        layer, first, top = self.plan.layers[i], i == 0, i == len(self.plan.layers) - 1
        (high, wide), (out_high, out_wide) = self.plan.sizes[i : i + 2]
        x, rows = self._inputs(i, saved, moved), saved.y[i].shape[1]
        block, depth, warps, stages = _weight_tile(rows, layer, first, moved is not None)
        groups, division = triton.cdiv(self.plan.inputs[i], depth), parts.division
        chunk = triton.cdiv(triton.cdiv(rows, division.chunks[i]), block) * block
        weight_kernel[(groups * division.chunks[i], len(x[0]))](
            *x, *slopes, parts.values,
            rows, x[0].shape[1], groups, chunk, division.starts[i], division.size, self.plan.total, self._norm_at(i),
            0 if top else self._norm_at(i + 1), high, wide, out_high, out_wide,
            CIN=self.plan.inputs[0] if first else layer.channels, COUT=layer.filters, K=1 if first else layer.kernel,
            S=layer.stride, PAD=layer.padding, BM=block, BK=depth, FIRST=first, TOP=top, TANGENT=moved is not None,
            PREC=_precision(), num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def _division(self, like: Tensor, rows: list[int]) -> _Division:
        key = (len(like), rows[0])
        if key not in self._divisions:
            chunks, starts, blocks, at = [], [], [], 0
            ends = [*self.plan.starts[1:], self.plan.total]
            for i, (begin, end) in enumerate(zip(self.plan.starts, ends, strict=True)):
                groups = triton.cdiv(self.plan.inputs[i], _weight_tile(rows[i], self.plan.layers[i], i == 0, False)[1])
                chunks.append(_chunks(len(like) * groups, rows[i]))
                starts.append(at)
                blocks += [(one, end, at + one - begin, end - begin, chunks[i]) for one in range(begin, end, _BLOCK)]
                at += chunks[i] * (end - begin)
            self._divisions[key] = _Division(
                chunks, starts, at, torch.tensor(blocks, dtype=torch.int32, device=like.device)
            )
        return self._divisions[key]

    def _run_input(
        self, i: int, saved: _Saved, moved: _Saved | None, slopes: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        layer, top, stride = self.plan.layers[i], i == len(self.plan.layers) - 1, self.plan.layers[i].stride
        (high, wide), (out_high, out_wide) = self.plan.sizes[i : i + 2]
        x = self._inputs(i, saved, moved)
        tasks, images = len(x[0]), x[0].shape[1] // (high * wide)
        cells = images * -(-high // stride) * -(-wide // stride)
        block, share, warps, stages = _input_tile(tasks * cells, layer)
        cell_blocks = triton.cdiv(cells, block)
        blocks = cell_blocks * (stride * stride // share)
        out, stats = torch.empty_like(x[0]), x[0].new_empty(tasks, 2, layer.channels)
        part = x[0].new_empty(tasks, blocks, 2, layer.channels)
        input_kernel[(blocks, tasks)](
            *slopes, *x, saved.above[i - 1] if moved else out, out, part, self._count(x[0]), stats,
            images, blocks, cell_blocks, share, self.plan.total, 0 if top else self._norm_at(i + 1), self._norm_at(i),
            self.plan.starts[i], high, wide, out_high, out_wide,
            CIN=layer.channels, COUT=layer.filters, K=layer.kernel, S=stride, PAD=layer.padding,
            BM=block, TOP=top, TANGENT=moved is not None, PREC=_precision(), num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out, stats

    def _inputs(self, i: int, saved: _Saved, moved: _Saved | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A layer's input and its statistics, then those of its tangent; tensors that do not exist are never read."""
        if i == 0:
            x = saved.patches
            return x, x, x, x
        dot = moved or saved
        return saved.y[i - 1], saved.stats[i - 1], dot.y[i - 1], dot.stats[i - 1]

    def _norm_at(self, i: int) -> int:
        return self.plan.starts[i] - 2 * self.plan.layers[i].channels if i else 0

    def _count(self, like: Tensor) -> Tensor:
        """The number of finished blocks per task; the last block resets it to zero."""
        if len(like) not in self._counts:
            self._counts[len(like)] = torch.zeros(len(like), dtype=torch.int32, device=like.device)
        return self._counts[len(like)]


class _Beside:
    """A second CUDA stream, joined with the current one at exit; without CUDA (Triton's interpreter) a no-op."""

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Freed memory is reused by the current stream: keep the inputs of the second stream until they join.
        self._held: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def stream(self, held: Any) -> contextlib.AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        side = self._streams.setdefault(self._device, torch.cuda.Stream(self._device))
        side.wait_stream(torch.cuda.current_stream(self._device))
        self._held.append(held)
        return torch.cuda.stream(side)

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda" and self._held:
            torch.cuda.current_stream(self._device).wait_stream(self._streams[self._device])


# Parameters per block when partial sums are added.
_BLOCK = 1024

# Tile sizes, the fastest in sweeps on an H200 over the paper's shapes: rows per block, depth per step, warps, stages.


def _forward_tile(rows: int, layer: Layer, first: bool) -> tuple[int, int, int, int]:
    if first:
        return 64, 16, 2, 3
    block = 16 if layer.filters >= 32 else 32 if rows < 2048 else 64
    # With very many rows, use larger blocks to limit their number.
    while rows > 512 * block and block < 128:
        block *= 2
    return block, 0, 4 if rows <= 64 or block == 128 else 2, 2 if _is_wide(layer) else 3


def _weight_tile(rows: int, layer: Layer, first: bool, tangent: bool) -> tuple[int, int, int, int]:
    if first:
        return 32, 32, 2, 1
    if rows <= 64 or _is_wide(layer):
        return 16, layer.channels, max(2, layer.filters // 16), 1
    if tangent:
        return 16, 2 * layer.channels, 2, 3 if layer.channels < 32 else 1
    return 32, 2 * layer.channels, layer.filters // 8, 1


def _input_tile(cells: int, layer: Layer) -> tuple[int, int, int, int]:
    """Cells per block, pixel positions per block, warps, stages; `cells` counts the cells of all tasks."""
    if _is_wide(layer):
        return 16, layer.stride**2 if cells >= 2**13 else 1, 4, 1
    if cells >= 2**13:
        narrow = layer.channels < 32
        return (64 if cells >= 2**15 else 32, layer.stride**2, 2, 3) if narrow else (64, layer.stride**2, 4, 1)
    return (32, 1, 2, 2) if cells >= 2**11 else (16, 1, 4 if cells <= 512 else 2, 3)


def _is_wide(layer: Layer) -> bool:
    """Whether the weight of one tap is large for registers and shared memory."""
    return layer.channels * layer.filters > 32 * 32


def _chunks(columns: int, rows: int) -> int:
    """The number of chunks of rows for the weights' gradients: enough blocks for a GPU, no chunk small or empty."""
    wanted = max(600 // columns, min(4, rows // 128), 1)
    return triton.cdiv(rows, triton.cdiv(triton.cdiv(rows, min(wanted, 64)), 32) * 32)


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
