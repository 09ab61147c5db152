"""The four passes through a chain's convolutions in torch operations, for any device and dtype.

The forward and backward passes give the gradient of one task's loss. Their tangents in a direction of the parameters
give the Hessian times that direction. Batch norm and ReLU between two layers are computed with a few factors per
channel, so that each pass reads its tensors few times. Let y be the output of the layer below, `away` = y - mean(y)
and `above` the gradient at the input of ReLU; means are over the rows of a task. Then

    a = relu(A away + shift)                             A = scale inverse,  inverse = 1 / deviation(y)
    slope = A above + B away + D                         B = -A inverse mean(above scaled),  D = -A mean(above)

with `scaled` = inverse away and `slope` the gradient at y. The tangents are

    a_dot = A y_dot + F away + (shift_dot - A mean(y_dot))        F = inverse (scale_dot - A mean(scaled y_dot))
    slope_dot = A above_dot + F above + B y_dot + E away + R
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metaleader.engine.compiled import compile_whole
from metaleader.engine.conv.layout import Plan
from metaleader.engine.conv.trace import Layer


class _Ahead(NamedTuple):
    """Results of a forward pass at a layer: the patches of its input, y - mean(y), 1 / deviation(y), ReLU's mask."""

    columns: Tensor
    away: Tensor
    inverse: Tensor
    passed: Tensor


class _Back(NamedTuple):
    """Results of a backward pass at a layer.

    `above`, the slope at the layer's output, and per channel A, B and the means of `above` and of `above scaled`.
    """

    above: Tensor
    slope: Tensor
    a: Tensor
    b: Tensor
    mean: Tensor
    along: Tensor


class _Moved(NamedTuple):
    """Tangents at a layer's input: of its patches and of y; the means of y_dot and of `scaled y_dot`; F."""

    columns: Tensor
    y: Tensor
    mean: Tensor
    along: Tensor
    f: Tensor


class _Saved:
    """Results of the passes at one theta: the patches of the images, then per layer from the second on."""

    def __init__(self, patches: Tensor, ahead: list[_Ahead]) -> None:
        self.patches, self.ahead = patches, ahead
        self.back: list[_Back] = []


