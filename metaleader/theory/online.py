"""Corollary 2 in simulation: exact learners on quadratic tasks, and their exact regret (Eq. 3) after every round.

    R(T) = sum over t <= T of f_t(U_t(w_t)) - min over w of sum over t <= T of f_t(U_t(w))

A learner chooses w_t before it sees f_t. Both terms have closed forms; the minimum is computed for every T. The regret
of Eq. 2 is the same without U_t.
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
    """The results of a simulation; tensors have the dimensions (seeds, T).

    Attributes:
        regret: R(T) of every learner, by name.
        constants: the constants over W, a ball of twice the radius of the tasks' minimisers.
        alpha: the inner step size.
        farthest: the largest norm of a leader or comparator, all of which must lie in W.
        telescoped: FTML's regret as the sum over t of F_t(w_t) - F_t(w_t+1), where F_t sums the first t losses.
        gradient_bound: sum over t <= T of |grad f~_t(w_t)|^2 / (2 t mu/8), a bound on FTML's regret that is much
            tighter than corollary 2.
        fixed_regret: FTL's regret of Eq. 2, without adaptation on either side.
        fixed_bound: the gradient bound of this regret, sum over t <= T of |grad f_t(w_t)|^2 / (2 t mu).
    """

    regret: dict[str, Tensor]
    constants: Constants
    alpha: float
    farthest: float
    telescoped: Tensor
    gradient_bound: Tensor
    fixed_regret: Tensor
    fixed_bound: Tensor

    @property
    def rounds(self) -> Tensor:
        """T = 1, 2, ..., in float64."""
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
        alpha: the inner step size; Theorem 1's bound if None.

    Raises:
        ValueError: if a task is not positive definite, T < 1, or the step size is not positive.

    Warns:
        StepSizeWarning: if alpha is above Theorem 1's bound.
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
    comparators = _minimisers(sums)
    hindsight = sums.value(comparators)
    plain_sums = tasks.cumsum(1)
    fixed = _minimisers(plain_sums)
    meta_leader, leader = _delayed(comparators), _delayed(fixed)
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
        farthest=float(torch.linalg.vector_norm(torch.stack([comparators, leader]), dim=-1).max()),
        telescoped=(sums.value(meta_leader) - hindsight).cumsum(1),
        gradient_bound=(meta.gradient(meta_leader).square().sum(-1) / (2 * steps * constants.meta_mu)).cumsum(1),
        fixed_regret=losses[FTL].cumsum(1) - plain_sums.value(fixed),
        fixed_bound=(tasks.gradient(leader).square().sum(-1) / (2 * steps * constants.mu)).cumsum(1),
    )


def doublings(regret: Tensor) -> tuple[list[int], Tensor]:
    """Return four values of T, each twice the one before, up to half the rounds, and R(2T) - R(T) averaged over seeds.

    The difference is constant for logarithmic regret, and doubles with T for linear regret.

    Args:
        regret: (seeds, T).
    """
    rounds = regret.shape[-1]
    if rounds < 32:
        raise ValueError(f"four doublings need at least 32 rounds, got {rounds}")
    starts = [rounds // 2**k for k in (4, 3, 2, 1)]
    mean = regret.mean(0)
    return starts, torch.stack([mean[2 * start - 1] - mean[start - 1] for start in starts])


def growth(regret: Tensor) -> float:
    """Fit p in |R(2T) - R(T)| ~ T^p by least squares: 0 for logarithmic, 1/2 for square-root, 1 for linear regret.

    The absolute value is used because R(T) may decrease for some time for a learner that follows a drift.
    """
    starts, differences = doublings(regret)
    x = torch.log(torch.tensor(starts, dtype=torch.float64))
    size = differences.abs()
    y = torch.log(size.clamp(min=0.01 * float(size.max())))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def _minimisers(sums: Quadratics) -> Tensor:
    """Return the minimiser of smallest norm of every sum, which may be singular if alpha is above the bound."""
    return -(torch.linalg.pinv(sums.A, rtol=1e-12, hermitian=True) @ sums.b[..., None])[..., 0]


def _delayed(leaders: Tensor) -> Tensor:
    """Return the leader of the preceding rounds for each round, which is 0 for the first."""
    return torch.cat([torch.zeros_like(leaders[:, :1]), leaders[:, :-1]], dim=1)


def _online_gradient_descent(meta: Quadratics, constants: Constants) -> Tensor:
    """Run online gradient descent with step 1/(mu/8 t), projected onto W; it stores parameters but no data.

    The projection is necessary because the first steps are much larger than 1/beta.
    """
    w = torch.zeros_like(meta.b[:, 0])
    played = []
    for t in range(meta.b.shape[1]):
        played.append(w)
        task = Quadratics(*(values[:, t] for values in meta))
        w = w - task.gradient(w) / (constants.meta_mu * (t + 1))
        w = w * (constants.radius / torch.linalg.vector_norm(w, dim=-1, keepdim=True)).clamp(max=1)
    return torch.stack(played, dim=1)
