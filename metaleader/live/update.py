"""Updates of a learner while data arrives: an update uses the data of the moment at which it began."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.learners.batches import draw_meta_batches
from metaleader.learners.learner import Learner
from metaleader.learners.locks import Locks
from metaleader.learners.optimizer import State
from metaleader.tasks import Batch


class Gathered(NamedTuple):
    """The datapoints of a draw, in place of their row numbers.

    Attributes:
        support: (steps, tasks, support, ...).
        query: (steps, tasks, query, ...).
        classes: (steps, tasks, n) the global class behind each label of a task (n-way), or None.
    """

    support: Batch
    query: Batch
    classes: Tensor | None

    def at(self, step: int | slice) -> Gathered:
        """Those of one step, or of a slice of steps."""
        return tree_map(lambda leaf: None if leaf is None else leaf[step], self)


class FailedUpdate(Exception):  # noqa: N818
    """A loss, a gradient or a parameter became not finite."""


class Drawn:
    """A memory whose only draw is made, and whose datapoints are copied, when it is built."""

    def __init__(self, learner: Learner, numbers: range) -> None:
        self._memory = learner.memory
        draw = draw_meta_batches(learner, numbers) if numbers else None
        self._gathered = None if draw is None else Gathered(*learner.memory.gather(draw), draw.classes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def draw(self, *_: Any) -> Gathered | None:
        """The draw; None if there is nothing to draw from."""
        return self._gathered

    def gather(self, draw: Gathered) -> tuple[Batch, Batch]:
        """The support and query batches of a draw."""
        return draw.support, draw.query

    def names_drawn(self, *_: Any) -> list[str | None]:
        """Called after an update failed, to find out which task it was: always raises FailedUpdate."""
        raise FailedUpdate


class PreparedUpdate:
    """Some updates of a learner on the data that it has now; data that arrives before `run` has no effect on them.

    Args:
        learner: the learner, which is not changed.
        steps: the number of updates, as for `Learner.update`.
    """

    def __init__(self, learner: Learner, steps: int) -> None:
        self._steps = steps
        with learner.locks.reading:
            self._view = copy.copy(learner)
            self._view.locks = Locks()
            first, number = learner.step, steps * learner.definition.updates_per_step
            self._view.memory = Drawn(learner, range(first, first + number))  # pyright: ignore[reportAttributeAccessIssue]

    def run(self) -> State:
        """Take the updates; returns the state after them.

        Raises:
            FailedUpdate: if an update fails.
        """
        try:
            self._view.update(self._steps)
        except ValueError as error:  # of a solver, for one
            raise FailedUpdate from error
        return self._view.state
