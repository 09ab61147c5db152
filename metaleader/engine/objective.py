"""The objective of an update and the adaptation procedure of a learner, as values."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metaleader.gradient.meta import Inner, descend
from metaleader.gradient.selection import LossFn, Params, StepSize, split, step_sizes
from metaleader.nets.functional import Layout, Network

# Prefix of the logarithm of a tensor's step size, where step sizes are learned with the parameters
LOG_LR = "log inner_lr of "
_NO_INNER_STEPS = Inner(steps=0)


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss after `inner`, as a function of a learner's parameters.

    With `learn_lr`, the logarithms of the step sizes are among the parameters, and `inner.lr` is their initial value.
    """

    network: Network
    inner: Inner = _NO_INNER_STEPS
    learn_lr: bool = False

    @functools.cached_property
    def layout(self) -> Layout:
        """Of everything that is learned."""
        return Layout(self.params())

    def params(self) -> Params:
        """The initial parameters of the network, and the step sizes if they are learned."""
        params = self.network.params()
        if not self.learn_lr:
            return params
        moving = split(params, self.inner.only)[0]
        rates = step_sizes(self.inner.lr, moving)
        return params | {
            LOG_LR + name: torch.full((), math.log(rates[name]), dtype=value.dtype, device=value.device)
            for name, value in moving.items()
        }

    def key(self) -> tuple[Any, ...]:
        """Everything but the network, as a value that can be compared."""
        return (Adaptation.of(self.inner.lr, 0, None), *self.inner[1:], self.learn_lr)


class Adaptation(NamedTuple):
    """The update procedure U of a learner: gradient steps on the data of a task.

    Attributes:
        lr: one step size, (name, step size) pairs, or None where step sizes are learned.
        steps: the number of gradient steps.
        only: which parameters move; see `adapt`.
    """

    lr: float | tuple[tuple[str, float], ...] | None
    steps: int
    only: str | None

    @classmethod
    def of(cls, lr: StepSize | None, steps: int, only: str | None) -> Adaptation:
        """Build one from step sizes in any form."""
        if isinstance(lr, Mapping):
            return cls(tuple((name, float(lr[name])) for name in sorted(lr)), steps, only)
        return cls(None if lr is None else float(lr), steps, only)

    def rates(self, params: Params) -> dict[str, float | Tensor]:
        """The step size of each tensor that moves, for a learner with these parameters."""
        if self.lr is None:
            return dict(learned_rates(params))
        lr = dict(self.lr) if isinstance(self.lr, tuple) else self.lr
        return step_sizes(lr, split(params, self.only)[0])

    def objective(self, network: Network, steps: int) -> Objective:
        """An objective whose inner loop is this procedure, with the given number of steps."""
        lr = dict(self.lr) if isinstance(self.lr, tuple) else self.lr
        inner = Inner(0.1 if lr is None else lr, steps, only=self.only)
        return Objective(network, inner, learn_lr=lr is None)

    def run(self, loss_fn: LossFn, params: Params, data: Any, steps: range, noise: Tensor | None = None) -> Params:
        """Take the gradient steps with these numbers on one task's data; learned step sizes are not changed."""
        return descend(loss_fn, params, self.rates(params), data, steps, noise)


def learned_rates(params: Params) -> Params:
    """The step sizes among the parameters, by the names of the tensors they move; empty if they are not learned."""
    return {name.removeprefix(LOG_LR): value.exp() for name, value in params.items() if name.startswith(LOG_LR)}


def without_rates(params: Params) -> Params:
    """The parameters of the network."""
    return {name: value for name, value in params.items() if not name.startswith(LOG_LR)}
