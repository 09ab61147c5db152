"""The head of a chain, from the last batch norm on, differentiated by torch: one task at a time, vmapped over tasks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from metaleader.engine.conv.trace import Chain
from metaleader.engine.objective import Objective
from metaleader.gradient.inner import Params, moving_names


class Head:
    """What an update asks of a head: the loss with its slope, an inner step, and its adjoint.

    Args:
        chain: the network.
        objective: what the update minimises.
        size: (height, width) of the last convolution's output.

    Attributes:
        moving: the names of all parameters of the network that the inner loop moves.
    """

    def __init__(self, chain: Chain, objective: Objective, size: tuple[int, int]) -> None:
        self.chain, self.objective, self.size = chain, objective, size
        self.moving = moving_names(chain.names, objective.only)

    def rate(self, name: str, learned: Params) -> float | Tensor:
        """The step size of a parameter; learned ones are given."""
        return 0.0 if name not in self.moving else learned.get(name, self.objective.rate(name))

    def gradient(self, y: Tensor, head: Params, target: Any) -> tuple[Tensor, Tensor, Params]:
        """Each task's loss and its gradient with respect to the last convolution's output and the head."""
        (slope, gradient), losses = vmap(grad_and_value(self._loss, argnums=(0, 1)))(y, head, target)
        return losses, slope, gradient

    def step(self, y: Tensor, head: Params, target: Any, rates: Params) -> tuple[Tensor, Params]:
        """The slope at the output, and the head after an inner step."""

        def one(y: Tensor, head: Params, target: Any, rates: Params) -> tuple[Tensor, Params]:
            slope, gradient = grad(self._loss, argnums=(0, 1))(y, head, target)
            return slope, {name: value - self.rate(name, rates) * gradient[name] for name, value in head.items()}

        return vmap(one)(y, head, target, rates)

    def curve(
        self, y: Tensor, head: Params, target: Any, y_dot: Tensor, lam: Params, rates: Params
    ) -> tuple[Tensor, Params]:
        """The tangent of the slope, and the adjoint step of the head: the gradient of <gradient, direction>."""

        def along(y: Tensor, head: Params, target: Any, y_dot: Tensor, lam: Params, rates: Params) -> Tensor:
            slope, gradient = grad(self._loss, argnums=(0, 1))(y, head, target)
            products = [(gradient[n] * lam[n]).sum() * self.rate(n, rates) for n in gradient if n in self.moving]
            return torch.stack([(slope * y_dot).sum(), *products]).sum()

        slope_dot, change = vmap(grad(along, argnums=(0, 1)))(y, head, target, y_dot, lam, rates)
        return slope_dot, {name: lam[name] - change[name] for name in lam}

    def _loss(self, y: Tensor, head: Params, target: Any) -> Tensor:
        return self.chain.head_loss(y, head, target, self.size)
