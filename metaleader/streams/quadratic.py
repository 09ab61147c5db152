"""Linear regression, y = w_t'x + noise: a stream whose losses are quadratics with closed forms (appendix A)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from metaleader.streams.base import BaseStream
from metaleader.tasks import Batch, Task, rng


@dataclass(frozen=True)
class QuadraticStream(BaseStream):
    """A stream of linear-regression tasks; the last feature is the constant 1.

    Each task draws its weights uniformly from a ball, and a scale for its features. The losses of the tasks therefore
    differ in curvature as well as in their minimisers.

    Attributes:
        tasks: the number of tasks.
        train: the number of training datapoints per task.
        test: the number of held-out datapoints per task.
        features: the number of features, including the constant.
        spread: the radius of the ball of weights, which is centred at the vector of ones.
        scale: the range of the uniformly distributed feature scales.
        noise: the standard deviation of the noise on the training targets.
        seed: `stream[t]` depends only on the seed and t.

    >>> stream = QuadraticStream(tasks=3, train=20, test=100, features=4)
    >>> len(stream), stream[0].train.x.shape, stream[0].test.y.shape
    (3, torch.Size([20, 4]), torch.Size([100, 1]))
    """

    tasks: int = 60
    train: int = 20
    test: int = 200
    features: int = 4
    spread: float = 1.0
    scale: tuple[float, float] = (0.7, 1.4)
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tasks", "train", "test", "features"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.noise < 0 or self.spread < 0 or self.seed < 0:
            raise ValueError(
                f"noise, spread and seed must not be negative, got {self.noise}, {self.spread} and {self.seed}"
            )
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale must be a range of positive numbers, got {self.scale}")

    def __len__(self) -> int:
        return self.tasks

    def task(self, t: int) -> Task:
        """The task of round t."""
        draw, direction, distance, scale = self._draw(t)
        weights = 1 + distance * direction / np.linalg.norm(direction)

        def sample(num: int, noise: float) -> Batch:
            # Uniform features with unit variance: the losses are bounded on a bounded domain.
            x = scale * draw.uniform(-np.sqrt(3), np.sqrt(3), (num, self.features))
            x[:, -1] = 1
            y = x @ weights[:, None] + noise * draw.standard_normal((num, 1))
            return Batch(torch.from_numpy(x).float(), torch.from_numpy(y).float())

        train = sample(self.train, self.noise)
        return Task(f"regression {t}", train, sample(self.test, 0.0))

    @property
    def attributes(self) -> Mapping[str, Sequence[Any]]:
        """The scales of the features, and the distances of the weights from the vector of ones."""
        draws = [self._draw(t) for t in range(self.tasks)]
        return {"scale": [scale for *_, scale in draws], "distance": [distance for _, _, distance, _ in draws]}

    def _draw(self, t: int) -> tuple[np.random.Generator, np.ndarray, float, float]:
        draw = rng("quadratic", self.seed, t)
        direction = draw.standard_normal(self.features)
        return draw, direction, self.spread * draw.random() ** (1 / self.features), draw.uniform(*self.scale)
