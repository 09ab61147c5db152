"""The objective of an update and the adaptation procedure of a learner.

A learner adapts by gradient steps (`GradientSteps`), or by an `Adaptation` such as a closed form. The gradient of one
task is that of the loss after adaptation, or a function of the user's own.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_map

from metaleader.gradient.meta import Inner, descend, mean_gradient, unrolled_mean
from metaleader.gradient.selection import LossFn, Params, StepSize, split, step_sizes
from metaleader.nets.functional import Layout, Network

# Prefix of the logarithm of a tensor's step size, where step sizes are learned with the parameters
LOG_LR = "log inner_lr of "
_NO_INNER_STEPS = Inner(steps=0)
# (params, support, query) of one task -> loss, gradients by name
TaskGradient = Callable[[Params, Any, Any], tuple[Tensor, Params]]


class Form(NamedTuple):
    """The form in which a meta-gradient is computed; see `engine.form`.

    Attributes:
        unroll: whether the activations of all inner steps are held at once.
        chunk: the number of tasks computed at a time; None is all.
        operations: about how many operations of torch one gradient takes.
    """

    unroll: bool
    chunk: int | None
    operations: int


class Adaptation(ABC):
    """A procedure that adapts the parameters of a learner to the data of a task, other than gradient steps.

    A subclass is a frozen dataclass of plain settings. Its functions are written for one task, in operations that
    `torch.func` can batch and differentiate.

    Attributes:
        takes_weights: whether the datapoints of updates are a `WeightedBatch`, in which repeated datapoints of a small
            task have weight 0, instead of a `Batch`.
    """

    takes_weights: ClassVar[bool] = False

    def check(self, network: Network) -> None:  # noqa: B027
        """Raise ValueError for a network or a loss that the procedure does not support."""

    def check_data(self, network: Network, params: Params, batch: Any) -> None:  # noqa: B027
        """Raise ValueError for first datapoints that the procedure does not support."""

    def init(self, network: Network) -> Params:
        """Parameters that are learned with those of the network, by names that the network does not use."""
        return {}

    @abstractmethod
    def __call__(self, network: Network, params: Params, data: Any) -> Params:
        """The parameters of the network after adaptation to the data of one task."""

    def loss(self, network: Network, params: Params, support: Any, query: Any) -> Tensor:
        """The loss of one task that updates minimise: by default the query loss after adaptation to the support."""
        return network.loss_fn(params | self(network, params, support), query)

    def variance(self, network: Network, params: Params, data: Any | None, x: Any) -> Tensor:
        """The predictive variance at x after adaptation to the data of a task; None for no data."""
        raise ValueError(f"{type(self).__name__} has no predictive variance; metaleader.BayesianHead has one")


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss after adaptation, as a function of a learner's parameters.

    Attributes:
        network: the network and its loss.
        inner: the gradient steps, unless there is an `adaptation`.
        learn_lr: whether the logarithms of the step sizes are among the parameters; `inner.lr` is their initial value.
        adaptation: a procedure other than gradient steps.
        own_gradient: the loss and gradient of one task, written by a user, in place of those of the objective.
        operations: about how many operations of torch one gradient takes, or None if that is not known.
    """

    network: Network
    inner: Inner = _NO_INNER_STEPS
    learn_lr: bool = False
    adaptation: Adaptation | None = None
    own_gradient: TaskGradient | None = None
    operations: int | None = None

    @functools.cached_property
    def layout(self) -> Layout:
        """Of everything that is learned."""
        return Layout(self.params())

    @functools.cached_property
    def _rates(self) -> dict[str, float | Tensor]:
        """The initial step size of each tensor that moves."""
        return step_sizes(self.inner.lr, split(dict(self.network.module.named_parameters()), self.inner.only)[0])

    @functools.cached_property
    def _by_form(self) -> dict[Form, Objective]:
        return {}

    def in_form(self, form: Form) -> Objective:
        """The same objective whose gradient is computed in a form; one object per form."""
        if form not in self._by_form:
            inner = self.inner._replace(unroll=form.unroll, chunk=form.chunk)
            self._by_form[form] = replace(self, inner=inner, operations=form.operations)
        return self._by_form[form]

    def params(self) -> Params:
        """The initial parameters of the network, and those of the adaptation or the step sizes if they are learned."""
        params = self.network.params()
        if self.adaptation is not None:
            return params | self.adaptation.init(self.network)
        if not self.learn_lr:
            return params
        moving = split(params, self.inner.only)[0]
        rates = step_sizes(self.inner.lr, moving)
        return params | {
            LOG_LR + name: torch.full((), math.log(rates[name]), dtype=value.dtype, device=value.device)
            for name, value in moving.items()
        }

    def key(self) -> tuple[Any, ...]:
        """Everything but the network and a user's gradient, as a value that can be compared."""
        return (GradientSteps.of(self.inner.lr, 0, None), *self.inner[1:], self.learn_lr, self.adaptation)

    @property
    def task_gradient(self) -> TaskGradient | None:
        """The gradient of one task, if it is not that of the loss after gradient steps."""
        if self.own_gradient is not None or self.adaptation is None:
            return self.own_gradient
        return self.one_task

    def one_task(self, params: Params, support: Any, query: Any) -> tuple[Tensor, Params]:
        """The loss of one task after adaptation, and its gradient, in plain torch; networks without dropout."""
        adaptation = self.adaptation
        if adaptation is not None:
            gradient, loss = grad_and_value(lambda p: adaptation.loss(self.network, p, support, query))(params)
            return loss, gradient
        support, query = tree_map(lambda leaf: leaf[None], (support, query))
        return self.mean_over_tasks(params, support, query, None)

    def mean_over_tasks(
        self, params: Params, support: Any, query: Any, noise: Tensor | None, side_by_side: bool = False
    ) -> tuple[Tensor, Params]:
        """The mean loss over tasks after gradient steps, and its gradient; batched over tasks.

        With `side_by_side`, every tensor has a leading learner dimension, and the inner loop is unrolled.
        """
        rates = self._rates
        theta = {name: value for name, value in params.items() if name in rates}
        fixed = {name: v for name, v in params.items() if name not in rates and not name.startswith(LOG_LR)}
        learned = learned_rates(params) if self.learn_lr else {}
        inner = self.inner._replace(lr=learned or rates)
        function = functools.partial(unrolled_mean, side_by_side=True) if side_by_side else mean_gradient
        loss_fn = self.network.loss_fn
        loss, gradient, by_rate = function(loss_fn, theta, fixed, inner, support, query, noise, self.learn_lr)
        gradient |= {LOG_LR + name: by_rate[name] * rate for name, rate in learned.items()}
        return loss, {name: gradient[name] for name in params}


class GradientSteps(NamedTuple):
    """The update procedure U of the paper: gradient steps on the data of a task.

    Attributes:
        lr: one step size, (name, step size) pairs, or None where step sizes are learned.
        steps: the number of gradient steps.
        only: which parameters move; see `adapt`.
    """

    lr: float | tuple[tuple[str, float], ...] | None
    steps: int
    only: str | None

    @classmethod
    def of(cls, lr: StepSize | None, steps: int, only: str | None) -> GradientSteps:
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


def over_learners(function: Callable[..., Any], params: Params, support: Any, query: Any, noise: Tensor | None) -> Any:
    """Call a function of (params, support, query, noise) of one learner for learners side by side."""
    if len(next(iter(params.values()))) > 1:
        in_dims = (0, 0, 0, None if noise is None else 0)
        return vmap(function, in_dims=in_dims)(params, support, query, noise)
    # Without vmap, one learner runs fewer and larger operations.
    first = tree_map(lambda leaf: leaf if leaf is None else leaf[0], (params, support, query, noise))
    return tree_map(lambda value: value[None], function(*first))
