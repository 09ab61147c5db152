"""The meta-gradient of one task of a multilayer perceptron in one program: Eq. 5 by the adjoint recursion.

Notation, for a layer with weight W, inputs a and outputs z = a W^T + b: `slope` is the derivative of the loss with
respect to z, and a name with `_dot` is a derivative in the direction v = D lambda, D the diagonal of step sizes.

    z_dot = a_dot W^T + a v_W^T + v_b            a_dot = act'(z) z_dot of the layer below
    slope_dot below = (slope_dot W + slope v_W) act'(z) + (slope W) act''(z) z_dot
    (H v)_W = slope_dot^T a + slope^T a_dot      (H v)_b = the sum of slope_dot over rows

All layers are padded to one width, a power of two. Padded weights are zero; rows beyond the data have a slope of zero.
Intermediate results lie in global memory, in blocks of (rows, width); a barrier separates their stores from loads.
"""
# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from metaleader.engine.conv.triton.conv import as_tf32


@triton.jit
def _product(a, b, acc, PREC: tl.constexpr):
    """The sum acc + a b by one TF32 product, or in float32 precision by three; see `add_product`."""
    if PREC == "tf32":
        return tl.dot(a, b, acc, input_precision="tf32")
    a_high, b_high = as_tf32(a), as_tf32(b)
    acc = tl.dot(a - a_high, b_high, acc, input_precision="tf32")
    acc = tl.dot(a_high, b - b_high, acc, input_precision="tf32")
    return tl.dot(a_high, b_high, acc, input_precision="tf32")


@triton.jit
def _activate(z, ACT: tl.constexpr):
    """The activation and its first and second derivative."""
    if ACT == "relu":  # NaN stays NaN
        value = tl.where(z <= 0, 0.0, z)
        first = tl.where(z <= 0, 0.0, 1.0)
        second = tl.zeros_like(z)
    elif ACT == "tanh":
        value = 2.0 / (1.0 + tl.exp(-2.0 * z)) - 1.0
        first = 1.0 - value * value
        second = -2.0 * value * first
    elif ACT == "gelu":
        below = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        density = tl.exp(-0.5 * z * z) * 0.3989422804014327
        value = z * below
        first = below + z * density
        second = density * (2.0 - z * z)
    else:
        share = 1.0 / (1.0 + tl.exp(-z))
        slope = share * (1.0 - share)
        if ACT == "sigmoid":
            value = share
            first = slope
            second = slope * (1.0 - 2.0 * share)
        else:  # silu
            value = z * share
            first = share + z * slope
            second = slope * (2.0 + z * (1.0 - 2.0 * share))
    return value, first, second


@triton.jit
def _layer(META, layer, index):
    """Where the weight (outputs, inputs) and the bias of a layer lie, and which of their entries exist."""
    weight_at = tl.load(META + 4 * layer)
    bias_at = tl.load(META + 4 * layer + 1)
    inputs = tl.load(META + 4 * layer + 2)
    outputs = tl.load(META + 4 * layer + 3)
    at = weight_at + index[:, None] * inputs + index[None, :]
    there = (index[:, None] < outputs) & (index[None, :] < inputs)
    return at, there, bias_at + index, (index < outputs) & (bias_at >= 0)


@triton.jit
def _input_of(Z, x, layer, block, place, ACT: tl.constexpr):
    """The inputs of a layer, and the derivatives of the activation before it; of no use at the first layer."""
    z = tl.load(Z + (layer - 1) * block + place, mask=(place >= 0) & (layer > 0), other=0.0)
    value, first, second = _activate(z, ACT)
    return tl.where(layer > 0, value, x), first, second


@triton.jit
def _forward(theta, x, META, Z, layers, block, place, index, ACT: tl.constexpr, PREC: tl.constexpr):
    """Store the outputs of all layers; returns those of the last."""
    a = x
    z = x
    for layer in range(layers):
        at, there, bias_at, has_bias = _layer(META, layer, index)
        weight = tl.load(theta + at, mask=there, other=0.0)
        bias = tl.load(theta + bias_at, mask=has_bias, other=0.0)
        z = _product(a, tl.trans(weight), tl.zeros_like(x) + bias[None, :], PREC)
        tl.store(Z + layer * block + place, z)
        a, _first, _second = _activate(z, ACT)
    return z


@triton.jit
def _probabilities(z, is_output):
    """Softmax over the outputs, and its logarithm."""
    shifted = z - tl.max(tl.where(is_output, z, float("-inf")), 1)[:, None]
    power = tl.where(is_output, tl.exp(shifted), 0.0)
    total = tl.sum(power, 1)[:, None]
    return power / total, shifted - tl.log(total)


