"""The summaries on a matrix worked out by hand, and the matrix against a loop."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metaleader as ml
from metaleader.report.transfer import Transfer, transfer_matrix
from metaleader.streams import Labelled, NWayStream
from metaleader.tasks import rng

# After round 0, 1, 2 and 3, in percent; task 1 is best after round 2.
NAN = math.nan
MATRIX = [[90, 30, NAN, NAN], [80, 70, 40, NAN], [60, 75, 95, 55], [70, 65, 85, 80]]
BEFORE = [20, 25, 10, 50]


def test_accuracies_by_hand():
    measured = Transfer(("a", "b", "c", "d"), np.array(MATRIX) / 100, np.array(BEFORE) / 100, "accuracy")
    assert measured.average == pytest.approx((70 + 65 + 85 + 80) / 400)
    assert measured.backward == pytest.approx(((70 - 90) + (65 - 70) + (85 - 95)) / 300)
    assert measured.forward == pytest.approx(((30 - 25) + (40 - 10) + (55 - 50)) / 300)
    assert measured.forgetting == pytest.approx(((90 - 70) + (75 - 65) + (95 - 85)) / 300)


def test_losses_by_hand():
    """Of losses the lowest is the best, and improvements are positive."""
    measured = Transfer(("a", "b", "c", "d"), np.array(MATRIX), np.array(BEFORE), "loss")
    assert measured.backward == pytest.approx(((90 - 70) + (70 - 65) + (95 - 85)) / 3)
    assert measured.forward == pytest.approx(((25 - 30) + (10 - 40) + (50 - 55)) / 3)
    # The lowest losses before the last round are 60, 70 and 95.
    assert measured.forgetting == pytest.approx(((70 - 60) + (65 - 70) + (85 - 95)) / 3)


def test_one_task_has_no_transfer():
    measured = Transfer(("a",), np.array([[0.5]]), np.array([0.1]), "accuracy")
    assert measured.average == 0.5
    assert all(math.isnan(value) for value in (measured.backward, measured.forward, measured.forgetting))


class Scripted:
    """Predicts, for a target of 0, the round and the task that it is asked for."""

    loss = staticmethod(lambda prediction, target: prediction[:, 0])

    def __init__(self) -> None:
        self.round = -1
        self.datapoints = 0

    def begin(self, name: str) -> None:
        self.round += 1

    def observe(self, x: Tensor, y: Tensor, update: bool = True) -> None:
        self.datapoints += len(x)

    def adapt(self, steps: list[int], statistics: str, task: str | None = None) -> list[Any]:
        value = 100 * self.round + (-1 if task is None else int(task)) + steps[0] / 10
        return [lambda x: torch.full((len(x), 1), float(value))]


def task(name: str) -> ml.Task:
    x = torch.zeros(4, 1)
    return ml.Task(name, ml.Batch(x, x), ml.Batch(x[:2], x[:2]))


def test_what_is_measured_when():
    stream = [task("0"), task("1"), task("0")]
    learner = Scripted()
    measured = transfer_matrix(learner, stream, reveal=2, reveals=1, steps=3)
    assert learner.datapoints == 6
    assert measured.tasks == ("0", "1", "0")
    assert measured.measure == "loss"
    assert measured.before.tolist() == [-101.0] * 3
    # The third task has the name of the first, and so its data. The second has no data after round 0.
    expected = [[0.3, -1, NAN], [100.3, 101.3, 100.3], [200.3, 201.3, 200.3]]
    np.testing.assert_allclose(measured.matrix, expected, atol=1e-5)
    unadapted = transfer_matrix(Scripted(), stream, reveal=2, adapted=False)
    np.testing.assert_allclose(unadapted.matrix, [[-1, -1, NAN], [99, 99, 99], [199, 199, 199]])


def classification(num_tasks: int = 3) -> list[ml.Task]:
    tasks = []
    for t in range(num_tasks):
        draw = rng("test transfer", t)
        y = torch.from_numpy(draw.integers(3, size=20))
        x = torch.from_numpy(draw.standard_normal((20, 4))).float() + 2 * torch.eye(4)[(y + t) % 3]
        tasks.append(ml.Task(f"task {t}", ml.Batch(x[:12], y[:12]), ml.Batch(x[12:], y[12:])))
    return tasks


@pytest.mark.parametrize("kind", [ml.FTML, ml.TOE])
def test_the_matrix_of_a_learner_is_that_of_a_loop(kind):
    def make() -> ml.Learner:
        options: Any = {"support": 3} if kind is ml.FTML else {}
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU(), nn.Linear(6, 3))
        torch.manual_seed(0)
        for module in net:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # pyright: ignore[reportCallIssue]
        return kind(net, ml.losses.cross_entropy, query=3, meta_steps=2, **options)

    stream = classification()
    measured = transfer_matrix(make(), stream, reveal=6)
    assert measured.measure == "accuracy"
    learner = make()

    def accuracy(measured_on: ml.Task, **options: Any) -> float:
        (net,) = learner.adapt(statistics="batch", **options)
        return float((net(measured_on.test.x).argmax(1) == measured_on.test.y).float().mean())

    assert measured.before.tolist() == [accuracy(task, steps=[0]) for task in stream]
    for t, current in enumerate(stream):
        learner.begin(current.name)
        for first in (0, 6):
            learner.observe(current.train.x[first : first + 6], current.train.y[first : first + 6])
        row = [accuracy(task, steps=[5], task=task.name) for task in stream[: t + 1]]
        row += [accuracy(task, steps=[0]) for task in stream[t + 1 : t + 2]]
        assert measured.matrix[t, : t + 2].tolist() == pytest.approx(row, abs=1e-6)


def test_refusals():
    scratch = ml.Scratch(lambda: ml.models.mlp(4, 3), ml.losses.cross_entropy, meta_steps=1)
    with pytest.raises(ValueError, match="a Scratch keeps no data of earlier tasks; pass adapted=False"):
        transfer_matrix(scratch, classification())
    assert transfer_matrix(scratch, classification(2), adapted=False).matrix.shape == (2, 2)
    labels = np.repeat(np.arange(3), 4)
    x = np.zeros((12, 4), np.float32)
    with pytest.raises(ValueError, match="n-way"):
        transfer_matrix(scratch, NWayStream(Labelled(x, labels, x, labels), ways=2, per_class=4))
