"""The four passes through a chain's convolutions, in torch's operations: for any device and dtype.

Forward and backward give the gradient of one task's loss; their tangents in a direction of the parameters give the
Hessian times that direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metaleader.chain import Plan, columns_of


@dataclass
class _Saved:
    """What the passes at one theta leave behind, by layer; entry 0 of what batch norm concerns is unused."""

    columns: list[Tensor]
    scaled: list[Tensor]
    inverse: list[Tensor]
    passed: list[Tensor]
    above: list[Tensor]
    slope: list[Tensor]


class TorchPasses:
    """The four passes through the convolutions in torch's operations, for any device and dtype.

    `scaled` is (y - mean) / deviation of a layer's input y before batch norm, `passed` where ReLU lets it through,
    `above` the gradient that arrives there, `slope` the gradient with respect to a layer's output.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def forward(self, flat: Tensor, patches: Tensor) -> tuple[Tensor, _Saved]:
        """The last convolution's output, and what the other passes need."""
        plan = self.plan
        none = patches.new_empty(0)
        saved = _Saved([patches], [none], [none], [none], [none], [])
        y = torch.bmm(patches, plan.weight(flat, 0))
        for i, layer in enumerate(plan.layers[1:], 1):
            scale, shift = plan.norm(flat, i)
            centred = y - y.mean(1, keepdim=True)
            inverse = torch.rsqrt((centred * centred).mean(1, keepdim=True) + layer.eps)
            scaled = centred * inverse
            z = scaled * scale + shift
            saved.scaled.append(scaled)
            saved.inverse.append(inverse)
            saved.passed.append(z > 0)
            saved.columns.append(self._columns(F.relu(z), i))
            y = torch.bmm(saved.columns[i], plan.weight(flat, i))
        return y, saved

    def backward(self, flat: Tensor, saved: _Saved, slope: Tensor) -> Tensor:
        """The gradient with respect to the flat parameters, given that with respect to the output."""
        plan = self.plan
        parts: list[Tensor] = []
        saved.slope = [slope]
        for i in reversed(range(1, len(plan.layers))):
            scale, _ = plan.norm(flat, i)
            parts.insert(0, torch.bmm(saved.columns[i].mT, slope).flatten(1))
            above = self._images(torch.bmm(slope, plan.weight(flat, i).mT), i) * saved.passed[i]
            scaled = saved.scaled[i]
            along = (above * scaled).sum(1, keepdim=True)
            total = above.sum(1, keepdim=True)
            parts.insert(0, torch.cat([along, total], 2).flatten(1))
            rows = above.shape[1]
            slope = scale * saved.inverse[i] * (above - total / rows - scaled * (along / rows))
            saved.above.insert(1, above)
            saved.slope.insert(0, slope)
        parts.insert(0, torch.bmm(saved.columns[0].mT, slope).flatten(1))
        return torch.cat(parts, 1)[:, None]

    def forward_tangent(self, flat: Tensor, saved: _Saved, v: Tensor) -> tuple[Tensor, Any]:
        """The tangent of `forward` in direction v of the parameters."""
        plan = self.plan
        moved: list[tuple[Tensor, Tensor, Tensor]] = []
        dot = torch.bmm(saved.columns[0], plan.weight(v, 0))
        for i in range(1, len(plan.layers)):
            (scale, _), (scale_dot, shift_dot) = plan.norm(flat, i), plan.norm(v, i)
            scaled, inverse = saved.scaled[i], saved.inverse[i]
            centred = dot - dot.mean(1, keepdim=True)
            along = (scaled * dot).mean(1, keepdim=True)
            scaled_dot = inverse * (centred - scaled * along)
            a_dot = (scale_dot * scaled + scale * scaled_dot + shift_dot) * saved.passed[i]
            columns_dot = self._columns(a_dot, i)
            moved.append((columns_dot, scaled_dot, along))
            dot = torch.bmm(columns_dot, plan.weight(flat, i)) + torch.bmm(saved.columns[i], plan.weight(v, i))
        return dot, moved

    def backward_tangent(self, flat: Tensor, saved: _Saved, v: Tensor, moved: Any, slope_dot: Tensor) -> Tensor:
        """The tangent of `backward`: the Hessian times v, given the tangent of the slope at the output."""
        plan = self.plan
        parts: list[Tensor] = []
        for i in reversed(range(1, len(plan.layers))):
            (scale, _), (scale_dot, _) = plan.norm(flat, i), plan.norm(v, i)
            columns_dot, scaled_dot, along_dot = moved[i - 1]
            slope, scaled, inverse, above = saved.slope[i], saved.scaled[i], saved.inverse[i], saved.above[i]
            product = torch.bmm(columns_dot.mT, slope) + torch.bmm(saved.columns[i].mT, slope_dot)
            parts.insert(0, product.flatten(1))
            both = torch.bmm(slope_dot, plan.weight(flat, i).mT) + torch.bmm(slope, plan.weight(v, i).mT)
            above_dot = self._images(both, i) * saved.passed[i]
            rows = above.shape[1]
            total, along = above.sum(1, keepdim=True), (above * scaled).sum(1, keepdim=True)
            total_dot = above_dot.sum(1, keepdim=True)
            around = (above_dot * scaled + above * scaled_dot).sum(1, keepdim=True)
            parts.insert(0, torch.cat([around, total_dot], 2).flatten(1))
            inner = above - total / rows - scaled * (along / rows)
            inner_dot = above_dot - total_dot / rows - scaled_dot * (along / rows) - scaled * (around / rows)
            factor_dot = scale_dot * inverse - scale * inverse * inverse * along_dot
            slope_dot = factor_dot * inner + scale * inverse * inner_dot
        parts.insert(0, torch.bmm(saved.columns[0].mT, slope_dot).flatten(1))
        return torch.cat(parts, 1)[:, None]

    def _columns(self, a: Tensor, i: int) -> Tensor:
        return columns_of(a.unflatten(1, (-1, *self.plan.sizes[i])), self.plan.layers[i])

    def _images(self, columns: Tensor, i: int) -> Tensor:
        """The transpose of `_columns`: what the patches of a layer's input add up to, (tasks, rows, channels)."""
        layer, (high, wide), (out_high, out_wide) = self.plan.layers[i], self.plan.sizes[i], self.plan.sizes[i + 1]
        k, s, pad = layer.kernel, layer.stride, layer.padding
        taps = columns.unflatten(2, (k, k, layer.channels)).unflatten(1, (-1, out_high, out_wide))
        out = columns.new_zeros(*taps.shape[:2], high + 2 * pad, wide + 2 * pad, layer.channels)
        for y in range(k):
            for x in range(k):
                out[:, :, y : y + s * out_high : s, x : x + s * out_wide : s] += taps[:, :, :, :, y, x]
        return out[:, :, pad : pad + high, pad : pad + wide].flatten(1, 3)

    def descend(self, base: Tensor, parts: Tensor, rates: Tensor | None) -> Tensor:
        """Subtract the parts, times step sizes if there are any."""
        return base - parts[:, 0] if rates is None else base - rates * parts[:, 0]
