"""Sinusoid regression: each task is y = a sin(x - b), amplitude and phase of its own (the paper's figure 1).

The first stream of the house: it needs no data, and joint training on it learns little but y = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from metaleader.tasks import Batch, Task, rng


@dataclass(frozen=True)
class SinusoidStream:
    """A stream of sinusoids, x uniform in [-5, 5].

    Attributes:
        tasks: the number of tasks.
        train: datapoints revealed of each task.
        test: held-out datapoints of each task.
        amplitude: the range that amplitudes are drawn from, uniformly.
        phase: the range that phases are drawn from, uniformly.
        drift: added to every phase for each round that passes: the stream is non-stationary when it is not 0.
        noise: the standard deviation of noise on the training targets.
        order: "random", or "amplitude": the same tasks from the flattest to the steepest.
        seed: `stream[t]` depends on seed and t alone.

    >>> stream = SinusoidStream(tasks=3, train=50, test=100)
    >>> len(stream), stream[0].train.x.shape, stream[0].test.y.shape
    (3, torch.Size([50, 1]), torch.Size([100, 1]))
    """

    tasks: int = 60
    train: int = 50
    test: int = 200
    amplitude: tuple[float, float] = (0.1, 5.0)
    phase: tuple[float, float] = (0.0, np.pi)
    drift: float = 0.0
    noise: float = 0.0
    order: Literal["random", "amplitude"] = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tasks", "train", "test"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.noise < 0 or self.seed < 0:
            raise ValueError(f"noise and seed must not be negative, got {self.noise} and {self.seed}")
        if self.order not in ("random", "amplitude"):
            raise ValueError(f"order must be 'random' or 'amplitude', got {self.order!r}")

    def __len__(self) -> int:
        return self.tasks

    def __getitem__(self, t: int) -> Task:
        if not 0 <= t < self.tasks:
            raise IndexError(f"round {t} of a stream of {self.tasks} tasks")
        index = t if self.order == "random" else int(np.argsort([self._draw(i)[1] for i in range(self.tasks)])[t])
        draw, amplitude = self._draw(index)
        phase = draw.uniform(*self.phase) + self.drift * t

        def sample(num: int, noise: float) -> Batch:
            x = draw.uniform(-5.0, 5.0, (num, 1))
            y = amplitude * np.sin(x - phase) + noise * draw.standard_normal((num, 1))
            return Batch(torch.from_numpy(x).float(), torch.from_numpy(y).float())

        train = sample(self.train, self.noise)
        return Task(f"{amplitude:.2f} sin(x - {phase:.2f})", train, sample(self.test, 0.0))

    def _draw(self, index: int) -> tuple[np.random.Generator, float]:
        draw = rng("sinusoid", self.seed, index)
        return draw, draw.uniform(*self.amplitude)