@triton.jit
def _slope(z, Y, task, num, outputs, rows, index, smoothing, LABELS: tl.constexpr):
    """The mean loss over rows, and its derivative with respect to the outputs."""
    is_output = (rows[:, None] < num) & (index[None, :] < outputs)
    if LABELS:
        probability, log_probability = _probabilities(z, index[None, :] < outputs)
        label = tl.load(Y + task * num + rows, mask=rows < num, other=0).to(tl.int32)[:, None]
        target = tl.where(index[None, :] == label, 1.0 - smoothing, 0.0) + smoothing / outputs
        target = tl.where((label >= 0) & (label < outputs), target, float("nan"))
        loss = -tl.where(is_output, target * log_probability, 0.0)
        slope = (probability - target) / num
    else:
        y = tl.load(Y + (task * num + rows[:, None]) * outputs + index[None, :], mask=is_output, other=0.0)
        loss = tl.where(is_output, (z - y) * (z - y), 0.0) / outputs
        slope = (z - y) * (2.0 / (num * outputs))
    return tl.sum(tl.sum(loss, 1), 0) / num, tl.where(is_output, slope, 0.0)


@triton.jit
def _slope_dot(z, z_dot, num, outputs, rows, index, LABELS: tl.constexpr):
    """The derivative of the slope at the outputs in the direction z_dot."""
    is_output = (rows[:, None] < num) & (index[None, :] < outputs)
    if LABELS:
        probability, _log = _probabilities(z, index[None, :] < outputs)
        product = probability * z_dot
        value = (product - probability * tl.sum(tl.where(is_output, product, 0.0), 1)[:, None]) / num
    else:
        value = z_dot * (2.0 / (num * outputs))
    return tl.where(is_output, value, 0.0)


@triton.jit
def _rows_of(X, task, num, inputs, rows, index):
    """The inputs of a task, padded."""
    there = (rows[:, None] < num) & (index[None, :] < inputs)
    return tl.load(X + (task * num + rows[:, None]) * inputs + index[None, :], mask=there, other=0.0)


