import numpy as np
import pytest
import torch

from metaleader.streams import QuadraticStream
from metaleader.tasks import TaskStream
from metaleader.theory import linear_regression


def test_is_a_stream_with_the_same_answer_every_time():
    stream = QuadraticStream(tasks=3, seed=4)
    assert isinstance(stream, TaskStream)
    first, again = stream[1], QuadraticStream(tasks=30, seed=4)[1]
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.test.y, again.test.y)
    assert not torch.equal(first.train.x, stream[2].train.x)
    assert not torch.equal(first.train.x, QuadraticStream(tasks=3, seed=5)[1].train.x)


def test_weights_lie_in_the_ball_and_curvature_differs():
    stream = QuadraticStream(tasks=20, noise=0.0, spread=0.5)
    found = [linear_regression(task.train.x, task.train.y[:, 0]) for task in map(stream.__getitem__, range(20))]
    weights = torch.stack([f.minimiser() for f in found])
    assert float((weights - 1).norm(dim=1).max()) <= 0.5 + 1e-4
    assert float((weights - 1).norm(dim=1).max()) > 0.3
    steepest = np.array([float(torch.linalg.eigvalsh(f.A)[-1]) for f in found])
    assert steepest.max() > 1.5 * steepest.min()
    assert bool((stream[0].train.x[:, -1] == 1).all())


def test_noise_is_on_the_training_targets_only():
    task = QuadraticStream(tasks=1, noise=0.5, train=100)[0]
    train, test = (linear_regression(batch.x, batch.y[:, 0]) for batch in (task.train, task.test))
    assert float(test.value(test.minimiser())) < 1e-6
    assert float(train.value(train.minimiser())) == pytest.approx(0.5**2 / 2, rel=0.4)


def test_bad_input():
    with pytest.raises(ValueError, match="features must be at least 1, got 0"):
        QuadraticStream(features=0)
    with pytest.raises(ValueError, match="must not be negative"):
        QuadraticStream(noise=-1.0)
    with pytest.raises(ValueError, match="scale must be a range"):
        QuadraticStream(scale=(0.0, 1.0))
    with pytest.raises(IndexError, match="round 60"):
        QuadraticStream()[60]
