"""Backward transfer, forward transfer and forgetting: how learning a task changes the others.

Row i of the matrix R is measured after round i: R[i, j] is the accuracy, or the loss, on the held-out data of task j.
The definitions are those of gradient episodic memory (Lopez-Paz and Ranzato, 2017) and, for forgetting, of Chaudhry et
al. (2018). With T tasks and b the vector of values before round 0:

    average             mean over all j of R[T-1, j]
    backward transfer   mean over j < T-1 of R[T-1, j] - R[j, j]
    forward transfer    mean over j > 0 of R[j-1, j] - b[j]
    forgetting          mean over j < T-1 of max over j <= i < T-1 of R[i, j] - R[T-1, j]

Differences of losses change sign: positive transfer is an improvement, and positive forgetting a deterioration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from metaleader.evaluate import play
from metaleader.learners.measure import ADAPTATION_STEPS, measure
from metaleader.losses import Loss, unsmoothed
from metaleader.streams import View
from metaleader.tasks import Task, TaskStream


@dataclass(frozen=True)
class Transfer:
    """The task-by-round matrix and its summaries; NaN with a single task.

    Attributes:
        tasks: the names of the tasks.
        matrix: (T, T); row i is measured after round i, column j on task j. NaN for j > i + 1.
        before: (T,), measured before round 0.
        measure: "accuracy" or "loss".

    >>> matrix = np.array([[0.8, 0.5], [0.7, 0.9]])
    >>> measured = Transfer(("a", "b"), matrix, np.array([0.5, 0.4]), "accuracy")
    >>> round(measured.backward, 3), round(measured.forward, 3), round(measured.forgetting, 3)
    (-0.1, 0.1, 0.1)
    """

    tasks: tuple[str, ...]
    matrix: np.ndarray
    before: np.ndarray
    measure: Literal["accuracy", "loss"]

    @property
    def average(self) -> float:
        """The mean over all tasks after the last round."""
        return float(self.matrix[-1].mean())

    @property
    def backward(self) -> float:
        """The improvement of earlier tasks from their own round to the last one."""
        return self._mean(self.matrix[-1, :-1] - self.matrix.diagonal()[:-1])

    @property
    def forward(self) -> float:
        """The improvement of a task before its round over the untrained learner."""
        return self._mean(self.matrix.diagonal(1) - self.before[1:])

    @property
    def forgetting(self) -> float:
        """The deterioration of earlier tasks from their best round to the last one."""
        sign = self._sign
        best = [float((sign * self.matrix[j:-1, j]).max()) for j in range(len(self.tasks) - 1)]
        return self._mean(sign * np.asarray(best) - self.matrix[-1, :-1])

    @property
    def _sign(self) -> float:
        return 1.0 if self.measure == "accuracy" else -1.0

    def _mean(self, differences: np.ndarray) -> float:
        return self._sign * float(differences.mean()) if len(differences) else float("nan")


def transfer_matrix(
    learner: Any,
    stream: TaskStream | Sequence[Task],
    reveal: int = 20,
    *,
    reveals: int | None = None,
    steps: int = ADAPTATION_STEPS,
    adapted: bool = True,
    loss: Loss | None = None,
) -> Transfer:
    """Play a stream as `play` does, and measure all tasks so far, and the next one, after each round.

    Accuracies are measured for classification, losses otherwise.

    Args:
        learner: the learner; it is changed in place.
        stream: tasks without classes of their own (not n-way).
        reveal: datapoints per reveal.
        reveals: the number of reveals per task; all if None.
        steps: the number of adaptation steps.
        adapted: measure a task after adaptation to all data of its name (`adapt(task=...)`); False measures the
            unadapted network. A task that has no data yet is always measured unadapted.
        loss: the loss to report; if None, the learner's loss without label smoothing.
    """
    tasks = [stream[t] for t in range(len(stream))]
    if any(task.classes is not None for task in tasks):
        raise ValueError("transfer_matrix takes tasks with labels of their own; those of n-way streams are shuffled")
    if adapted and getattr(learner, "restarts", False):
        raise ValueError(f"a {type(learner).__name__} keeps no data of earlier tasks; pass adapted=False")
    metric = loss or unsmoothed(learner.loss)
    seen: set[str] = set()

    def values(task: Task) -> dict[str, float]:
        if adapted and task.name in seen:
            return measure(learner, task.test, metric, (steps,), task=task.name)
        return measure(learner, task.test, metric, (0,))

    before = [values(task) for task in tasks]
    name: Literal["accuracy", "loss"] = "accuracy" if all("accuracy" in value for value in before) else "loss"
    matrix = np.full((len(tasks), len(tasks)), np.nan)
    for t, task in enumerate(tasks):
        for _ in play(learner, View(tasks, range(t + 1)), reveal, reveals=reveals, measure_at=(), loss=loss, start=t):
            pass
        seen.add(task.name)
        matrix[t, : t + 2] = [values(other)[name] for other in tasks[: t + 2]]
    return Transfer(tuple(task.name for task in tasks), matrix, np.asarray([value[name] for value in before]), name)
