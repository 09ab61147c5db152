"""The four passes through a chain's convolutions, in torch's operations: for any device and dtype.

Forward and backward give the gradient of one task's loss; their tangents in a direction of the parameters give the
Hessian times that direction. Batch norm and ReLU between two layers are written with a few factors a channel, so that
each pass goes over its tensors few times; with y the output of the layer below, `away` = y - mean(y), `above` the
gradient at ReLU's input, and means over the rows of a task:

    a = relu(A away + shift)                             A = scale inverse,  inverse = 1 / deviation(y)
    slope = A above + B away + D                         B = -A inverse mean(above scaled),  D = -A mean(above)

(`scaled` = inverse away, `slope` the gradient at y), and in their tangents

    a_dot = A y_dot + F away + (shift_dot - A mean(y_dot))        F = inverse (scale_dot - A mean(scaled y_dot))
    slope_dot = A above_dot + F above + B y_dot + E away + R
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from metaleader.chain import Plan, windows_of


@dataclass
class _Saved:
    """What the passes at one theta leave behind, by layer; entry 0 of what batch norm concerns is unused."""

    columns: list[Tensor]
    away: list[Tensor]
    inverse: list[Tensor]
    passed: list[Tensor]
    above: list[Tensor] = field(default_factory=list)
    slope: list[Tensor] = field(default_factory=list)
    factors: list[_Factors] = field(default_factory=list)


class _Factors(NamedTuple):
    """Of each channel: A and B, and the means of `above` and of `above scaled`."""

    a: Tensor
    b: Tensor
    mean: Tensor
    along: Tensor


class _Moved(NamedTuple):
    """The tangents of a layer's input: of its columns and of y; the means of y_dot and of `scaled y_dot`; F."""

    columns: Tensor
    y: Tensor
    mean: Tensor
    along: Tensor
    f: Tensor


