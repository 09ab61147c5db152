"""What an update minimises, whoever computes its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from metaleader.inner import LossFn, Params, StepSize
from metaleader.metagrad import meta_gradient
from metaleader.network import Network


@dataclass(frozen=True, eq=False)
class Objective:
    """What an update minimises: the arguments of `meta_gradient` that stay the same from update to update."""

    network: Network
    inner_lr: StepSize = 0.1
    inner_steps: int = 0
    first_order: bool = False
    chunk: int | None = None
    only: str | None = None

    @property
    def loss_fn(self) -> LossFn:
        """The loss of one task."""
        return self.network.loss_fn

    def rate(self, name: str) -> float | Tensor:
        """The step size of a parameter that moves."""
        rate = self.inner_lr[name] if isinstance(self.inner_lr, Mapping) else self.inner_lr
        return rate.reshape(()) if isinstance(rate, Tensor) else rate

    def gradient(self, params: Params, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        """Loss and gradient of one learner, eagerly."""
        return meta_gradient(
            self.loss_fn,
            params,
            support,
            query,
            self.inner_lr,
            self.inner_steps,
            self.first_order,
            self.chunk,
            only=self.only,
            noise=noise,
        )


class Adaptation(NamedTuple):
    """The update procedure U of a learner."""

    lr: StepSize
    steps: int
    only: str | None

    def key(self) -> tuple[Any, ...]:
        """What it is, as a value that can be looked up."""
        lr = self.lr
        rates = tuple((n, float(lr[n])) for n in sorted(lr)) if isinstance(lr, Mapping) else float(lr)
        return rates, self.steps, self.only
