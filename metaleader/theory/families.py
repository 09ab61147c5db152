"""Families of quadratic tasks that corollary 2 is played on: f_t and f^_t for every round, for several seeds.

Eigenvalues of A lie in [MU, BETA], minimisers in a ball, so that every family lives on a bounded domain.
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
        query: f, what a round costs.
        support: f^, what the gradient step is taken on.
    """

    query: Quadratics
    support: Quadratics


def draw(family: str, rounds: int, seeds: int, alpha: float = 1 / (2 * BETA)) -> Pairs:
    """Tasks of a family for several seeds; each depends on its seed and the family alone.

    Args:
        family: one of `FAMILIES`.
        rounds: T.
        seeds: how many streams.
        alpha: the inner step size of the leader that the adversary plays against.

    Raises:
        ValueError: for an unknown family, or T or the number of seeds below 1.
    """
    if family not in FAMILIES:
        raise ValueError(f"no family {family!r}; there are {', '.join(FAMILIES)}")
    if rounds < 1 or seeds < 1:
        raise ValueError(f"rounds (T) and seeds must be at least 1, got {rounds} and {seeds}")
    drawn = [FAMILIES[family](rounds, seed, alpha) for seed in range(seeds)]
    return Pairs(*(Quadratics.stack(list(part)) for part in zip(*drawn, strict=True)))


def bowls(draw: np.random.Generator, minimisers: np.ndarray, low: np.ndarray, high: np.ndarray) -> Quadratics:
    """Quadratics with given minimisers and value 0 there, randomly turned.

    Args:
        draw: random numbers.
        minimisers: (n, d).
        low: the smallest eigenvalue of each, (n,).
        high: the largest, (n,); the others are log-uniform between the two.
    """
    num, d = minimisers.shape
    logs = draw.uniform(np.log(low)[:, None], np.log(high)[:, None], (num, d))
    logs[:, 0], logs[:, -1] = np.log(low), np.log(high)
    turn, _ = np.linalg.qr(draw.standard_normal((num, d, d)))
    A = (turn * np.exp(logs)[:, None, :]) @ turn.transpose(0, 2, 1)
    b = -(A @ minimisers[..., None])[..., 0]
    A = (A + A.transpose(0, 2, 1)) / 2
    return quadratics(torch.from_numpy(A), torch.from_numpy(b), torch.from_numpy(-(minimisers * b).sum(1) / 2))


def in_ball(draw: np.random.Generator, num: int, d: int = DIMENSION) -> np.ndarray:
    """Points uniform in the unit ball, (num, d)."""
    points = draw.standard_normal((num, d))
    return points * (draw.random(num) ** (1 / d) / np.linalg.norm(points, axis=1))[:, None]


def _stationary(rounds: int, seed: int, alpha: float) -> Pairs:
    """Independent draws; curvature and minimiser are independent too."""
    random = rng("theory stationary", seed)
    return _exact(bowls(random, 1 + in_ball(random, rounds), *_everywhere(rounds)))


def _drifting(rounds: int, seed: int, alpha: float) -> Pairs:
    """The centre of the minimisers goes round a circle, 20 times in all."""
    random = rng("theory drifting", seed)
    angle = 2 * np.pi * np.arange(rounds) * _TURNS / rounds
    centre = np.zeros((rounds, DIMENSION))
    centre[:, 0], centre[:, 1] = np.cos(angle), np.sin(angle)
    return _exact(bowls(random, 1 + centre + in_ball(random, rounds) / 2, *_everywhere(rounds)))


def _adversarial(rounds: int, seed: int, alpha: float) -> Pairs:
    """Each round the world picks, of a pool of tasks, the one on which the meta-leader loses most."""
    random = rng("theory adversarial", seed)
    pool = bowls(random, 1 + in_ball(random, _POOL), *_everywhere(_POOL))
    meta = pool.adapted(alpha)
    w, A, b = torch.zeros(DIMENSION, dtype=torch.float64), torch.zeros_like(pool.A[0]), torch.zeros_like(pool.b[0])
    chosen = []
    # The best value of every task after adaptation is 0, at its own minimiser: the excess is the value.
    for _ in range(rounds):
        chosen.append(int(meta.value(w).argmax()))
        A, b = A + meta.A[chosen[-1]], b + meta.b[chosen[-1]]
        w = -torch.linalg.solve(A, b)
    return _exact(Quadratics(*(part[chosen] for part in pool)))


def _correlated(rounds: int, seed: int, alpha: float) -> Pairs:
    """Every other task is steep and has its minimiser on one side; the flat ones have theirs on the other."""
    random = rng("theory correlated", seed)
    steep = np.arange(rounds) % 2 == 0
    side = np.where(steep, 1.0, -1.0)[:, None] * np.eye(DIMENSION)[0]
    low, high = np.where(steep, BETA / 2, MU), np.where(steep, BETA, 2 * MU)
    return _exact(bowls(random, 1 + 2 * side + in_ball(random, rounds) / 2, low, high))


def _few_shot(rounds: int, seed: int, alpha: float) -> Pairs:
    """Linear regression: f^ is the loss on 20 noisy datapoints, f that on 200 others."""
    stream = QuadraticStream(tasks=rounds, features=DIMENSION, seed=seed)
    train, test = zip(*((task.train, task.test) for task in map(stream.__getitem__, range(rounds))), strict=True)
    query, support = (
        linear_regression(torch.stack([batch.x for batch in part]), torch.stack([batch.y[:, 0] for batch in part]))
        for part in (test, train)
    )
    return Pairs(query, support)


def _exact(tasks: Quadratics) -> Pairs:
    return Pairs(tasks, tasks)


def _everywhere(num: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(num, MU), np.full(num, BETA)


FAMILIES: dict[str, Callable[[int, int, float], Pairs]] = {
    "stationary": _stationary,
    "drifting": _drifting,
    "adversarial": _adversarial,
    "few-shot": _few_shot,
    "correlated": _correlated,
}
