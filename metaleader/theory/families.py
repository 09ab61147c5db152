"""Families of quadratic tasks for corollary 2: f_t and f^_t of every round, batched over seeds.

The eigenvalues of A lie in [MU, BETA] and the minimisers in a ball, so every family has a bounded domain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from metaleader.streams.quadratic import QuadraticStream
from metaleader.tasks import rng
from metaleader.theory.quadratics import Quadratics, linear_regression, quadratics

MU, BETA, DIMENSION = 0.25, 2.0, 4
_TURNS, _POOL = 20, 50


class Pairs(NamedTuple):
    """Tasks as pairs of functions, each with the dimensions (seeds, rounds).

    Attributes:
        query: f, the loss of a round.
        support: f^, the function of the gradient step.
    """

    query: Quadratics
    support: Quadratics


def draw(family: str, rounds: int, seeds: int, alpha: float = 1 / (2 * BETA)) -> Pairs:
    """Draw the tasks of a family for the seeds 0 to `seeds` - 1.

    Args:
        family: one of `FAMILIES`.
        rounds: T.
        seeds: the number of streams.
        alpha: the inner step size of the leader that the adversary plays against.

    Raises:
        ValueError: if the family is unknown, or `rounds` or `seeds` is below 1.
    """
    if family not in FAMILIES:
        raise ValueError(f"no family {family!r}; there are {', '.join(FAMILIES)}")
    if rounds < 1 or seeds < 1:
        raise ValueError(f"rounds (T) and seeds must be at least 1, got {rounds} and {seeds}")
    per_seed = [FAMILIES[family](rounds, seed, alpha) for seed in range(seeds)]
    return Pairs(*(Quadratics.stack(list(functions)) for functions in zip(*per_seed, strict=True)))


def bowls(draw: np.random.Generator, minimisers: np.ndarray, low: np.ndarray, high: np.ndarray) -> Quadratics:
    """Draw randomly rotated quadratics with given minimisers, at which their value is 0.

    Args:
        draw: the random generator.
        minimisers: (n, d).
        low: the smallest eigenvalues, (n,).
        high: the largest eigenvalues, (n,); the others are log-uniform in between.
    """
    num, d = minimisers.shape
    logs = draw.uniform(np.log(low)[:, None], np.log(high)[:, None], (num, d))
    logs[:, 0], logs[:, -1] = np.log(low), np.log(high)
    rotation, _ = np.linalg.qr(draw.standard_normal((num, d, d)))
    A = (rotation * np.exp(logs)[:, None, :]) @ rotation.transpose(0, 2, 1)
    b = -(A @ minimisers[..., None])[..., 0]
    A = (A + A.transpose(0, 2, 1)) / 2
    return quadratics(torch.from_numpy(A), torch.from_numpy(b), torch.from_numpy(-(minimisers * b).sum(1) / 2))


def in_ball(draw: np.random.Generator, num: int, d: int = DIMENSION) -> np.ndarray:
    """Draw points uniformly from the unit ball, (num, d)."""
    points = draw.standard_normal((num, d))
    return points * (draw.random(num) ** (1 / d) / np.linalg.norm(points, axis=1))[:, None]


def _stationary(rounds: int, seed: int, alpha: float) -> Pairs:
    """Draw independent tasks, with curvature independent of the minimiser."""
    random = rng("theory stationary", seed)
    return _exact(bowls(random, 1 + in_ball(random, rounds), *_full_range(rounds)))


def _drifting(rounds: int, seed: int, alpha: float) -> Pairs:
    """Draw tasks whose minimisers have a centre that moves along a circle, 20 turns in all."""
    random = rng("theory drifting", seed)
    angle = 2 * np.pi * np.arange(rounds) * _TURNS / rounds
    centre = np.zeros((rounds, DIMENSION))
    centre[:, 0], centre[:, 1] = np.cos(angle), np.sin(angle)
    return _exact(bowls(random, 1 + centre + in_ball(random, rounds) / 2, *_full_range(rounds)))


def _adversarial(rounds: int, seed: int, alpha: float) -> Pairs:
    """Select in each round the task on which the meta-leader has the largest loss, from a pool of tasks."""
    random = rng("theory adversarial", seed)
    pool = bowls(random, 1 + in_ball(random, _POOL), *_full_range(_POOL))
    meta = pool.adapted(alpha)
    w, A, b = torch.zeros(DIMENSION, dtype=torch.float64), torch.zeros_like(pool.A[0]), torch.zeros_like(pool.b[0])
    chosen = []
    # The smallest value of every task after adaptation is 0, so the value is the excess loss.
    for _ in range(rounds):
        chosen.append(int(meta.value(w).argmax()))
        A, b = A + meta.A[chosen[-1]], b + meta.b[chosen[-1]]
        w = -torch.linalg.solve(A, b)
    return _exact(Quadratics(*(values[chosen] for values in pool)))


def _correlated(rounds: int, seed: int, alpha: float) -> Pairs:
    """Alternate steep tasks with minimisers on one side, and flat tasks with minimisers on the other side."""
    random = rng("theory correlated", seed)
    steep = np.arange(rounds) % 2 == 0
    side = np.where(steep, 1.0, -1.0)[:, None] * np.eye(DIMENSION)[0]
    low, high = np.where(steep, BETA / 2, MU), np.where(steep, BETA, 2 * MU)
    return _exact(bowls(random, 1 + 2 * side + in_ball(random, rounds) / 2, low, high))


def _few_shot(rounds: int, seed: int, alpha: float) -> Pairs:
    """Draw linear-regression tasks: f^ is the loss on 20 noisy datapoints, f the loss on 200 others."""
    stream = QuadraticStream(tasks=rounds, features=DIMENSION, seed=seed)
    train, test = zip(*((task.train, task.test) for task in map(stream.__getitem__, range(rounds))), strict=True)
    query, support = (
        linear_regression(torch.stack([b.x for b in batches]), torch.stack([b.y[:, 0] for b in batches]))
        for batches in (test, train)
    )
    return Pairs(query, support)


def _exact(tasks: Quadratics) -> Pairs:
    return Pairs(tasks, tasks)


def _full_range(num: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(num, MU), np.full(num, BETA)


FAMILIES: dict[str, Callable[[int, int, float], Pairs]] = {
    "stationary": _stationary,
    "drifting": _drifting,
    "adversarial": _adversarial,
    "few-shot": _few_shot,
    "correlated": _correlated,
}