class TorchPasses:
    """The four passes in torch operations.

    Args:
        plan: the layout of the flat parameters.
        compiled: whether torch.compile fuses the operations between the matrix products.
    """

    def __init__(self, plan: Plan, compiled: bool = False) -> None:
        self.plan = plan
        self._columns, self._images = (_fused_columns, _fused_images) if compiled else (_columns, _images)
        wrap = compile_whole if compiled else (lambda f: f)
        self._ahead, self._back = wrap(self._forward), wrap(self._backward)
        self._ahead_tangent, self._back_tangent = wrap(self._forward_tangent), wrap(self._backward_tangent)

    def forward(self, flat: Tensor, patches: Tensor) -> tuple[Tensor, _Saved]:
        """The output of the last convolution, and the intermediate results for the other passes."""
        y, ahead = self._ahead(flat, patches)
        return y, _Saved(patches, ahead)

    def backward(self, flat: Tensor, saved: _Saved, slope: Tensor) -> Tensor:
        """The gradient with respect to the flat parameters, given the gradient with respect to the output."""
        gradient, saved.back = self._back(flat, saved.patches, saved.ahead, slope)
        return gradient

    def forward_tangent(self, flat: Tensor, saved: _Saved, v: Tensor) -> tuple[Tensor, list[_Moved]]:
        """The tangent of `forward` in direction v of the parameters."""
        return self._ahead_tangent(flat, saved.patches, saved.ahead, saved.back, v)

    def backward_tangent(
        self, flat: Tensor, saved: _Saved, v: Tensor, moved: list[_Moved], slope_dot: Tensor
    ) -> Tensor:
        """The tangent of `backward`: the Hessian times v, given the tangent of the slope at the output."""
        return self._back_tangent(flat, saved.patches, saved.ahead, saved.back, v, moved, slope_dot)

    def whole(self, parts: Tensor) -> Tensor:
        """Return the gradient unchanged: it is one partial sum."""
        return parts

    def descend(self, base: Tensor, parts: Tensor, rates: Tensor | None) -> Tensor:
        """Subtract the gradient, multiplied by step sizes if given."""
        return base - parts if rates is None else torch.addcmul(base, parts, rates, value=-1)

    def _forward(self, flat: Tensor, patches: Tensor) -> tuple[Tensor, list[_Ahead]]:
        plan, weights, norms, saved = self.plan, self.plan.weights(flat), self.plan.norms(flat), []
        y = torch.bmm(patches, weights[0])
        for i, layer in enumerate(plan.layers[1:], 1):
            scale, shift = norms[i - 1]
            away = y - y.mean(1, keepdim=True)
            variance = torch.linalg.vector_norm(away, dim=1, keepdim=True).square() / y.shape[1]
            inverse = torch.rsqrt(variance + layer.eps)
            z = torch.addcmul(shift, away, scale * inverse)
            columns = self._columns(plan, i, z, None)
            saved.append(_Ahead(columns, away, inverse, (z > 0).to(z.dtype)))
            y = torch.bmm(columns, weights[i])
        return y, saved

    def _backward(
        self, flat: Tensor, patches: Tensor, ahead: list[_Ahead], slope: Tensor
    ) -> tuple[Tensor, list[_Back]]:
        plan, weights, norms = self.plan, self.plan.weights(flat), self.plan.norms(flat)
        saved, gradients = [], []
        for i in reversed(range(1, len(plan.layers))):
            columns, away, inverse, passed = ahead[i - 1]
            gradients.append(torch.bmm(columns.mT, slope).flatten(1))
            above = self._images(plan, i, torch.bmm(slope, weights[i].mT), passed)
            mean, along = above.mean(1, keepdim=True), (above * away).mean(1, keepdim=True) * inverse
            gradients.append(torch.cat([along, mean], 2).flatten(1) * above.shape[1])
            a = norms[i - 1][0] * inverse
            b = -a * inverse * along
            saved.append(_Back(above, slope, a, b, mean, along))
            slope = torch.addcmul(-a * mean, above, a).addcmul_(away, b)
        gradients.append(torch.bmm(patches.mT, slope).flatten(1))
        return torch.cat(gradients[::-1], 1), saved[::-1]

    def _forward_tangent(
        self, flat: Tensor, patches: Tensor, ahead: list[_Ahead], back: list[_Back], v: Tensor
    ) -> tuple[Tensor, list[_Moved]]:
        plan, weights, moved = self.plan, self.plan.weights(flat), []
        weights_dot, norms_dot = plan.weights(v), plan.norms(v)
        y_dot = torch.bmm(patches, weights_dot[0])
        for i in range(1, len(plan.layers)):
            (scale_dot, shift_dot), (columns, away, inverse, passed) = norms_dot[i - 1], ahead[i - 1]
            mean, along = y_dot.mean(1, keepdim=True), (y_dot * away).mean(1, keepdim=True) * inverse
            a = back[i - 1].a
            f = inverse * (scale_dot - a * along)
            z_dot = torch.addcmul(shift_dot - a * mean, y_dot, a).addcmul_(away, f)
            columns_dot = self._columns(plan, i, z_dot, passed)
            moved.append(_Moved(columns_dot, y_dot, mean, along, f))
            y_dot = torch.bmm(columns_dot, weights[i]).baddbmm_(columns, weights_dot[i])
        return y_dot, moved

    def _backward_tangent(
        self,
        flat: Tensor,
        patches: Tensor,
        ahead: list[_Ahead],
        back: list[_Back],
        v: Tensor,
        moved: list[_Moved],
        slope_dot: Tensor,
    ) -> Tensor:
        plan, weights, weights_dot, gradients = self.plan, self.plan.weights(flat), self.plan.weights(v), []
        for i in reversed(range(1, len(plan.layers))):
            (columns, away, inverse, passed), dot = ahead[i - 1], moved[i - 1]
            above, slope, a, b, mean, along = back[i - 1]
            gradients.append(torch.bmm(dot.columns.mT, slope).baddbmm_(columns.mT, slope_dot).flatten(1))
            # One product with [slope_dot, slope]: the result is large and is written once.
            pair = torch.cat([weights[i], weights_dot[i]], 2)
            both = torch.bmm(torch.cat([slope_dot, slope], 2), pair.mT)
            above_dot = self._images(plan, i, both, passed)
            mean_dot = above_dot.mean(1, keepdim=True)
            # mean(above_dot scaled + above scaled_dot), with scaled_dot = inverse (y_dot - mean - scaled along)
            around = (above_dot * away).add_(above * dot.y).mean(1, keepdim=True)
            around = inverse * (around - mean * dot.mean - along * dot.along)
            gradients.append(torch.cat([around, mean_dot], 2).flatten(1) * above.shape[1])
            e = inverse * (a * (inverse * along * dot.along - around) - dot.f * along)
            r = a * (inverse * along * dot.mean - mean_dot) - dot.f * mean
            slope_dot = torch.addcmul(r, above_dot, a).addcmul_(above, dot.f).addcmul_(dot.y, b).addcmul_(away, e)
        gradients.append(torch.bmm(patches.mT, slope_dot).flatten(1))
        return torch.cat(gradients[::-1], 1)


def input_patches(plan: Plan, images: Tensor) -> Tensor:
    """The input of the first layer, (tasks, rows, inputs), from images (tasks, images, channels, height, width)."""
    layer, pad = plan.layers[0], plan.layers[0].padding
    columns = _windows(F.pad(images.permute(0, 1, 3, 4, 2), (0, 0, pad, pad, pad, pad)), layer)
    return F.pad(columns, (0, plan.inputs[0] - columns.shape[2]))


