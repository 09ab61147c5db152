"""Updates of a learner while data arrives: an update uses the data of the moment at which it began."""

from __future__ import annotations

from metaleader.engine.hook import OwnGradient, StateReadError
from metaleader.learners.learner import Learner
from metaleader.learners.optimizer import State
from metaleader.learners.together import state_after
from metaleader.learners.update import Gathered, gather_updates


class PreparedUpdate:
    """Some updates of a learner on the data that it has now; data that arrives before `run` has no effect on them.

    Args:
        learner: the learner, which is not changed.
        steps: the number of updates, as for `Learner.update`.

    Attributes:
        state: of the learner before the updates.
        batches: the meta-batches, copied; None if there is nothing to draw from.
    """

    def __init__(self, learner: Learner, steps: int) -> None:
        self._learner, self.steps = learner, steps
        with learner.locks.reading:
            self.state: State = learner.state
            self.batches: Gathered | None = gather_updates(learner, steps)

    def run(self) -> State:
        """Take the updates; returns the state after them.

        Raises:
            FailedUpdate: if an update fails.
        """
        if self.batches is None:
            return self.state
        try:
            return state_after(self._learner, self.state, self.steps, self.batches)
        except StateReadError as error:
            own = self._learner.definition.objective.own_gradient
            assert isinstance(own, OwnGradient)
            own.read_state(error, warn=True)
            return self.run()
