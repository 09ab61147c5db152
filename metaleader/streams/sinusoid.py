"""Sinusoid regression: each task is y = a sin(x - b) with a random amplitude and phase (figure 1 of the paper).

The stream needs no data files. A model trained jointly on all tasks tends to the mean of the sinusoids, which for the
default ranges is -(2/pi) 2.55 cos x, about -1.62 cos x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from metaleader.streams.base import BaseStream
from metaleader.streams.order import arrange
from metaleader.tasks import Batch, Task, rng


@dataclass(frozen=True)
class SinusoidStream(BaseStream):
    """A stream of sinusoids, x uniform in [-5, 5].

    Attributes:
        tasks: the number of tasks.
        train: the number of training datapoints per task.
        test: the number of held-out datapoints per task.
        amplitude: the range of the uniformly distributed amplitudes.
        phase: the range of the uniformly distributed phases.
        drift: the amount that is added to all phases per round; the stream is non-stationary if it is not 0.
        noise: the standard deviation of the noise on the training targets.
        order: "random"; "amplitude" or "phase", for the same tasks by increasing values; or one of the other orders of
            `reorder`. Phases are without drift.
        seed: `stream[t]` depends only on the seed and t.

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
    order: str = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tasks", "train", "test"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.noise < 0 or self.seed < 0:
            raise ValueError(f"noise and seed must not be negative, got {self.noise} and {self.seed}")
        _ = self._order  # raises an error for an unknown order

    def __len__(self) -> int:
        return self.tasks

    def task(self, t: int) -> Task:
        """The task of round t."""
        draw, amplitude, phase = self._draw(self._order[t])
        phase += self.drift * t

        def sample(num: int, noise: float) -> Batch:
            x = draw.uniform(-5.0, 5.0, (num, 1))
            y = amplitude * np.sin(x - phase) + noise * draw.standard_normal((num, 1))
            return Batch(torch.from_numpy(x).float(), torch.from_numpy(y).float())

        train = sample(self.train, self.noise)
        return Task(f"{amplitude:.2f} sin(x - {phase:.2f})", train, sample(self.test, 0.0))

    @property
    def attributes(self) -> Mapping[str, Sequence[Any]]:
        """The amplitudes and the phases, without drift."""
        return {name: [values[i] for i in self._order] for name, values in self._drawn.items()}

    @cached_property
    def _order(self) -> list[int]:
        if self.order == "random":
            return list(range(self.tasks))
        return arrange(self.order, self._drawn, self.seed, others=("random",))

    @cached_property
    def _drawn(self) -> dict[str, list[float]]:
        """The attributes of the tasks in random order."""
        draws = [self._draw(i) for i in range(self.tasks)]
        return {"amplitude": [amplitude for _, amplitude, _ in draws], "phase": [phase for *_, phase in draws]}

    def _draw(self, index: int) -> tuple[np.random.Generator, float, float]:
        draw = rng("sinusoid", self.seed, index)
        return draw, draw.uniform(*self.amplitude), draw.uniform(*self.phase)
