"""Corollary 2, played out: exact learners on quadratic tasks, and their exact regret (Eq. 3) after every round.

    R(T) = sum over t <= T of f_t(U_t(w_t)) - min over w of sum over t <= T of f_t(U_t(w))

Round t's parameters are chosen before f_t is seen. Both terms are in closed form, the second anew for every T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metaleader.theory.convexity import Constants, quadratic_constants
from metaleader.theory.families import Pairs
from metaleader.theory.quadratics import Quadratics

FTML, STREAMING, FTL_ADAPTED, FTL = "FTML", "streaming", "FTL + adaptation", "FTL"


@dataclass(frozen=True)
class Simulation:
    """What was measured; tensors have the dimensions (seeds, T).

    Attributes:
        regret: R(T) of every learner, by name.
        constants: over W, the ball of twice the radius of the tasks' minimisers.
        alpha: the inner step size.
        farthest: the largest norm of a leader or comparator: the theory needs all of them in W.
        telescoped: FTML's regret computed another way, from how much each round moves its leader.
        gradient_bound: sum over t <= T of |grad f~_t(w_t)|^2 / (2 t mu/8), which bounds FTML's regret far more closely
            than corollary 2 does.
    """

    regret: dict[str, Tensor]
    constants: Constants
    alpha: float
    farthest: float
    telescoped: Tensor
    gradient_bound: Tensor

    @property
    def rounds(self) -> Tensor:
        """T = 1, 2, ..., as numbers to plot against."""
        return torch.arange(1, self.telescoped.shape[-1] + 1, dtype=torch.float64)

    @property
    def bound(self) -> Tensor:
        """Corollary 2's bound for every T."""
        return self.constants.regret_bound(self.rounds)

    @property
    def streaming_bound(self) -> Tensor:
        """G^2/(2 mu/8) (1 + log T), the bound of projected online gradient descent, for every T."""
        return self.constants.G**2 / (2 * self.constants.meta_mu) * (1 + torch.log(self.rounds))


def simulate(pairs: Pairs, alpha: float | None = None) -> Simulation:
    """Play every exact learner on the same tasks, from w = 0.

    Args:
        pairs: f_t and f^_t, (seeds, T).
        alpha: the inner step size; the largest that Theorem 1 admits if None.

    Raises:
        ValueError: for tasks that are not positive definite, T < 1, or a step size that is not positive.

    Warns:
        StepSizeWarning: when alpha is above the bound of Theorem 1.
    """
    if pairs.query.b.ndim != 3 or pairs.query.b.shape[1] < 1:
        raise ValueError(f"tasks must have the dimensions (seeds, T), T at least 1; b is {tuple(pairs.query.b.shape)}")
    both = Quadratics.stack([pairs.query, pairs.support])
    unbounded = quadratic_constants(both, radius=1.0)  # beta and mu do not depend on the domain
    alpha = unbounded.alpha if alpha is None else alpha
    unbounded.check_alpha(alpha)
    tasks, meta = pairs.query, pairs.query.adapted(alpha, support=pairs.support)
    constants = quadratic_constants(both, radius=2 * float(torch.linalg.vector_norm(tasks.minimiser(), dim=-1).max()))

    sums = meta.cumsum(1)
    best = _leaders(sums)
    hindsight = sums.value(best)
    meta_leader, leader = _before(best), _before(_leaders(tasks.cumsum(1)))
    streaming = _online_gradient_descent(meta, constants)
    losses = {
        FTML: meta.value(meta_leader),
        STREAMING: meta.value(streaming),
        FTL_ADAPTED: meta.value(leader),
        FTL: tasks.value(leader),
    }
    steps = torch.arange(1, meta.b.shape[1] + 1, dtype=torch.float64)
    return Simulation(
        regret={name: loss.cumsum(1) - hindsight for name, loss in losses.items()},
        constants=constants,
        alpha=alpha,
        farthest=float(torch.linalg.vector_norm(torch.stack([best, leader]), dim=-1).max()),
        telescoped=(sums.value(meta_leader) - hindsight).cumsum(1),
        gradient_bound=(meta.gradient(meta_leader).square().sum(-1) / (2 * steps * constants.meta_mu)).cumsum(1),
    )


def doublings(regret: Tensor, number: int = 4) -> tuple[list[int], Tensor]:
    """R(2T) - R(T), averaged over seeds, for T doubling up to half the rounds.

    Logarithmic regret makes it flat; linear regret makes it double with T.

    Args:
        regret: (seeds, T).
        number: how many.

    Returns:
        The Ts and the differences.
    """
    rounds = regret.shape[-1]
    if rounds < 2 ** (number + 1):
        raise ValueError(f"{number} doublings need at least {2 ** (number + 1)} rounds, got {rounds}")
    starts = [rounds // 2**k for k in range(number, 0, -1)]
    mean = regret.mean(0)
    return starts, torch.stack([mean[2 * start - 1] - mean[start - 1] for start in starts])


def growth(regret: Tensor) -> float:
    """The exponent p of |R(2T) - R(T)| ~ T^p, by least squares: 0 for a logarithm, 1/2 for a root, 1 for linear regret.

    The size counts, not the sign: a learner that follows a drift may gain on every fixed comparator for a while.
    """
    starts, differences = doublings(regret)
    x = torch.log(torch.tensor(starts, dtype=torch.float64))
    size = differences.abs()
    y = torch.log(size.clamp(min=0.01 * float(size.max())))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def _leaders(sums: Quadratics) -> Tensor:
    """The minimiser of every sum; of several, that of the least norm: above the bound a sum may be flat somewhere."""
    return -(torch.linalg.pinv(sums.A, rtol=1e-12, hermitian=True) @ sums.b[..., None])[..., 0]


def _before(leaders: Tensor) -> Tensor:
    """The leader of the rounds before each: 0 for the first."""
    return torch.cat([torch.zeros_like(leaders[:, :1]), leaders[:, :-1]], dim=1)


def _online_gradient_descent(meta: Quadratics, constants: Constants) -> Tensor:
    """Projected online gradient descent with step 1/(mu/8 t): keeps parameters only, no data.

    Without the projection onto W the first steps, far larger than 1/beta, throw it out of any domain.
    """
    w = torch.zeros_like(meta.b[:, 0])
    played = []
    for t in range(meta.b.shape[1]):
        played.append(w)
        now = Quadratics(*(part[:, t] for part in meta))
        w = w - now.gradient(w) / (constants.meta_mu * (t + 1))
        w = w * (constants.radius / torch.linalg.vector_norm(w, dim=-1, keepdim=True)).clamp(max=1)
    return torch.stack(played, dim=1)
