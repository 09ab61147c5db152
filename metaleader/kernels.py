"""The four passes through a chain's convolutions as Triton kernels, one for each layer and product.

A convolution's kernel reads the output y of the layer before, applies batch norm and ReLU as it goes, and leaves its
own output with the sums that the next batch norm needs, so no tensor is written but y. The backward kernels do the
same with the gradient `above` at ReLU's input, from which the slope at the layer's output follows by batch norm's
formula. With TANGENT a kernel computes the tangent of what it computes without.

Sums over rows are taken block by block; the last block of a task to finish adds the blocks up, always in the same
order, so results are the same from run to run. Products are float32 by three TF32 products each (an error of 1e-7),
or by one where torch is allowed TF32.
"""
# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from metaleader.chain import Layer, Plan


@triton.jit
def _finish(
    PART,
    COUNT,
    OUT,
    b,
    block,
    blocks,
    rows,
    BM: tl.constexpr,
    EPS: tl.constexpr,
    C: tl.constexpr,
    MOMENTS: tl.constexpr,
):
    """The last block of a task combines all: mean and inverse deviation, or two sums over the number of rows."""
    tl.debug_barrier()
    arrived = tl.atomic_add(COUNT + b, 1, sem="acq_rel")
    if arrived == blocks - 1:
        tl.debug_barrier()
        j = tl.arange(0, 32)
        c = tl.arange(0, C)
        first = tl.zeros((C,), tl.float32)
        second = tl.zeros((C,), tl.float32)
        base = PART + b.to(tl.int64) * blocks * 2 * C
        for start in range(0, blocks, 32):
            at = base + (start + j)[:, None] * 2 * C + c[None, :]
            there = (start + j)[:, None] < blocks
            value = tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
            if MOMENTS:
                num = tl.minimum(tl.maximum(rows - (start + j) * BM, 0), BM).to(tl.float32)
                value = value * num[:, None]
            else:
                second += tl.sum(tl.load(at + C, mask=there, other=0.0, cache_modifier=".cg"), 0)
            first += tl.sum(value, 0)
        first = first / rows
        if MOMENTS:
            for start in range(0, blocks, 32):
                at = base + (start + j)[:, None] * 2 * C + c[None, :]
                there = (start + j)[:, None] < blocks
                num = tl.minimum(tl.maximum(rows - (start + j) * BM, 0), BM).to(tl.float32)
                away = tl.load(at, mask=there, other=0.0, cache_modifier=".cg") - first[None, :]
                spread = tl.load(at + C, mask=there, other=0.0, cache_modifier=".cg")
                second += tl.sum(spread + away * away * num[:, None], 0)
            second = 1.0 / tl.sqrt_rn(second / rows + EPS)
        else:
            second = second / rows
        tl.store(OUT + b * 2 * C + c, first)
        tl.store(OUT + b * 2 * C + C + c, second)
        tl.store(COUNT + b, 0)


@triton.jit
def _input_constants(STATS, DSTATS, flat, v, b, norm_at, c, C: tl.constexpr, TANGENT: tl.constexpr):
    """What a layer makes of its input y: a = relu(A (y - mean) + shift), a_dot = A y_dot + F (y - mean) + D there."""
    mean = tl.load(STATS + b * 2 * C + c)
    inverse = tl.load(STATS + b * 2 * C + C + c)
    A = tl.load(flat + norm_at + c) * inverse
    shift = tl.load(flat + norm_at + C + c)
    F = A
    D = shift
    if TANGENT:
        F = inverse * (tl.load(v + norm_at + c) - A * tl.load(DSTATS + b * 2 * C + C + c))
        D = tl.load(v + norm_at + C + c) - A * tl.load(DSTATS + b * 2 * C + c)
    return mean, A, shift, F, D


