"""The outer steps of learners side by side: by one optimiser for all, for the time of some updates, or each its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metaleader.learners.optimizer import OptimizerFactory, Outer, clipped


def outer_steps(outers: Sequence[Outer]) -> Joint | Apart:
    """As one where that is the same: with an optimiser of the library's, which goes element by element."""
    alike = {(outer.kind, str(outer.schedule), outer.step, outer.clip, outer.flat is None) for outer in outers}
    return Joint(outers) if len(alike) == 1 and outers[0].flat is not None else Apart(outers)


class Steps:
    """Outer steps of one of the library's optimisers, in place.

    Args:
        kind: makes the optimiser.
        clip: the largest norm of a learner's gradient, or None.
        tensors: "flat", the parameters, (learners, number of parameters), and what the optimiser knows of them; nothing
            more before the first step.

    Attributes:
        flat: the parameters.
    """

    def __init__(self, kind: OptimizerFactory, clip: float | None, tensors: dict[str, Tensor]) -> None:
        known = dict(tensors)
        self.flat = known.pop("flat")
        self._clip, self._optimizer = clip, kind([self.flat], lr=0.0)
        if known:
            self._optimizer.state[self.flat] = known
            return
        # Before its first step an optimiser knows what it does after one down nothing, all of it zero.
        self.flat.grad = torch.zeros_like(self.flat)
        self._optimizer.step()
        for value in self._optimizer.state[self.flat].values():
            value.zero_()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that a step changes."""
        return {"flat": self.flat, **self._optimizer.state[self.flat]}

    def descend(self, gradients: Tensor, norms: Tensor, rate: float | Tensor) -> None:
        """Take one step down gradients of known norms, (learners,)."""
        group = self._optimizer.param_groups[0]
        group["lr"] = rate
        if "capturable" in group:  # torch asks to be told, and else refuses
            group["capturable"] = self.flat.is_cuda and torch.cuda.is_current_stream_capturing()
        self.flat.grad = clipped(gradients, norms[:, None], self._clip)
        self._optimizer.step()
        self.flat.grad = None


@functools.cache
def _steps_of(kind: OptimizerFactory, clip: float | None) -> Callable[[dict[str, Tensor]], Steps]:
    return functools.partial(Steps, kind, clip)


class Joint:
    """Copies of the parameters and the optimisers' states, side by side in one tensor each; `end` writes them back."""

    def __init__(self, outers: Sequence[Outer]) -> None:
        self._outers = outers
        self.make = _steps_of(outers[0].kind, outers[0].clip)
        states = [outer.optimizer_state() for outer in outers]
        # What is no number a parameter, a count of steps, is the same for all.
        joined = {
            name: torch.stack([state[name] for state in states]) if value.ndim else value.clone()
            for name, value in states[0].items()
        }
        self._steps = self.make({"flat": torch.stack([outer.flattened() for outer in outers]), **joined})

    @property
    def flat(self) -> Tensor:
        """The parameters, (learners, number of parameters)."""
        return self._steps.flat

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that a step changes."""
        return self._steps.tensors

    def rates(self, numbers: Sequence[int]) -> Tensor:
        """The step sizes of some updates, where and as torch's optimisers read them: in float32 on a GPU."""
        found = torch.tensor([self._outers[0].lr(number) for number in numbers], dtype=torch.float64)
        return found.to(self.flat.device, torch.float32) if self.flat.is_cuda else found

    def descend(self, gradients: Tensor, norms: Tensor, number: int) -> None:
        """Take one step down gradients of known norms."""
        self._steps.descend(gradients, norms, self._outers[0].lr(number))

    def go_on_from(self, tensors: dict[str, Tensor]) -> None:
        """Steps were taken elsewhere."""
        self._steps = self.make(tensors)

    def end(self, step: int) -> None:
        """Give the learners what is theirs, all of it or nothing."""
        known = self.tensors
        flat = known.pop("flat")
        before = [(outer.flattened().clone(), outer.optimizer_state(), outer.step) for outer in self._outers]
        try:
            for r, outer in enumerate(self._outers):
                outer.take(flat[r], {name: v[r] if v.ndim else v for name, v in known.items()}, step)
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