class TorchPasses:
    """The four passes in torch's operations."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def forward(self, flat: Tensor, patches: Tensor) -> tuple[Tensor, _Saved]:
        """The last convolution's output, and what the other passes need."""
        plan, none = self.plan, patches.new_empty(0)
        saved = _Saved([patches], [none], [none], [none])
        y = torch.bmm(patches, plan.weight(flat, 0))
        for i, layer in enumerate(plan.layers[1:], 1):
            scale, shift = plan.norm(flat, i)
            away = y - y.mean(1, keepdim=True)
            variance = torch.linalg.vector_norm(away, dim=1, keepdim=True).square() / y.shape[1]
            inverse = torch.rsqrt(variance + layer.eps)
            z = torch.addcmul(shift, away, scale * inverse)
            saved.columns.append(self._columns(z, i, None))
            saved.away.append(away)
            saved.inverse.append(inverse)
            saved.passed.append((z > 0).to(z.dtype))
            y = torch.bmm(saved.columns[i], plan.weight(flat, i))
        return y, saved

    def backward(self, flat: Tensor, saved: _Saved, slope: Tensor) -> Tensor:
        """The gradient with respect to the flat parameters, given that with respect to the output."""
        plan, none = self.plan, slope.new_empty(0)
        layers = len(plan.layers)
        saved.slope, saved.above = [slope] * layers, [none] * layers
        saved.factors = [_Factors(none, none, none, none)] * layers
        parts: list[Tensor] = []
        for i in reversed(range(1, layers)):
            parts.append(torch.bmm(saved.columns[i].mT, slope).flatten(1))
            above = self._images(torch.bmm(slope, plan.weight(flat, i).mT), i, saved.passed[i])
            inverse, rows = saved.inverse[i], above.shape[1]
            mean, along = above.mean(1, keepdim=True), (above * saved.away[i]).mean(1, keepdim=True) * inverse
            parts.append(torch.cat([along, mean], 2).flatten(1) * rows)
            a = plan.norm(flat, i)[0] * inverse
            b = -a * inverse * along
            slope = torch.addcmul(-a * mean, above, a).addcmul_(saved.away[i], b)
            saved.above[i], saved.slope[i - 1], saved.factors[i] = above, slope, _Factors(a, b, mean, along)
        parts.append(torch.bmm(saved.columns[0].mT, slope).flatten(1))
        return torch.cat(parts[::-1], 1)[:, None]

    def forward_tangent(self, flat: Tensor, saved: _Saved, v: Tensor) -> tuple[Tensor, list[_Moved]]:
        """The tangent of `forward` in direction v of the parameters."""
        plan = self.plan
        moved: list[_Moved] = []
        y_dot = torch.bmm(saved.columns[0], plan.weight(v, 0))
        for i in range(1, len(plan.layers)):
            (scale_dot, shift_dot), inverse, away = plan.norm(v, i), saved.inverse[i], saved.away[i]
            mean, along = y_dot.mean(1, keepdim=True), (y_dot * away).mean(1, keepdim=True) * inverse
            a = saved.factors[i].a
            f = inverse * (scale_dot - a * along)
            z_dot = torch.addcmul(shift_dot - a * mean, y_dot, a).addcmul_(away, f)
            columns = self._columns(z_dot, i, saved.passed[i])
            moved.append(_Moved(columns, y_dot, mean, along, f))
            y_dot = torch.bmm(columns, plan.weight(flat, i)).baddbmm_(saved.columns[i], plan.weight(v, i))
        return y_dot, moved

    def backward_tangent(
        self, flat: Tensor, saved: _Saved, v: Tensor, moved: list[_Moved], slope_dot: Tensor
    ) -> Tensor:
        """The tangent of `backward`: the Hessian times v, given the tangent of the slope at the output."""
        plan = self.plan
        parts: list[Tensor] = []
        for i in reversed(range(1, len(plan.layers))):
            dot, (a, b, mean, along) = moved[i - 1], saved.factors[i]
            slope, away, inverse, above = saved.slope[i], saved.away[i], saved.inverse[i], saved.above[i]
            product = torch.bmm(dot.columns.mT, slope).baddbmm_(saved.columns[i].mT, slope_dot)
            parts.append(product.flatten(1))
            both = torch.bmm(slope_dot, plan.weight(flat, i).mT).baddbmm_(slope, plan.weight(v, i).mT)
            above_dot = self._images(both, i, saved.passed[i])
            mean_dot = above_dot.mean(1, keepdim=True)
            # mean(above_dot scaled + above scaled_dot), with scaled_dot = inverse (y_dot - mean - scaled along)
            around = (above_dot * away).add_(above * dot.y).mean(1, keepdim=True)
            around = inverse * (around - mean * dot.mean - along * dot.along)
            parts.append(torch.cat([around, mean_dot], 2).flatten(1) * above.shape[1])
            e = inverse * (a * (inverse * along * dot.along - around) - dot.f * along)
            r = a * (inverse * along * dot.mean - mean_dot) - dot.f * mean
            slope_dot = torch.addcmul(r, above_dot, a).addcmul_(above, dot.f).addcmul_(dot.y, b).addcmul_(away, e)
        parts.append(torch.bmm(saved.columns[0].mT, slope_dot).flatten(1))
        return torch.cat(parts[::-1], 1)[:, None]

    def descend(self, base: Tensor, parts: Tensor, rates: Tensor | None) -> Tensor:
        """Subtract the parts, times step sizes if there are any."""
        return base - parts[:, 0] if rates is None else torch.addcmul(base, parts[:, 0], rates, value=-1)

    def _columns(self, z: Tensor, i: int, passed: Tensor | None) -> Tensor:
        """Patches of ReLU's output; where it lets through is given for a tangent, and found for z itself."""
        layer, (high, wide) = self.plan.layers[i], self.plan.sizes[i]
        pad, z = layer.padding, z.unflatten(1, (-1, high, wide))
        images = z.new_zeros(*z.shape[:2], high + 2 * pad, wide + 2 * pad, layer.channels)
        inside = images[:, :, pad : pad + high, pad : pad + wide]
        if passed is None:
            torch.clamp_min(z, 0, out=inside)
        else:
            torch.mul(z, passed.view(z.shape), out=inside)
        return windows_of(images, layer)

    def _images(self, columns: Tensor, i: int, passed: Tensor) -> Tensor:
        """The transpose of `_columns`: what the patches of a layer's input add up to, (tasks, rows, channels)."""
        layer, (high, wide), (out_high, out_wide) = self.plan.layers[i], self.plan.sizes[i], self.plan.sizes[i + 1]
        k, s, pad = layer.kernel, layer.stride, layer.padding
        taps = columns.unflatten(2, (k, k, layer.channels)).unflatten(1, (-1, out_high, out_wide))
        out = columns.new_zeros(*taps.shape[:2], high + 2 * pad, wide + 2 * pad, layer.channels)
        for y in range(k):
            for x in range(k):
                out[:, :, y : y + s * out_high : s, x : x + s * out_wide : s] += taps[:, :, :, :, y, x]
        inside = out[:, :, pad : pad + high, pad : pad + wide]
        return (inside * passed.view(inside.shape)).flatten(1, 3)