@triton.jit
def _backward(
    theta, slope, x, META, Z, SLOPES, BELOW, OUT, RATES, layers, block, place, index,
    DESCEND: tl.constexpr, ACT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Store the gradient, or with DESCEND the parameters after one gradient step and the slopes of all layers."""
    for i in range(layers):
        layer = layers - 1 - i
        at, there, bias_at, has_bias = _layer(META, layer, index)
        weight = tl.load(theta + at, mask=there, other=0.0)
        a, first, _second = _input_of(Z, x, layer, block, place, ACT)
        of_weight = _product(tl.trans(slope), a, tl.zeros_like(weight), PREC)
        of_bias = tl.sum(slope, 0)
        if DESCEND:
            tl.store(SLOPES + layer * block + place, slope)
            rate = tl.load(RATES + at, mask=there, other=0.0)
            of_weight = weight - rate * of_weight
            rate = tl.load(RATES + bias_at, mask=has_bias, other=0.0)
            of_bias = tl.load(theta + bias_at, mask=has_bias, other=0.0) - rate * of_bias
        tl.store(OUT + at, of_weight, mask=there)
        tl.store(OUT + bias_at, of_bias, mask=has_bias)
        if layer > 0:
            below = _product(slope, weight, tl.zeros_like(x), PREC)
            if DESCEND and ACT != "relu":
                tl.store(BELOW + layer * block + place, below)
            slope = below * first


@triton.jit
def _adjoint(
    theta, before, after, x, META, Z, ZDOT, SLOPES, BELOW, RATES, num, outputs, layers, block, place, rows, index,
    LABELS: tl.constexpr, ACT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Store lambda - H (D lambda): the adjoint step of one inner step."""
    a = x
    a_dot = tl.zeros_like(x)
    z = x
    z_dot = a_dot
    for layer in range(layers):
        at, there, bias_at, has_bias = _layer(META, layer, index)
        weight = tl.load(theta + at, mask=there, other=0.0)
        v = tl.load(before + at, mask=there, other=0.0) * tl.load(RATES + at, mask=there, other=0.0)
        v_bias = tl.load(before + bias_at, mask=has_bias, other=0.0)
        v_bias = v_bias * tl.load(RATES + bias_at, mask=has_bias, other=0.0)
        z_dot = _product(a, tl.trans(v), tl.zeros_like(x) + v_bias[None, :], PREC)
        z_dot = _product(a_dot, tl.trans(weight), z_dot, PREC)
        z = tl.load(Z + layer * block + place)
        tl.store(ZDOT + layer * block + place, z_dot)
        a, first, _second = _activate(z, ACT)
        a_dot = first * z_dot
    slope_dot = _slope_dot(z, z_dot, num, outputs, rows, index, LABELS)
    tl.debug_barrier()
    for i in range(layers):
        layer = layers - 1 - i
        at, there, bias_at, has_bias = _layer(META, layer, index)
        a, first, second = _input_of(Z, x, layer, block, place, ACT)
        z_dot = tl.load(ZDOT + (layer - 1) * block + place, mask=(place >= 0) & (layer > 0), other=0.0)
        slope = tl.load(SLOPES + layer * block + place)
        lam = tl.load(before + at, mask=there, other=0.0)
        product = _product(tl.trans(slope_dot), a, tl.zeros_like(lam), PREC)
        product = _product(tl.trans(slope), first * z_dot, product, PREC)
        tl.store(after + at, lam - product, mask=there)
        lam_bias = tl.load(before + bias_at, mask=has_bias, other=0.0)
        tl.store(after + bias_at, lam_bias - tl.sum(slope_dot, 0), mask=has_bias)
        if layer > 0:
            weight = tl.load(theta + at, mask=there, other=0.0)
            v = lam * tl.load(RATES + at, mask=there, other=0.0)
            below_dot = _product(slope_dot, weight, tl.zeros_like(x), PREC)
            slope_dot = _product(slope, v, below_dot, PREC) * first
            if ACT != "relu":
                slope_dot += tl.load(BELOW + layer * block + place) * second * z_dot


@triton.jit
def task_kernel(
    FLAT, RATES, SUPPORT_X, SUPPORT_Y, QUERY_X, QUERY_Y, META, THETA, LAMBDA, Z, SLOPES, BELOW, ZDOT, LOSSES,
    tasks, total, num_support, num_query, inputs, outputs, steps, layers, smoothing,
    N: tl.constexpr, W: tl.constexpr, LABELS: tl.constexpr, SECOND: tl.constexpr, ACT: tl.constexpr,
    PREC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of a task after the inner steps, and its gradient.

    Shapes, for T = learners * tasks: FLAT (learners, total), RATES (total), THETA (T, steps + 1, total), LAMBDA (T, 2,
    total), Z, SLOPES and BELOW (T, steps + 1, layers, N, W), ZDOT (T, layers, N, W), LOSSES (T). The gradient is in the
    second row of LAMBDA if SECOND and steps is odd, else in the first.
    """
    task = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, N)
    index = tl.arange(0, W)
    block = N * W
    place = rows[:, None] * W + index[None, :]
    theta = THETA + task * (steps + 1) * total
    lam = LAMBDA + task * 2 * total
    z_at = Z + task * (steps + 1) * layers * block
    slopes_at = SLOPES + task * (steps + 1) * layers * block
    below_at = BELOW + task * (steps + 1) * layers * block
    zdot_at = ZDOT + task * layers * block
    for start in range(0, total, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(FLAT + (task // tasks) * total + at, mask=at < total)
        tl.store(theta + at, value, mask=at < total)
    tl.debug_barrier()
    x = _rows_of(SUPPORT_X, task, num_support, inputs, rows, index)
    for s in range(steps):
        here = theta + s * total
        z_here = z_at + s * layers * block
        z = _forward(here, x, META, z_here, layers, block, place, index, ACT, PREC)
        _loss, slope = _slope(z, SUPPORT_Y, task, num_support, outputs, rows, index, smoothing, LABELS)
        tl.debug_barrier()
        _backward(
            here, slope, x, META, z_here, slopes_at + s * layers * block, below_at + s * layers * block, here + total,
            RATES, layers, block, place, index, True, ACT, PREC,
        )  # fmt: skip
        tl.debug_barrier()
    query = _rows_of(QUERY_X, task, num_query, inputs, rows, index)
    here = theta + steps * total
    z_here = z_at + steps * layers * block
    z = _forward(here, query, META, z_here, layers, block, place, index, ACT, PREC)
    loss, slope = _slope(z, QUERY_Y, task, num_query, outputs, rows, index, smoothing, LABELS)
    tl.store(LOSSES + task, loss)
    tl.debug_barrier()
    _backward(
        here, slope, query, META, z_here, slopes_at, below_at, lam, RATES, layers, block, place, index, False, ACT, PREC
    )  # fmt: skip
    if SECOND:
        for i in range(steps):
            s = steps - 1 - i
            tl.debug_barrier()
            _adjoint(
                theta + s * total, lam + (i % 2) * total, lam + ((i + 1) % 2) * total, x, META,
                z_at + s * layers * block, zdot_at, slopes_at + s * layers * block, below_at + s * layers * block,
                RATES, num_support, outputs, layers, block, place, rows, index, LABELS, ACT, PREC,
            )  # fmt: skip


@triton.jit
def mean_kernel(VALUES, LOSSES, OUT, MEAN, tasks, total, stride, offset, BLOCK: tl.constexpr):
    """The means over the tasks of a learner of gradients, (learners * tasks, stride), and losses, in a fixed order."""
    learner = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    loss = 0.0
    for t in range(tasks):
        row = learner * tasks + t
        sums += tl.load(VALUES + row * stride + offset + at, mask=at < total, other=0.0)
        loss += tl.load(LOSSES + row)
    tl.store(OUT + learner * total + at, sums / tasks, mask=at < total)
    if tl.program_id(0) == 0:
        tl.store(MEAN + learner, loss / tasks)
