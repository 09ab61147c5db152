"""The paper's baselines: train on everything, follow the leader with fine-tuning, and from scratch.

Their gradient is that of the plain loss, taken task by task (a batch holds one task only, which matters to batch norm)
and averaged: the meta-gradient with no inner steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from torch import Tensor, nn

from metaleader.buffer import Draw
from metaleader.inner import Params, StepSize
from metaleader.learners.base import Adaptation, Common, Learner, Model, check_integer, check_step_size, initial_module
from metaleader.losses import Loss
from metaleader.metagrad import meta_gradient
from metaleader.tasks import Batch


class _Plain(Learner):
    """A learner that trains on the plain loss."""

    def _gradient(self, support: Batch, query: Batch, noise: Tensor | None) -> tuple[Tensor, Params]:
        return meta_gradient(
            self._network.loss_fn, self.params, query, query, inner_steps=0, noise=None if noise is None else noise[-1:]
        )


class TOE(_Plain):
    """Train on everything: one model on all data so far, the current task's included, used as it is.

    Takes the arguments of `Learner`; `query` datapoints of each of `tasks_per_step` tasks make an update.
    """

    def _draw(self, steps: Sequence[int]) -> Draw | None:
        return self._buffer.draw(self.seed, steps, self.tasks_per_step, 0, self.query)

    def _adaptation(self) -> None:
        return None


class FTL(_Plain):
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


class Scratch(_Plain):
    """From scratch: weights and optimiser are initialised anew at each task, then trained on D_t alone, used as it is.

    Takes the arguments of `Learner`. An update's batch is as large as the other learners' (`tasks_per_step` times
    `query`), or all of D_t where that is less; there are twice as many updates, as in the authors' code.
    """

    def __init__(self, model: Model, loss: Loss, **common: Unpack[Common]) -> None:
        super().__init__(model, loss, **common)
        if isinstance(model, nn.Module):
            initial_module(model, self.seed, 0, fresh=True)  # a module that cannot be initialised anew is refused now

    def _num_updates(self, meta_steps: int) -> int:
        return 2 * meta_steps

    def _on_begin(self) -> None:
        self._reinitialise()

    def _draw(self, steps: Sequence[int]) -> Draw | None:
        size = min(self.tasks_per_step * self.query, self.num_datapoints)
        return self._buffer.draw(self.seed, steps, 1, 0, size, which="current")

    def _adaptation(self) -> None:
        return None
