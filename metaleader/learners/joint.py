"""The outer steps of learners side by side: by one optimiser for all, for the time of some updates, or each its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metaleader.learners.outer import Outer


def outer_steps(outers: Sequence[Outer]) -> Joint | Apart:
    """As one where that is the same: with an optimiser of the library's, which goes element by element."""
    alike = {(outer.kind, str(outer.schedule), outer.step, outer.clip, outer.flat is None) for outer in outers}
    return Joint(outers) if len(alike) == 1 and outers[0].flat is not None else Apart(outers)


class Joint:
    """Copies of the parameters and the optimisers' states, side by side in one tensor each; `end` writes them back.

    Attributes:
        flat: the parameters, (learners, number of parameters).
    """

    def __init__(self, outers: Sequence[Outer]) -> None:
        self._outers, first = outers, outers[0]
        self.flat = torch.stack([outer.flat for outer in outers if outer.flat is not None])
        states = [outer.optimizer_state() for outer in outers]
        # What is no number a parameter, a count of steps, is the same for all.
        joined = {
            name: torch.stack([state[name] for state in states]) if value.ndim else value.clone()
            for name, value in states[0].items()
        }
        self._optimizer = first.new_optimizer([self.flat])
        if joined:
            self._optimizer.state[self.flat] = joined

    def descend(self, gradients: Tensor, norms: Tensor, number: int) -> None:
        """Take one step down gradients of known norms."""
        first = self._outers[0]
        self.flat.grad = first.clipped(gradients, norms[:, None])
        self._optimizer.param_groups[0]["lr"] = first.lr(number)
        self._optimizer.step()
        self.flat.grad = None

    def end(self, step: int) -> None:
        """Give the learners what is theirs, all of it or nothing."""
        joined = self._optimizer.state[self.flat]
        before = [(outer.flattened().clone(), outer.optimizer_state(), outer.step) for outer in self._outers]
        try:
            for r, outer in enumerate(self._outers):
                outer.take(self.flat[r], {name: v[r] if v.ndim else v for name, v in joined.items()}, step)
        except BaseException:
            for outer, old in zip(self._outers, before, strict=True):
                outer.take(*old)
            raise

    def undo(self) -> None:
        """The learners are as they were."""


class Apart:
    """Every learner's own optimiser."""

    def __init__(self, outers: Sequence[Outer]) -> None:
        self._outers = outers
        self._before = [outer.state_dict() for outer in outers]

    @property
    def flat(self) -> Tensor:
        """The parameters, (learners, number of parameters)."""
        return torch.stack([outer.flattened() for outer in self._outers])

    def descend(self, gradients: Tensor, norms: Tensor, number: int) -> None:
        """Take one step down gradients of known norms."""
        for r, outer in enumerate(self._outers):
            outer.descend(gradients[r], norms[r], number)

    def end(self, step: int) -> None:
        """Count the updates."""
        for outer in self._outers:
            outer.step = step

    def undo(self) -> None:
        """Go back to where the updates began."""
        for outer, state in zip(self._outers, self._before, strict=True):
            outer.load_state_dict(state)
