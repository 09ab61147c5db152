"""FTML, follow the meta leader: keep minimising the loss after adaptation over all tasks seen (Eq. 4, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from metaleader.engine.objective import Adaptation, Objective
from metaleader.gradient.inner import StepSize, split, step_sizes
from metaleader.learners.learner import Learner
from metaleader.learners.options import Common, Model, check_integer, check_step_size
from metaleader.losses import Loss
from metaleader.memory.by_task import Draw


class FTML(Learner):
    """Follow the meta leader.

    Args:
        model: an `nn.Module`, or a function that builds one.
        loss: of (prediction, target).
        inner_lr: the step size of the inner loop and of `adapt`: one, or one for each tensor that moves, by name.
        inner_steps: gradient steps in the inner loop and in `adapt`.
        support: datapoints of each task that an update adapts on, disjoint from its `query`.
        only: which parameters move in the inner loop: None for all, "last" for the last layer, or a name pattern.
        first_order: leave the second derivatives out of the meta-gradient.
        every_step: minimise the mean of the losses after each inner step, instead of that after the last.
        learn_lr: learn the inner step sizes too, one for each tensor that moves; they begin at `inner_lr`.
        chunk: how many tasks are held at a time; bounds the memory.
        common: `meta_lr`, `meta_steps`, `tasks_per_step`, `query`, `optimizer`, `clip`, `weights`, `max_tasks`,
            `preprocess`, `seed`, `device`; see `Learner`.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss,
        *,
        inner_lr: StepSize = 0.1,
        inner_steps: int = 5,
        support: int = 10,
        only: str | None = None,
        first_order: bool = False,
        every_step: bool = False,
        learn_lr: bool = False,
        chunk: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, loss, **common)
        check_integer("inner_steps", inner_steps, 0)
        check_integer("support", support, 1)
        if chunk is not None:
            check_integer("chunk", chunk, 1)
        check_step_size("inner_lr", inner_lr, self.params, only)
        if learn_lr and (first_order or inner_steps == 0 or min(_values(inner_lr)) == 0):
            raise ValueError("learn_lr needs inner steps of a size above 0, and their second derivatives")
        self.inner_lr, self.inner_steps, self.only = inner_lr, inner_steps, only
        self.support, self.first_order, self.chunk = support, first_order, chunk
        self.every_step, self.learn_lr = every_step, learn_lr
        self._minimise(Objective(self._network, inner_lr, inner_steps, first_order, chunk, only, every_step, learn_lr))
        self._hyperparameters |= {
            "inner_lr": {k: float(v) for k, v in inner_lr.items()}
            if isinstance(inner_lr, Mapping)
            else float(inner_lr),
            "inner_steps": inner_steps,
            "support": support,
            "only": only,
            "first_order": first_order,
            "every_step": every_step,
            "learn_lr": learn_lr,
            "chunk": chunk,
        }

    def _draw(self, steps: Sequence[int]) -> Draw | None:
        return self._buffer.draw(self.seed, steps, self.tasks_per_step, self.support, self.query)

    def _adaptation(self) -> Adaptation:
        return Adaptation(None if self.learn_lr else self.inner_lr, self.inner_steps, self.only)

    @property
    def step_sizes(self) -> dict[str, float]:
        """The inner step size of each tensor that moves: as given, or as learned so far."""
        found = self._adaptation().rates(self._outer.params)
        moving = split(self.params, self.only)[0]
        return {name: float(rate) for name, rate in step_sizes(found, moving).items()}


def _values(lr: StepSize) -> list[float]:
    return [float(value) for value in (lr.values() if isinstance(lr, Mapping) else [lr])]
