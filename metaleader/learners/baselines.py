"""The paper's baselines: train on everything, follow the leader with fine-tuning, and from scratch.

Their gradient is that of the plain loss, averaged over tasks: the meta-gradient with no inner steps. Each batch holds
one task only, which matters to batch norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from metaleader.engine.objective import GradientSteps, Objective
from metaleader.gradient.selection import StepSize
from metaleader.learners.definition import Definition
from metaleader.learners.learner import Learner
from metaleader.learners.options import Options, check_step_size, initial_module


class TOE(Learner):
    """Train on everything: one model on all data so far, the current task included, used unadapted.

    Takes the settings of `Learner`; an update uses `query` datapoints of each of `tasks_per_step` tasks.
    """

    def define(self) -> Definition:
        """TOE minimises the plain loss on all tasks."""
        return Definition(Objective(self.network))


@dataclass(frozen=True, kw_only=True)
class FTLOptions(Options):
    """Hyperparameters of FTL."""

    inner_lr: StepSize = 0.1
    """The step size of the fine-tuning: one, or one for each tensor that moves, by name."""
    inner_steps: int = 5
    """Gradient steps of the fine-tuning."""
    only: str | None = None
    """Which parameters are fine-tuned: None for all, "last" for the last layer, or a name pattern."""


class FTL(Learner):
    """Follow the leader: one model on all data of the tasks before the current one, then fine-tuned on D_t.

    Takes the settings of `Learner`, and `inner_lr`, `inner_steps`, `only`; see `FTLOptions`.
    """

    Options = FTLOptions
    options: FTLOptions

    def define(self) -> Definition:
        """FTL minimises the plain loss on past tasks and fine-tunes on the current one."""
        o = self.options
        lr = check_step_size(o.inner_lr, self.network.params(), o.only)
        return Definition(Objective(self.network), GradientSteps.of(lr, o.inner_steps, o.only), which="past")


class Scratch(Learner):
    """From scratch: weights and optimiser start anew at each task, are trained on D_t alone, and used unadapted.

    Takes the settings of `Learner`. An update uses `tasks_per_step` batches of `query` datapoints, all from D_t. There
    are twice as many updates as for the other methods, as in the authors' code.
    """

    def define(self) -> Definition:
        """Scratch minimises the plain loss on the current task, from a new initialisation in every round."""
        if isinstance(self.model, nn.Module):
            initial_module(self.model, self.seed, 0, fresh=True)  # rejects a module that cannot be initialised anew
        return Definition(Objective(self.network), which="current", restarts=True, updates_per_step=2)
