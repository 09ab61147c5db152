"""What the engine runs: a gradient with flat parameters, several updates, predictions of adapted learners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from metaleader.engine.conv.gradient import ChainGradient
from metaleader.engine.objective import Adaptation, Objective
from metaleader.gradient.inner import Params
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, ClassBatch


class FlatGradient:
    """A program for gradients by name, as one for flat ones."""

    def __init__(self, program: Callable[..., tuple[Tensor, Params]], objective: Objective) -> None:
        self._program, self._form = program, objective.form

    def __call__(self, flat: Tensor, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Losses and norms, (2, replicas), and flat gradients."""
        losses, gradients = self._program(self._form.named(flat), support, query, noise)
        found = self._form.flat(gradients)
        return torch.stack([losses, torch.linalg.vector_norm(found, dim=1)]), found


class OuterSteps(Protocol):
    """Outer steps that change tensors in place, the flat parameters among them."""

    flat: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that a step changes."""
        ...

    def descend(self, gradients: Tensor, norms: Tensor, rate: Tensor) -> None:
        """Take one step down gradients of known norms."""
        ...


class SeveralUpdates:
    """Several updates, one after the other."""

    def __init__(
        self, gradient: Callable[..., tuple[Tensor, Tensor]], steps: Callable[[dict[str, Tensor]], OuterSteps]
    ) -> None:
        self._gradient, self._steps = gradient, steps

    def __call__(
        self, tensors: dict[str, Tensor], rates: Tensor, support: Any, query: Any
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The tensors after the updates; losses and norms of each."""
        outer = self._steps({name: value.clone() for name, value in tensors.items()})
        watched = []
        for i, rate in enumerate(rates.unbind()):
            of_one = tree_map(lambda leaf: leaf[i], (support, query))  # noqa: B023
            found, gradients = self._gradient(outer.flat, *of_one, None)
            outer.descend(gradients, found[1], rate)
            watched.append(found)
        return outer.tensors, torch.stack(watched)


class EagerGradient:
    """The gradient by `meta_gradient`."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def __call__(self, params: Params, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        """Losses, (replicas,), and gradients by name."""
        if len(next(iter(params.values()))) == 1:
            first = lambda tree: tree_map(lambda leaf: leaf[0], tree)  # noqa: E731
            loss, gradient = self._objective.gradient(
                first(params), first(support), first(query), None if noise is None else noise[0]
            )
            return loss[None], {name: value[None] for name, value in gradient.items()}
        in_dims = (0, 0, 0, None if noise is None else 0)
        return vmap(self._objective.gradient, in_dims=in_dims)(params, support, query, noise)


class Predictions:
    """Adapt each replica to its data and predict."""

    def __init__(
        self,
        network: Network,
        adaptation: Adaptation | None,
        steps: Sequence[int],
        chain: ChainGradient | None,
    ) -> None:
        self._network, self._adaptation, self._steps, self._chain = network, adaptation, steps, chain

    def __call__(
        self, params: Params, data: Batch | ClassBatch | None, x: Any, classes: Tensor | None
    ) -> dict[str, Tensor]:
        """Predictions by numbers of steps, and "task" with batch norm."""
        adapted = self._adapted(params, data)
        replicas = range(len(next(iter(params.values()))))
        at = lambda tree, r: tree_map(lambda leaf: leaf if leaf is None else leaf[r], tree)  # noqa: E731
        net = self._network
        found = {
            str(n): torch.stack([net.predict(at(adapted[n], r), at(x, r), None, at(classes, r)) for r in replicas])
            for n in self._steps
        }
        if net.has_batch_norm and data is not None:
            own = adapted[self._steps[0]]
            found["task"] = torch.stack(
                [net.predict_by(at(data.x, r), at(own, r), at(x, r), at(classes, r)) for r in replicas]
            )
        return found

    def _adapted(self, params: Params, data: Batch | ClassBatch | None) -> dict[int, Params]:
        if self._adaptation is None or data is None:
            return dict.fromkeys(self._steps, params)
        if self._chain is not None:
            return self._chain.adapted(params, data, self._steps)
        how, found, done = self._adaptation, {}, 0
        for number in sorted(set(self._steps)):
            walk = lambda p, d: how.walk(self._network.loss_fn, p, d, number - done)  # noqa: B023, E731
            params, done = vmap(walk)(params, data), number
            found[number] = params
        return found