@triton.jit(do_not_specialize=["rows", "rows_in", "blocks", "H", "W", "OH", "OW"])
def _forward(
    X, XSTATS, XD, XDSTATS, FLAT, V, Y, YSTATS, OUT, PART, COUNT, OUTSTATS,
    rows, rows_in, blocks, total, norm_at, weight_at, H, W, OH, OW,
    CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr, EPS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr, SUMS: tl.constexpr, TANGENT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """A layer's output, with the mean and spread of each block of rows."""
    block, b = tl.program_id(0), tl.program_id(1)
    wide = b.to(tl.int64)
    m = block * BM + tl.arange(0, BM)
    o = tl.arange(0, COUT)
    there = m < rows
    X += wide * rows_in * CIN
    XD += wide * rows_in * CIN
    flat = FLAT + wide * total
    v = V + wide * total
    acc = tl.zeros((BM, COUT), tl.float32)
    if FIRST:
        weights = v if TANGENT else flat
        for start in range(0, CIN, BK):
            k = start + tl.arange(0, BK)
            inside = k < CIN
            value = tl.load(X + m[:, None] * CIN + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weights + weight_at + k[:, None] * COUT + o[None, :], mask=inside[:, None], other=0.0)
            acc = tl.dot(value, weight, acc, input_precision=PREC)
    else:
        c = tl.arange(0, CIN)
        mean, A, shift, F, D = _input_constants(XSTATS, XDSTATS, flat, v, b, norm_at, c, CIN, TANGENT)
        n = m // (OH * OW)
        y = (m - n * (OH * OW)) // OW
        x = (m - n * (OH * OW) - y * OW) * S - PAD
        y = y * S - PAD
        for tap in range(K * K):
            from_y, from_x = y + tap // K, x + tap % K
            ok = there & (from_y >= 0) & (from_y < H) & (from_x >= 0) & (from_x < W)
            at = ((n * H + from_y) * W + from_x)[:, None] * CIN + c[None, :]
            away = tl.load(X + at, mask=ok[:, None], other=0.0) - mean[None, :]
            a = tl.where(ok[:, None], tl.maximum(away * A[None, :] + shift[None, :], 0.0), 0.0)
            at_weight = weight_at + (tap * CIN + c)[:, None] * COUT + o[None, :]
            weight = tl.load(flat + at_weight)
            if TANGENT:
                dot = tl.load(XD + at, mask=ok[:, None], other=0.0)
                a_dot = tl.where(a > 0, dot * A[None, :] + away * F[None, :] + D[None, :], 0.0)
                acc = tl.dot(a_dot, weight, acc, input_precision=PREC)
                acc = tl.dot(a, tl.load(v + at_weight), acc, input_precision=PREC)
            else:
                acc = tl.dot(a, weight, acc, input_precision=PREC)
    at = m[:, None] * COUT + o[None, :]
    OUT += wide * rows * COUT
    tl.store(OUT + at, acc, mask=there[:, None])
    if SUMS:
        part = PART + (wide * blocks + block) * 2 * COUT
        acc = tl.where(there[:, None], acc, 0.0)
        first = tl.sum(acc, 0)
        if TANGENT:
            out = tl.load(Y + wide * rows * COUT + at, mask=there[:, None], other=0.0)
            mean = tl.load(YSTATS + b * 2 * COUT + o)
            inverse = tl.load(YSTATS + b * 2 * COUT + COUT + o)
            second = tl.sum(acc * (out - mean[None, :]), 0) * inverse
        else:
            first = first / tl.minimum(rows - block * BM, BM)
            away = tl.where(there[:, None], acc - first[None, :], 0.0)
            second = tl.sum(away * away, 0)
        tl.store(part + o, first)
        tl.store(part + COUT + o, second)
        _finish(PART, COUNT, OUTSTATS, b, block, blocks, rows, BM, EPS, COUT, not TANGENT)


@triton.jit
def _slope_constants(
    GSTATS, YSTATS, GDSTATS, YDSTATS, flat, v, b, norm_at, o,
    C: tl.constexpr, TOP: tl.constexpr, TANGENT: tl.constexpr,
):  # fmt: skip
    """The slope at a channel of a layer's output y, A above + B (y - mean) + D, and its tangent.

    slope_dot = A above_dot + F above + B y_dot + E (y - mean) + R. At the top the slope is given.
    """
    mean = tl.zeros((C,), tl.float32)
    A, B, D, F, E, R = mean, mean, mean, mean, mean, mean
    if not TOP:
        mean = tl.load(YSTATS + b * 2 * C + o)
        inverse = tl.load(YSTATS + b * 2 * C + C + o)
        total = tl.load(GSTATS + b * 2 * C + o)
        along = tl.load(GSTATS + b * 2 * C + C + o) * inverse
        A = tl.load(flat + norm_at + o) * inverse
        B = -A * along
        D = -A * total
        if TANGENT:
            dot_mean = tl.load(YDSTATS + b * 2 * C + o)
            dot_along = tl.load(YDSTATS + b * 2 * C + C + o) * inverse
            total_dot = tl.load(GDSTATS + b * 2 * C + o)
            around = tl.load(GDSTATS + b * 2 * C + C + o) * inverse
            F = tl.load(v + norm_at + o) * inverse - A * dot_along
            E = A * (along * dot_along - around) - F * along
            R = A * (along * dot_mean - total_dot) - F * total
    return mean, A, B, D, F, E, R


@triton.jit
def _slopes(G, Y, GD, YD, at, ok, mean, A, B, D, F, E, R, TOP: tl.constexpr, TANGENT: tl.constexpr):
    """The slope at places of a layer's output, and its tangent (without TANGENT, the slope again)."""
    above = tl.load(G + at, mask=ok, other=0.0)
    slope = above
    slope_dot = above
    if TANGENT:
        slope_dot = tl.load(GD + at, mask=ok, other=0.0)
    if not TOP:
        away = tl.load(Y + at, mask=ok, other=0.0) - mean[None, :]
        slope = tl.where(ok, above * A[None, :] + away * B[None, :] + D[None, :], 0.0)
        if TANGENT:
            y_dot = tl.load(YD + at, mask=ok, other=0.0)
            slope_dot = (
                slope_dot * A[None, :] + above * F[None, :] + y_dot * B[None, :] + away * E[None, :] + R[None, :]
            )
            slope_dot = tl.where(ok, slope_dot, 0.0)
        else:
            slope_dot = slope
    return slope, slope_dot


@triton.jit(do_not_specialize=["images", "blocks", "class_blocks", "H", "W", "OH", "OW"])
def _input(
    G, GSTATS, Y, YSTATS, GD, GDSTATS, YD, YDSTATS, FLAT, V,
    LOW, LOWSTATS, LOWD, LOWDSTATS, LOWG, OUT, PART, COUNT, OUTSTATS,
    images, blocks, class_blocks, total, above_at, norm_at, weight_at, H, W, OH, OW,
    CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, TOP: tl.constexpr, TANGENT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The gradient at the ReLU before a layer; rows are divided by their remainder modulo the stride."""
    block, b = tl.program_id(0), tl.program_id(1)
    wide = b.to(tl.int64)
    part_of = block // class_blocks
    below, right = part_of // S, part_of % S
    high, across = (H - below + S - 1) // S, (W - right + S - 1) // S
    size = tl.maximum(high * across, 1)
    m = (block - part_of * class_blocks) * BM + tl.arange(0, BM)
    there = m < images * high * across
    n = m // size
    y = (m - n * size) // tl.maximum(across, 1)
    x = (m - n * size - y * across) * S + right
    y = y * S + below
    c, o = tl.arange(0, CIN), tl.arange(0, COUT)
    flat = FLAT + wide * total
    v = V + wide * total
    beyond = wide * images * OH * OW * COUT
    G += beyond
    Y += beyond
    GD += beyond
    YD += beyond
    mean, A, B, D, F, E, R = _slope_constants(
        GSTATS, YSTATS, GDSTATS, YDSTATS, flat, v, b, above_at, o, COUT, TOP, TANGENT
    )
    acc = tl.zeros((BM, CIN), tl.float32)
    for ky in range((below + PAD) % S, K, S):
        for kx in range((right + PAD) % S, K, S):
            to_y, to_x = (y + PAD - ky) // S, (x + PAD - kx) // S
            ok = there & (y + PAD >= ky) & (to_y < OH) & (x + PAD >= kx) & (to_x < OW)
            at = ((n * OH + to_y) * OW + to_x)[:, None] * COUT + o[None, :]
            slope, slope_dot = _slopes(G, Y, GD, YD, at, ok[:, None], mean, A, B, D, F, E, R, TOP, TANGENT)
            at_weight = weight_at + ((ky * K + kx) * CIN + c)[None, :] * COUT + o[:, None]
            weight = tl.load(flat + at_weight)
            acc = tl.dot(slope_dot, weight, acc, input_precision=PREC)
            if TANGENT:
                acc = tl.dot(slope, tl.load(v + at_weight), acc, input_precision=PREC)
    at = ((n * H + y) * W + x)[:, None] * CIN + c[None, :]
    lower = wide * images * H * W * CIN
    ok = there[:, None]
    mean = tl.load(LOWSTATS + b * 2 * CIN + c)[None, :]
    inverse = tl.load(LOWSTATS + b * 2 * CIN + CIN + c)[None, :]
    scale = tl.load(flat + norm_at + c)[None, :]
    shift = tl.load(flat + norm_at + CIN + c)[None, :]
    away = tl.load(LOW + lower + at, mask=ok, other=0.0) - mean
    acc = tl.where(ok & (away * (scale * inverse) + shift > 0), acc, 0.0)
    tl.store(OUT + lower + at, acc, mask=ok)
    scaled = away * inverse
    around = acc * scaled
    if TANGENT:
        dot_mean = tl.load(LOWDSTATS + b * 2 * CIN + c)[None, :]
        dot_along = tl.load(LOWDSTATS + b * 2 * CIN + CIN + c)[None, :]
        dot = tl.load(LOWD + lower + at, mask=ok, other=0.0)
        around += tl.load(LOWG + lower + at, mask=ok, other=0.0) * inverse * (dot - dot_mean - scaled * dot_along)
    part = PART + (wide * blocks + block) * 2 * CIN
    tl.store(part + c, tl.sum(acc, 0))
    tl.store(part + CIN + c, tl.sum(tl.where(ok, around, 0.0), 0))
    _finish(PART, COUNT, OUTSTATS, b, block, blocks, images * H * W, BM, 0.0, CIN, False)


@triton.jit(do_not_specialize=["rows", "rows_in", "groups", "chunk", "chunks", "H", "W", "OH", "OW"])
def _weight(
    X, XSTATS, XD, XDSTATS, G, GSTATS, Y, YSTATS, GD, GDSTATS, YD, YDSTATS, FLAT, V, OUT,
    rows, rows_in, groups, chunk, chunks, total, norm_at, above_at, weight_at, H, W, OH, OW,
    CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr, TOP: tl.constexpr, TANGENT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """The gradient of a layer's weight, and of the batch norm after it, over one part of the rows."""
    group, part, b = tl.program_id(0) % groups, tl.program_id(0) // groups, tl.program_id(1)
    wide = b.to(tl.int64)
    X += wide * rows_in * CIN
    XD += wide * rows_in * CIN
    beyond = wide * rows * COUT
    G += beyond
    Y += beyond
    GD += beyond
    YD += beyond
    flat = FLAT + wide * total
    v = V + wide * total
    k = group * BK + tl.arange(0, BK)
    o = tl.arange(0, COUT)
    tap = k // CIN
    c = k - tap * CIN
    inside = k < K * K * CIN
    mean, A, B, D, F, E, R = _slope_constants(
        GSTATS, YSTATS, GDSTATS, YDSTATS, flat, v, b, above_at, o, COUT, TOP, TANGENT
    )
    if not FIRST:
        x_mean, x_A, x_shift, x_F, x_D = _input_constants(XSTATS, XDSTATS, flat, v, b, norm_at, c, CIN, TANGENT)
    acc = tl.zeros((BK, COUT), tl.float32)
    stop = tl.minimum(part * chunk + chunk, rows)
    for start in range(part * chunk, stop, BM):
        m = start + tl.arange(0, BM)
        there = m < stop
        at = m[:, None] * COUT + o[None, :]
        slope, slope_dot = _slopes(G, Y, GD, YD, at, there[:, None], mean, A, B, D, F, E, R, TOP, TANGENT)
        if FIRST:
            ok = there[:, None] & inside[None, :]
            value = tl.load(X + m[:, None] * CIN + k[None, :], mask=ok, other=0.0)
            acc = tl.dot(tl.trans(value), slope_dot, acc, input_precision=PREC)
        else:
            n = m // (OH * OW)
            y = (m - n * (OH * OW)) // OW
            x = (m - n * (OH * OW) - y * OW) * S - PAD
            from_y = (y * S - PAD)[:, None] + (tap // K)[None, :]
            from_x = x[:, None] + (tap % K)[None, :]
            ok = there[:, None] & inside[None, :] & (from_y >= 0) & (from_y < H) & (from_x >= 0) & (from_x < W)
            at = (((n * H)[:, None] + from_y) * W + from_x) * CIN + c[None, :]
            away = tl.load(X + at, mask=ok, other=0.0) - x_mean[None, :]
            a = tl.where(ok, tl.maximum(away * x_A[None, :] + x_shift[None, :], 0.0), 0.0)
            acc = tl.dot(tl.trans(a), slope_dot, acc, input_precision=PREC)
            if TANGENT:
                dot = tl.load(XD + at, mask=ok, other=0.0)
                a_dot = tl.where(a > 0, dot * x_A[None, :] + away * x_F[None, :] + x_D[None, :], 0.0)
                acc = tl.dot(tl.trans(a_dot), slope, acc, input_precision=PREC)
    out = OUT + (wide * chunks + part) * total
    tl.store(out + weight_at + k[:, None] * COUT + o[None, :], acc, mask=inside[:, None])
    if not TOP:
        sums = GDSTATS if TANGENT else GSTATS
        here = tl.where(part == 0, rows * 1.0, 0.0)
        first = o < tl.where(group == 0, COUT, 0)
        tl.store(out + above_at + o, tl.load(sums + b * 2 * COUT + COUT + o) * here, mask=first)
        tl.store(out + above_at + COUT + o, tl.load(sums + b * 2 * COUT + o) * here, mask=first)


@triton.jit
def _descend(BASE, PARTS, RATES, OUT, total, chunks, BLOCK: tl.constexpr, RATED: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < total
    change = tl.zeros((BLOCK,), tl.float32)
    for part in range(chunks):
        change += tl.load(PARTS + (b * chunks + part) * total + i, mask=ok, other=0.0)
    if RATED:
        change = change * tl.load(RATES + i, mask=ok, other=0.0)
    tl.store(OUT + b * total + i, tl.load(BASE + b * total + i, mask=ok, other=0.0) - change, mask=ok)


@dataclass
class _Saved:
    """By layer: outputs with their batch norm's statistics, and gradients at ReLU's input with theirs."""

    patches: Tensor
    y: list[Tensor]
    stats: list[Tensor]
    above: list[Tensor]
    above_stats: list[Tensor]


class TritonPasses:
    """The four passes on a GPU, in float32; the plan's first layer has inputs in multiples of 16."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._counts: dict[int, Tensor] = {}

    @staticmethod
    def takes(layers: Sequence[Layer]) -> bool:
        """Whether the kernels are made for these layers: powers of two, as tensor cores like them."""
        return all(layer.filters in (16, 32, 64, 128) for layer in layers)

    def forward(self, flat: Tensor, patches: Tensor) -> tuple[Tensor, _Saved]:
        """The last convolution's output, and what the other passes need."""
        assert flat.is_contiguous() and patches.is_contiguous(), "kernels go by offsets"  # noqa: PT018
        saved = _Saved(patches, [], [], [], [])
        for i in range(len(self.plan.layers)):
            y, stats = self._run_forward(i, flat, flat, saved, None)
            saved.y.append(y)
            saved.stats.append(stats)
        return saved.y[-1], saved

    def backward(self, flat: Tensor, saved: _Saved, slope: Tensor) -> Tensor:
        """The gradient in parts."""
        return self._run_backward(flat, flat, saved, slope, None, slope)

    def forward_tangent(self, flat: Tensor, saved: _Saved, v: Tensor) -> tuple[Tensor, _Saved]:
        """The tangent of `forward`."""
        moved = _Saved(saved.patches, [], [], [], [])
        for i in range(len(self.plan.layers)):
            y, stats = self._run_forward(i, flat, v, saved, moved)
            moved.y.append(y)
            moved.stats.append(stats)
        return moved.y[-1], moved

    def backward_tangent(self, flat: Tensor, saved: _Saved, v: Tensor, moved: _Saved, slope_dot: Tensor) -> Tensor:
        """The Hessian times v, in parts."""
        return self._run_backward(flat, v, saved, saved.above[-1], moved, slope_dot)

    def descend(self, base: Tensor, parts: Tensor, rates: Tensor | None) -> Tensor:
        """Subtract the sum of the parts, times step sizes if there are any."""
        out = torch.empty_like(base)
        tasks, chunks, total = parts.shape
        grid = (triton.cdiv(total, 1024), tasks)
        _descend[grid](base, parts, rates, out, total, chunks, BLOCK=1024, RATED=rates is not None)
        return out

    def _run_forward(
        self, i: int, flat: Tensor, v: Tensor, saved: _Saved, moved: _Saved | None
    ) -> tuple[Tensor, Tensor]:
        layer, first, last = self.plan.layers[i], i == 0, i == len(self.plan.layers) - 1
        (high, wide), (out_high, out_wide) = self.plan.sizes[i : i + 2]
        tasks, images = len(flat), saved.patches.shape[1] // (self.plan.sizes[1][0] * self.plan.sizes[1][1])
        rows = images * out_high * out_wide
        block, depth, warps, stages = _forward_tile(rows, layer.filters, first)
        blocks = triton.cdiv(rows, block)
        out = flat.new_empty(tasks, rows, layer.filters)
        part, stats = flat.new_empty(tasks, blocks, 2, layer.filters), flat.new_empty(tasks, 2, layer.filters)
        x = self._inputs(i, saved, moved)
        y, y_stats = (saved.y[i], saved.stats[i]) if moved else (out, stats)
        _forward[(blocks, tasks)](
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
    ) -> Tensor:
        top = len(self.plan.layers) - 1
        parts = flat.new_empty(len(flat), _chunks(len(flat), saved.y[0].shape[1]), self.plan.total)
        # Gradients at the layer at hand with their statistics, and their tangents with theirs; at the top, the slope.
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
                # The gradients of the weights wait for nobody, and run beside the chain of the others.
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
        self, i: int, saved: _Saved, moved: _Saved | None, slopes: tuple[Tensor, ...], parts: Tensor
    ) -> None:
        layer, first, top = self.plan.layers[i], i == 0, i == len(self.plan.layers) - 1
        (high, wide), (out_high, out_wide) = self.plan.sizes[i : i + 2]
        x, rows = self._inputs(i, saved, moved), saved.y[i].shape[1]
        block, depth, warps, stages = _weight_tile(layer.filters, layer.channels, first, moved is not None)
        groups = triton.cdiv(self.plan.inputs[i], depth)
        chunks = parts.shape[1]
        chunk = triton.cdiv(triton.cdiv(rows, chunks), block) * block
        _weight[(groups * chunks, len(parts))](
            *x, *slopes, parts,
            rows, x[0].shape[1], groups, chunk, chunks, self.plan.total, self._norm_at(i),
            0 if top else self._norm_at(i + 1), self.plan.starts[i], high, wide, out_high, out_wide,
            CIN=self.plan.inputs[0] if first else layer.channels, COUT=layer.filters, K=1 if first else layer.kernel,
            S=layer.stride, PAD=layer.padding, BM=block, BK=depth, FIRST=first, TOP=top, TANGENT=moved is not None,
            PREC=_precision(), num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def _run_input(
        self, i: int, saved: _Saved, moved: _Saved | None, slopes: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        layer, top, stride = self.plan.layers[i], i == len(self.plan.layers) - 1, self.plan.layers[i].stride
        (high, wide), (out_high, out_wide) = self.plan.sizes[i : i + 2]
        x = self._inputs(i, saved, moved)
        tasks, images = len(x[0]), x[0].shape[1] // (high * wide)
        block, warps, stages = _input_tile(x[0].shape[1], layer.channels)
        class_blocks = triton.cdiv(images * -(-high // stride) * -(-wide // stride), block)
        blocks = class_blocks * stride * stride
        out, stats = torch.empty_like(x[0]), x[0].new_empty(tasks, 2, layer.channels)
        part = x[0].new_empty(tasks, blocks, 2, layer.channels)
        _input[(blocks, tasks)](
            *slopes, *x, saved.above[i - 1] if moved else out, out, part, self._count(x[0]), stats,
            images, blocks, class_blocks, self.plan.total, 0 if top else self._norm_at(i + 1), self._norm_at(i),
            self.plan.starts[i], high, wide, out_high, out_wide,
            CIN=layer.channels, COUT=layer.filters, K=layer.kernel, S=stride, PAD=layer.padding,
            BM=block, TOP=top, TANGENT=moved is not None, PREC=_precision(), num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out, stats

    def _inputs(self, i: int, saved: _Saved, moved: _Saved | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A layer's input with its statistics, and the same of its tangent; what does not exist is not read."""
        if i == 0:
            x = saved.patches
            return x, x, x, x
        dot = moved or saved
        return saved.y[i - 1], saved.stats[i - 1], dot.y[i - 1], dot.stats[i - 1]

    def _norm_at(self, i: int) -> int:
        return self.plan.starts[i] - 2 * self.plan.layers[i].channels if i else 0

    def _count(self, like: Tensor) -> Tensor:
        """How many blocks of each task are done; the last one sets it back to zero."""
        if len(like) not in self._counts:
            self._counts[len(like)] = torch.zeros(len(like), dtype=torch.int32, device=like.device)
        return self._counts[len(like)]


class _Beside:
    """A second stream beside the current one, joined at the end; without a GPU (Triton's interpreter) there is none."""

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Memory goes back to the current stream: what the second one reads is held until they join.
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


# Rows of a block, depth of a step, warps, stages: the best of a sweep on an H200 over the paper's three shapes.


def _forward_tile(rows: int, filters: int, first: bool) -> tuple[int, int, int, int]:
    if first:
        return 64, 16, 2, 3
    block = _block(rows, filters)
    return block, 0, 4 if rows <= 64 or block >= 64 else 2, 3


def _weight_tile(filters: int, channels: int, first: bool, tangent: bool) -> tuple[int, int, int, int]:
    if first:
        return 32, 16, 4 if filters >= 32 else 2, 3
    return (16, 2 * channels, 2, 3 if channels < 32 else 1) if tangent else (32, 2 * channels, filters // 8, 1)


def _input_tile(rows: int, channels: int) -> tuple[int, int, int]:
    block = _block(rows, channels)
    return block, 4 if block >= 64 else 2, 1


def _block(rows: int, channels: int) -> int:
    """Small blocks keep the GPU busy; with very many rows, larger ones keep their number down."""
    block = 16 if channels >= 32 else 32
    while rows > 512 * block and block < 128:
        block *= 2
    return block


def _chunks(tasks: int, rows: int) -> int:
    """The parts that rows are divided into for the weights' gradients: many where few tasks have many rows."""
    return 4 if tasks >= 16 else min(64, max(4, rows // 1024))


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
