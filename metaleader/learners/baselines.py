"""The paper's baselines: train on everything, follow the leader with fine-tuning, and from scratch.

Their gradient is that of the plain loss, taken task by task (a batch holds one task only, which matters to batch norm)
and averaged: the meta-gradient with no inner steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from torch import nn

from metaleader.engine.objective import Adaptation
from metaleader.gradient.inner import StepSize
from metaleader.learners.learner import Learner
from metaleader.learners.options import Common, Model, check_integer, check_step_size, initial_module
from metaleader.losses import Loss
from metaleader.memory.by_task import Draw


class TOE(Learner):
    """Train on everything: one model on all data so far, the current task's included, used as it is.

    Takes the arguments of `Learner`; `query` datapoints of each of `tasks_per_step` tasks make an update.
    """

    def _draw(self, steps: Sequence[int]) -> Draw | None:
        return self._buffer.draw(self.seed, steps, self.tasks_per_step, 0, self.query)

    def _adaptation(self) -> None:
        return None


class FTL(Learner):
    """Follow the leader: one model on all data of the tasks before the current one, then fine-tuned on D_t.

    Args:
        model: an `nn.Module`, or a function that builds one.
        loss: of (prediction, target).
        inner_lr: the step size of the fine-tuning.
        inner_steps: gradient steps of the fine-tuning.
        only: which parameters are fine-tuned: None for all, "last" for the last layer, or a name pattern.
        common: the arguments of `Learner`.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss,
        *,
        inner_lr: StepSize = 0.1,
        inner_steps: int = 5,
        only: str | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, loss, **common)
        check_integer("inner_steps", inner_steps, 0)
        check_step_size("inner_lr", inner_lr, self.params, only)
        self.inner_lr, self.inner_steps, self.only = inner_lr, inner_steps, only
        self._hyperparameters |= {
            "inner_lr": {k: float(v) for k, v in inner_lr.items()}
            if isinstance(inner_lr, Mapping)
            else float(inner_lr),
            "inner_steps": inner_steps,
            "only": only,
        }

    def _draw(self, steps: Sequence[int]) -> Draw | None:
        return self._buffer.draw(self.seed, steps, self.tasks_per_step, 0, self.query, which="past")

    def _adaptation(self) -> Adaptation:
        return Adaptation(self.inner_lr, self.inner_steps, self.only)


class Scratch(Learner):
    """From scratch: weights and optimiser are initialised anew at each task, then trained on D_t alone, used as it is.

    Takes the arguments of `Learner`. An update takes `tasks_per_step` batches of `query` datapoints, as the others do,
    all from D_t; there are twice as many updates, as in the authors' code.
    """

    def __init__(self, model: Model, loss: Loss, **common: Unpack[Common]) -> None:
        super().__init__(model, loss, **common)
        if isinstance(model, nn.Module):
            initial_module(model, self.seed, 0, fresh=True)  # a module that cannot be initialised anew is refused now

    def _num_updates(self, meta_steps: int) -> int:
        return 2 * meta_steps

    def _on_begin(self) -> None:
        self._outer.restart(dict(initial_module(self._model, self.seed, self.round, fresh=True).named_parameters()))

    def _draw(self, steps: Sequence[int]) -> Draw | None:
        return self._buffer.draw(self.seed, steps, self.tasks_per_step, 0, self.query, which="current")

    def _adaptation(self) -> None:
        return None
