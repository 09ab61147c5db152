"""Batch norm and ReLU inside the kernels: their sums, and a layer's input and slope by a few factors per channel."""
# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finish(
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
    """In the last block of a task, combine the results of all its blocks.

    The result is the mean and the inverse deviation with MOMENTS, and two sums divided by the number of rows without.
    """
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
def input_constants(STATS, DSTATS, flat, v, b, norm_at, c, C: tl.constexpr, TANGENT: tl.constexpr):
    """Factors per channel that give a layer's input from y, and its tangent.

    a = relu(A (y - mean) + shift); where a > 0, a_dot = A y_dot + F (y - mean) + D.
    """
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


@triton.jit
def slope_constants(
    GSTATS, YSTATS, GDSTATS, YDSTATS, flat, v, b, norm_at, o,
    C: tl.constexpr, TOP: tl.constexpr, TANGENT: tl.constexpr,
):  # fmt: skip
    """Factors per channel that give the slope at a layer's output y, and its tangent.

    slope = A above + B (y - mean) + D; slope_dot = A above_dot + F above + B y_dot + E (y - mean) + R. With TOP the
    slope is an input and all factors are zero.
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
def slopes(G, Y, GD, YD, at, ok, mean, A, B, D, F, E, R, TOP: tl.constexpr, TANGENT: tl.constexpr):
    """The slope at elements of a layer's output, and its tangent; without TANGENT, the slope twice."""
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
