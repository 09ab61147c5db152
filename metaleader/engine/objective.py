"""What an update minimises, whoever computes its gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metaleader.gradient.flat import Form
from metaleader.gradient.inner import LossFn, Params, StepSize, adapt, split, step_sizes
from metaleader.gradient.meta import meta_gradient
from metaleader.nets.functional import Network

# Before the name of a tensor: the logarithm of its step size, where step sizes are learned with the parameters.
LOG_LR = "log inner_lr of "


@dataclass(frozen=True, eq=False)
class Objective:
    """What an update minimises: the arguments of `meta_gradient` that stay the same from update to update.

    With `learn_lr` the step sizes are among the parameters, as logarithms; `inner_lr` is where they begin.
    """

    network: Network
    inner_lr: StepSize = 0.1
    inner_steps: int = 0
    first_order: bool = False
    chunk: int | None = None
    only: str | None = None
    every_step: bool = False
    learn_lr: bool = False

    @property
    def loss_fn(self) -> LossFn:
        """The loss of one task."""
        return self.network.loss_fn

    @functools.cached_property
    def form(self) -> Form:
        """Of all that is learned."""
        return Form(self.params())

    def params(self) -> Params:
        """Where learning begins: the network's own parameters, and the step sizes if they are learned."""
        params = self.network.params()
        if not self.learn_lr:
            return params
        moving = split(params, self.only)[0]
        rates = step_sizes(self.inner_lr, moving)
        return params | {
            LOG_LR + name: torch.full((), math.log(rates[name]), dtype=value.dtype, device=value.device)
            for name, value in moving.items()
        }

    def key(self) -> tuple[Any, ...]:
        """What it is apart from the network, as a value that can be compared."""
        procedure = Adaptation(self.inner_lr, self.inner_steps, self.only).key()
        return procedure, self.first_order, self.chunk, self.every_step, self.learn_lr

    def rate(self, name: str) -> float | Tensor:
        """The step size of a parameter that moves."""
        rate = self.inner_lr[name] if isinstance(self.inner_lr, Mapping) else self.inner_lr
        return rate.reshape(()) if isinstance(rate, Tensor) else rate

    def gradient(self, params: Params, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        """Loss and gradient of one learner, eagerly."""
        rates = learned_rates(params)
        run = functools.partial(
            meta_gradient,
            self.loss_fn,
            without_rates(params),
            support,
            query,
            rates or self.inner_lr,
            self.inner_steps,
            self.first_order,
            self.chunk,
            only=self.only,
            noise=noise,
            every_step=self.every_step,
        )
        if not rates:
            return run()
        loss, gradient, by_rate = run(lr_gradient=True)
        assert isinstance(by_rate, dict)
        return loss, gradient | {LOG_LR + name: by_rate[name] * rate for name, rate in rates.items()}


def learned_rates(params: Params) -> Params:
    """The step sizes among the parameters, by the names of the tensors they move; none if they are not learned."""
    return {name.removeprefix(LOG_LR): value.exp() for name, value in params.items() if name.startswith(LOG_LR)}


def without_rates(params: Params) -> Params:
    """The network's own parameters."""
    return {name: value for name, value in params.items() if not name.startswith(LOG_LR)}


class Adaptation(NamedTuple):
    """The update procedure U of a learner; its step sizes are None where they are learned."""

    lr: StepSize | None
    steps: int
    only: str | None

    def rates(self, params: Params) -> StepSize:
        """The step sizes, of a learner with these parameters."""
        return learned_rates(params) if self.lr is None else self.lr

    def objective(self, network: Network, steps: int) -> Objective:
        """An objective whose inner loop is this procedure, with so many steps."""
        if self.lr is None:
            return Objective(network, inner_steps=steps, only=self.only, learn_lr=True)
        return Objective(network, self.lr, steps, only=self.only)

    def walk(self, loss_fn: LossFn, params: Params, data: Any, steps: int, noise: Tensor | None = None) -> Params:
        """Take gradient steps on one task's data; learned step sizes, among the parameters, stay."""
        own = without_rates(params)
        return params | adapt(loss_fn, own, data, self.rates(params), steps, only=self.only, noise=noise)

    def key(self) -> tuple[Any, ...]:
        """What it is, as a value that can be looked up."""
        lr = self.lr
        if lr is None:
            return "learned", self.steps, self.only
        rates = tuple((n, float(lr[n])) for n in sorted(lr)) if isinstance(lr, Mapping) else float(lr)
        return rates, self.steps, self.only
