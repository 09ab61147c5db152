"""The kernels: the output of a convolution, the gradients of its input and weight, and the gradient step."""
# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from metaleader.engine.conv.triton.batchnorm import finish, input_constants, slope_constants, slopes


@triton.jit
def as_tf32(x):
    """Round to TF32, which has ten mantissa bits. NaN may become zero."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def add_product(acc, lost, a, b, PREC: tl.constexpr):
    """Add the matrix product a b to acc, by one TF32 product, or in float32 precision by three TF32 products.

    For float32, each factor is split into its TF32 rounding and a remainder, whose TF32 precision suffices. NaN stays
    NaN in the remainder. Tensor cores truncate when they accumulate, so the long sum over products is Kahan's
    compensated sum. Triton's built-in "tf32x3" also checks for infinities.

    Returns:
        The sum, and its rounding error for the next call.
    """
    if PREC == "tf32":
        acc = tl.dot(a, b, acc, input_precision="tf32")
    else:
        a_high, b_high = as_tf32(a), as_tf32(b)
        three = tl.dot(a - a_high, b_high, input_precision="tf32")
        three = tl.dot(a_high, b - b_high, three, input_precision="tf32")
        three = tl.dot(a_high, b_high, three, input_precision="tf32")
        three -= lost
        longer = acc + three
        lost = (longer - acc) - three
        acc = longer
    return acc, lost


@triton.jit(do_not_specialize=["rows", "rows_in", "blocks", "H", "W", "OH", "OW"])
def forward_kernel(
    X, XSTATS, XD, XDSTATS, FLAT, V, Y, YSTATS, OUT, PART, COUNT, OUTSTATS,
    rows, rows_in, blocks, total, norm_at, weight_at, H, W, OH, OW,
    CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr, EPS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr, SUMS: tl.constexpr, TANGENT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """The output of a layer.

    With SUMS also the statistics per channel that the next batch norm needs, computed from those of each block of rows.
    """
    block, b = tl.program_id(0), tl.program_id(1)
    wide = b.to(tl.int64)
    m = block * BM + tl.arange(0, BM)
    o = tl.arange(0, COUT)
    there = m < rows
    X += wide * rows_in * CIN
    XD += wide * rows_in * CIN
    flat = FLAT + wide * total
    v = V + wide * total
    acc, lost = tl.zeros((BM, COUT), tl.float32), tl.zeros((BM, COUT), tl.float32)
    if FIRST:
        weights = v if TANGENT else flat
        for start in range(0, CIN, BK):
            k = start + tl.arange(0, BK)
            inside = k < CIN
            value = tl.load(X + m[:, None] * CIN + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weights + weight_at + k[:, None] * COUT + o[None, :], mask=inside[:, None], other=0.0)
            acc, lost = add_product(acc, lost, value, weight, PREC)
    else:
        c = tl.arange(0, CIN)
        mean, A, shift, F, D = input_constants(XSTATS, XDSTATS, flat, v, b, norm_at, c, CIN, TANGENT)
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
                acc, lost = add_product(acc, lost, a_dot, weight, PREC)
                acc, lost = add_product(acc, lost, a, tl.load(v + at_weight), PREC)
            else:
                acc, lost = add_product(acc, lost, a, weight, PREC)
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
        finish(PART, COUNT, OUTSTATS, b, block, blocks, rows, BM, EPS, COUT, not TANGENT)


@triton.jit(do_not_specialize=["images", "blocks", "cell_blocks", "share", "H", "W", "OH", "OW"])
def input_kernel(
    G, GSTATS, Y, YSTATS, GD, GDSTATS, YD, YDSTATS, FLAT, V,
    LOW, LOWSTATS, LOWD, LOWDSTATS, LOWG, OUT, PART, COUNT, OUTSTATS,
    images, blocks, cell_blocks, share, total, above_at, norm_at, weight_at, H, W, OH, OW,
    CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, TOP: tl.constexpr, TANGENT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The gradient at the input of the ReLU before a layer, by cells of stride x stride pixels.

    Pixels at the same position in their cells receive the same taps. A block processes several cells: for each of
    `share` positions in turn, the pixels at that position of all its cells.
    """
    block, b = tl.program_id(0), tl.program_id(1)
    wide = b.to(tl.int64)
    high, across = (H + S - 1) // S, (W + S - 1) // S
    m = block % cell_blocks * BM + tl.arange(0, BM)
    n = m // (high * across)
    cell_y = (m - n * (high * across)) // across
    cell_x = m - n * (high * across) - cell_y * across
    c, o = tl.arange(0, CIN), tl.arange(0, COUT)
    flat = FLAT + wide * total
    v = V + wide * total
    beyond = wide * images * OH * OW * COUT
    G += beyond
    Y += beyond
    GD += beyond
    YD += beyond
    lower = wide * images * H * W * CIN
    LOW += lower
    LOWD += lower
    LOWG += lower
    OUT += lower
    mean, A, B, D, F, E, R = slope_constants(
        GSTATS, YSTATS, GDSTATS, YDSTATS, flat, v, b, above_at, o, COUT, TOP, TANGENT
    )
    low_mean = tl.load(LOWSTATS + b * 2 * CIN + c)[None, :]
    inverse = tl.load(LOWSTATS + b * 2 * CIN + CIN + c)[None, :]
    scale = tl.load(flat + norm_at + c)[None, :] * inverse
    shift = tl.load(flat + norm_at + CIN + c)[None, :]
    dot_mean, dot_along = low_mean, low_mean
    if TANGENT:
        dot_mean = tl.load(LOWDSTATS + b * 2 * CIN + c)[None, :]
        dot_along = tl.load(LOWDSTATS + b * 2 * CIN + CIN + c)[None, :]
    first = tl.zeros((BM, CIN), tl.float32)
    second = tl.zeros((BM, CIN), tl.float32)
    for pixel in range(block // cell_blocks * share, block // cell_blocks * share + share):
        below, right = pixel // S, pixel % S
        y, x = cell_y * S + below, cell_x * S + right
        there = (n < images) & (y < H) & (x < W)
        first_ky, first_kx = (below + PAD) % S, (right + PAD) % S
        taps_across = (K - first_kx + S - 1) // S
        acc, lost = tl.zeros((BM, CIN), tl.float32), tl.zeros((BM, CIN), tl.float32)
        for tap in range((K - first_ky + S - 1) // S * taps_across):
            ky, kx = first_ky + tap // taps_across * S, first_kx + tap % taps_across * S
            to_y, to_x = (y + PAD - ky) // S, (x + PAD - kx) // S
            ok = there & (y + PAD >= ky) & (to_y < OH) & (x + PAD >= kx) & (to_x < OW)
            at = ((n * OH + to_y) * OW + to_x)[:, None] * COUT + o[None, :]
            slope, slope_dot = slopes(G, Y, GD, YD, at, ok[:, None], mean, A, B, D, F, E, R, TOP, TANGENT)
            at_weight = weight_at + ((ky * K + kx) * CIN + c)[None, :] * COUT + o[:, None]
            acc, lost = add_product(acc, lost, slope_dot, tl.load(flat + at_weight), PREC)
            if TANGENT:
                acc, lost = add_product(acc, lost, slope, tl.load(v + at_weight), PREC)
        at = ((n * H + y) * W + x)[:, None] * CIN + c[None, :]
        ok = there[:, None]
        away = tl.load(LOW + at, mask=ok, other=0.0) - low_mean
        acc = tl.where(ok & (away * scale + shift > 0), acc, 0.0)
        tl.store(OUT + at, acc, mask=ok)
        first += acc
        second += acc * away * inverse
        if TANGENT:
            dot = tl.load(LOWD + at, mask=ok, other=0.0)
            above = tl.load(LOWG + at, mask=ok, other=0.0)
            second += above * inverse * (dot - dot_mean - away * inverse * dot_along)
    part = PART + (wide * blocks + block) * 2 * CIN
    tl.store(part + c, tl.sum(first, 0))
    tl.store(part + CIN + c, tl.sum(second, 0))
    finish(PART, COUNT, OUTSTATS, b, block, blocks, images * H * W, BM, 0.0, CIN, False)


@triton.jit(do_not_specialize=["rows", "rows_in", "groups", "chunk", "H", "W", "OH", "OW"])
def weight_kernel(
    X, XSTATS, XD, XDSTATS, G, GSTATS, Y, YSTATS, GD, GDSTATS, YD, YDSTATS, FLAT, V, OUT,
    rows, rows_in, groups, chunk, parts_at, num_parts, total, norm_at, above_at, H, W, OH, OW,
    CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr, TOP: tl.constexpr, TANGENT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """The gradient of a layer's weight and of the batch norm after it, summed over one chunk of the rows."""
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
    mean, A, B, D, F, E, R = slope_constants(
        GSTATS, YSTATS, GDSTATS, YDSTATS, flat, v, b, above_at, o, COUT, TOP, TANGENT
    )
    if not FIRST:
        x_mean, x_A, x_shift, x_F, x_D = input_constants(XSTATS, XDSTATS, flat, v, b, norm_at, c, CIN, TANGENT)
    acc, lost = tl.zeros((BK, COUT), tl.float32), tl.zeros((BK, COUT), tl.float32)
    stop = tl.minimum(part * chunk + chunk, rows)
    for start in range(part * chunk, stop, BM):
        m = start + tl.arange(0, BM)
        there = m < stop
        at = m[:, None] * COUT + o[None, :]
        slope, slope_dot = slopes(G, Y, GD, YD, at, there[:, None], mean, A, B, D, F, E, R, TOP, TANGENT)
        if FIRST:
            ok = there[:, None] & inside[None, :]
            value = tl.load(X + m[:, None] * CIN + k[None, :], mask=ok, other=0.0)
            acc, lost = add_product(acc, lost, tl.trans(value), slope_dot, PREC)
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
            acc, lost = add_product(acc, lost, tl.trans(a), slope_dot, PREC)
            if TANGENT:
                dot = tl.load(XD + at, mask=ok, other=0.0)
                a_dot = tl.where(a > 0, dot * x_A[None, :] + away * x_F[None, :] + x_D[None, :], 0.0)
                acc, lost = add_product(acc, lost, tl.trans(a_dot), slope, PREC)
    out = OUT + wide * num_parts + parts_at + part * (K * K * CIN * COUT + (0 if TOP else 2 * COUT))
    tl.store(out + k[:, None] * COUT + o[None, :], acc, mask=inside[:, None])
    if not TOP:
        out += K * K * CIN * COUT
        sums = GDSTATS if TANGENT else GSTATS
        here = tl.where(part == 0, rows * 1.0, 0.0)
        first = o < tl.where(group == 0, COUT, 0)
        tl.store(out + o, tl.load(sums + b * 2 * COUT + COUT + o) * here, mask=first)
        tl.store(out + COUT + o, tl.load(sums + b * 2 * COUT + o) * here, mask=first)


@triton.jit
def descend_kernel(
    BASE, PARTS, RATES, OUT, WHERE, total, num_parts, row,
    BLOCK: tl.constexpr, RATED: tl.constexpr, BASED: tl.constexpr,
):  # fmt: skip
    """Subtract the sum of the partial sums from BASE, multiplied by step sizes with RATED; without BASED, the sum."""
    b = tl.program_id(1).to(tl.int64)
    # Per block of parameters: begin, end, offset of its first partial sum, distance to the next, their number.
    where = WHERE + tl.program_id(0) * 5
    i = tl.multiple_of(tl.load(where), 16) + tl.arange(0, BLOCK)
    ok = i < tl.multiple_of(tl.load(where + 1), 16)
    part = PARTS + b * num_parts + tl.multiple_of(tl.load(where + 2), 16) + tl.arange(0, BLOCK)
    apart = tl.multiple_of(tl.load(where + 3), 16)
    change = tl.zeros((BLOCK,), tl.float32)
    for _ in range(tl.load(where + 4)):
        change += tl.load(part, mask=ok, other=0.0)
        part += apart
    if RATED:
        change = change * tl.load(RATES + b * row + i, mask=ok, other=0.0)
    if BASED:
        change = tl.load(BASE + b * total + i, mask=ok, other=0.0) - change
    tl.store(OUT + b * total + i, change, mask=ok)