def _columns(plan: Plan, i: int, z: Tensor, passed: Tensor | None) -> Tensor:
    """Patches of relu(z), or for the tangent of relu, of z times its mask `passed`."""
    layer, (high, wide) = plan.layers[i], plan.sizes[i]
    pad, z = layer.padding, z.unflatten(1, (-1, high, wide))
    images = z.new_zeros(*z.shape[:2], high + 2 * pad, wide + 2 * pad, layer.channels)
    inside = images[:, :, pad : pad + high, pad : pad + wide]
    if passed is None:
        torch.clamp_min(z, 0, out=inside)
    else:
        torch.mul(z, passed.view(z.shape), out=inside)
    return _windows(images, layer)


def _windows(images: Tensor, layer: Layer) -> Tensor:
    """Patches (tasks, rows, kernel * kernel * channels) of padded images (tasks, images, height, width, channels)."""
    windows = images.unfold(2, layer.kernel, layer.stride).unfold(3, layer.kernel, layer.stride)
    return windows.permute(0, 1, 2, 3, 5, 6, 4).flatten(4).flatten(1, 3)


def _images(plan: Plan, i: int, columns: Tensor, passed: Tensor) -> Tensor:
    """The transpose of `_columns`: the sum of overlapping patches at each input pixel, (tasks, rows, channels)."""
    layer, (high, wide), (out_high, out_wide) = plan.layers[i], plan.sizes[i], plan.sizes[i + 1]
    s, pad, taps = layer.stride, layer.padding, _taps(plan, i, columns)
    out = columns.new_zeros(*taps.shape[:2], high + 2 * pad, wide + 2 * pad, layer.channels)
    for y in range(layer.kernel):
        for x in range(layer.kernel):
            out[:, :, y : y + s * out_high : s, x : x + s * out_wide : s] += taps[:, :, :, :, y, x]
    inside = out[:, :, pad : pad + high, pad : pad + wide]
    return (inside * passed.view(inside.shape)).flatten(1, 3)


def _taps(plan: Plan, i: int, columns: Tensor) -> Tensor:
    """Patches as (tasks, images, height, width, kernel, kernel, channels)."""
    layer = plan.layers[i]
    return columns.unflatten(2, (layer.kernel, layer.kernel, layer.channels)).unflatten(1, (-1, *plan.sizes[i + 1]))


# The same two functions for a compiler: no in-place writes, and indices are plain sums of loop variables.


def _fused_columns(plan: Plan, i: int, z: Tensor, passed: Tensor | None) -> Tensor:
    layer, (out_high, out_wide) = plan.layers[i], plan.sizes[i + 1]
    k, s, pad = layer.kernel, layer.stride, layer.padding
    z = torch.relu(z) if passed is None else z * passed
    images = F.pad(z.unflatten(1, (-1, *plan.sizes[i])), (0, 0, pad, pad, pad, pad))
    down = [slice(y, y + s * (out_high - 1) + 1, s) for y in range(k)]
    across = [slice(x, x + s * (out_wide - 1) + 1, s) for x in range(k)]
    return torch.cat([images[:, :, rows, columns] for rows in down for columns in across], 4).flatten(1, 3)


def _fused_images(plan: Plan, i: int, columns: Tensor, passed: Tensor) -> Tensor:
    layer, (high, wide) = plan.layers[i], plan.sizes[i]
    s, pad, taps = layer.stride, layer.padding, _taps(plan, i, columns)
    # Pixels with the same offset from a multiple of the stride receive the same taps.
    classes = [
        _class_of_pixels(layer, taps, y, x, (high + 2 * pad, wide + 2 * pad)) for y in range(s) for x in range(s)
    ]
    out = torch.stack(classes, 4).unflatten(4, (s, s)).permute(0, 1, 2, 4, 3, 5, 6).flatten(4, 5).flatten(2, 3)
    inside = out[:, :, pad : pad + high, pad : pad + wide]
    return (inside * passed.view(inside.shape)).flatten(1, 3)


def _class_of_pixels(layer: Layer, taps: Tensor, first: int, second: int, size: tuple[int, int]) -> Tensor:
    """The sum of overlapping patches at every stride-th pixel of padded images, from pixel (first, second) on."""
    k, s, (out_high, out_wide) = layer.kernel, layer.stride, taps.shape[2:4]
    high, wide = -(-size[0] // s), -(-size[1] // s)
    total = taps.new_zeros(*taps.shape[:2], high, wide, layer.channels)
    for y in range(first, k, s):
        for x in range(second, k, s):
            above, left = y // s, x // s
            around = (0, 0, left, wide - out_wide - left, above, high - out_high - above)
            total = total + F.pad(taps[:, :, :, :, y, x], around)
    return total
