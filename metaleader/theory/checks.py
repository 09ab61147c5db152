"""The paper's claims as checks that can fail: each measures, and says what the measurement has to be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from metaleader.tasks import rng, rows
from metaleader.theory.convexity import (
    Constants,
    contraction,
    meta_eigenvalues,
    minimise,
    quadratic_constants,
)
from metaleader.theory.families import BETA, DIMENSION, MU, Pairs, bowls, in_ball
from metaleader.theory.logistic import Logistic, logistic, logistic_constants, logistic_loss
from metaleader.theory.newton import play_ftml
from metaleader.theory.online import FTL, FTL_ADAPTED, FTML, STREAMING, Simulation, growth
from metaleader.theory.quadratics import Quadratics, linear_regression, quadratic_loss

# A growth exponent below the first counts as flat, below the second as sublinear, above the third as linear.
FLAT, SUBLINEAR, LINEAR = 0.2, 0.5, 0.85


@dataclass(frozen=True)
class Check:
    """One claim, measured.

    Attributes:
        source: where the paper makes it.
        claim: what it says.
        measured: the number.
        required: what the number has to be.
        passed: whether it is.
    """

    source: str
    claim: str
    measured: str
    required: str
    passed: bool


def at_most(source: str, claim: str, value: float, limit: float) -> Check:
    """A check that a number does not exceed a limit; NaN fails."""
    return Check(source, claim, f"{value:.3g}", f"<= {limit:.3g}", value <= limit)


def at_least(source: str, claim: str, value: float, limit: float) -> Check:
    """A check that a number reaches a limit; NaN fails."""
    return Check(source, claim, f"{value:.3g}", f">= {limit:.3g}", value >= limit)


def quadratic_checks(alpha_factor: float = 1.0, instances: int = 50, minimised: int = 3) -> Iterator[Check]:
    """Appendix A: closed forms of joint training and MAML.

    Args:
        alpha_factor: the step size as a multiple of Theorem 1's bound.
        instances: random sets of ten tasks.
        minimised: how many of them are also minimised numerically.
    """
    source = "appendix A"
    sets = [random_pairs(10, seed) for seed in range(instances)]
    alpha = alpha_factor / (2 * BETA)
    errors: dict[str, float] = {"joint training": 0.0, "MAML": 0.0, "MAML, f^ not f": 0.0}
    for pairs in sets[:minimised]:
        f, other = pairs
        for name, support, steps in (("joint training", f, 0), ("MAML", f, 1), ("MAML, f^ not f", other, 1)):
            closed = f.adapted(alpha, steps, support).mean().minimiser()
            constants = quadratic_constants(Quadratics.stack([f, support]), radius=10.0)
            start = torch.zeros_like(closed)
            try:
                found = minimise(
                    quadratic_loss, start, support, f, constants, alpha=alpha, inner_steps=steps, max_iterations=2000
                )
                error = float(torch.linalg.vector_norm(found - closed))
            except ValueError:
                error = math.inf
            errors[name] = max(errors[name], error)
    for name, error in errors.items():
        yield at_most(source, f"{name}: closed form against meta_gradient", error, 1e-8)

    tasks = Quadratics.stack([pairs.query for pairs in sets])
    meta = tasks.adapted(alpha).mean(1)
    joint, maml = tasks.mean(1).minimiser(), meta.minimiser()
    apart = torch.linalg.vector_norm(joint - maml, dim=-1)
    yield at_least(source, "joint and MAML minimisers differ (least distance)", float(apart.min()), 1e-3)
    gain = (meta.value(joint) - meta.value(maml)) / (MU / 16 * apart.square())
    yield at_least(source, "MAML is better after adaptation (least gain over mu/16 distance^2)", float(gain.min()), 1.0)

    same = tasks._replace(A=tasks.A[:, :1].expand_as(tasks.A))
    apart = same.mean(1).minimiser() - same.adapted(alpha).mean(1).minimiser()
    yield at_most(source, "they coincide when all A_i are equal (distance)", float(apart.abs().max()), 1e-8)

    random = rng("theory regression", 0)
    x, y = torch.from_numpy(random.standard_normal((10, 30, 4))), torch.from_numpy(random.standard_normal((10, 30)))
    least_squares = torch.linalg.lstsq(x, y[..., None]).solution[..., 0]
    error = float((linear_regression(x, y).minimiser() - least_squares).abs().max())
    yield at_most(source, "linear regression: -A^-1 b against least squares", error, 1e-8)


def theorem_checks(alpha_factor: float = 1.0, instances: int = 100) -> Iterator[Check]:
    """Theorem 1 and the contraction lemma, for quadratics and for logistic regression."""
    pairs = random_pairs(instances, 0)
    quadratic = quadratic_constants(Quadratics.stack([pairs.query, pairs.support]), radius=3.0)
    logistic_f, logistic_support, logistic_constant = logistic_example()
    for name, d, loss_fn, f, support, constants in (
        ("quadratics", DIMENSION, quadratic_loss, pairs.query, pairs.support, quadratic),
        ("logistic", 2, logistic_loss, logistic_f, logistic_support, logistic_constant),
    ):
        alpha = alpha_factor * constants.alpha
        constants.check_alpha(alpha)
        points = domain_points(constants.radius, d)
        eigenvalues = meta_eigenvalues(loss_fn, points, support, f, alpha)
        least, most = float(eigenvalues.min()), float(eigenvalues.max())
        yield at_least("Theorem 1", f"{name}: smallest eigenvalue of the meta-Hessian", least, constants.meta_mu)
        yield at_most("Theorem 1", f"{name}: largest eigenvalue of the meta-Hessian", most, constants.meta_beta)
        ratio = float(contraction(loss_fn, points, points.roll(1, 0), support, alpha).max())
        limit = 1 - alpha * constants.mu + 1e-9
        yield at_most("lemma 4", f"{name}: |U(v) - U(w)| / |v - w| is at most 1 - alpha mu", ratio, limit)

    doubled = pairs.query.adapted(2 * quadratic.alpha)
    least = float(torch.linalg.eigvalsh(doubled.A).min())
    yield at_most("Theorem 1", "quadratics at twice the bound: mu/8 is lost", least, quadratic.meta_mu * (1 - 1e-9))
    least = min(_least_quadratic(pairs, factor * quadratic.alpha) for factor in (10.0, 100.0, 1000.0))
    yield at_least("Theorem 1", "quadratics stay convex at 10, 100, 1000 times the bound", least, -1e-8)
    factors, eigenvalues = logistic_scan()
    broken = next((factor for factor, (least, _) in zip(factors, eigenvalues, strict=True) if least < 0), math.inf)
    yield at_most("Theorem 1", "logistic: convexity breaks at this multiple of the bound", broken, factors[-1])


def regret_checks(simulations: Mapping[str, Simulation]) -> Iterator[Check]:
    """Corollary 2, on every family that was played."""
    source = "corollary 2"
    for family, played in simulations.items():
        ftml = played.regret[FTML]
        yield at_most(source, f"{family}: leaders and comparator lie in W", played.farthest, played.constants.radius)
        difference = float((ftml - played.telescoped).abs().max())
        yield at_most(source, f"{family}: FTML's regret, two ways", difference, 1e-8 * (1 + float(ftml.max())))
        share = float((ftml / played.bound).max())
        yield at_most(source, f"{family}: FTML, R(T) over 32 G^2/mu (1 + log T)", share, 1.0)
        share = float((ftml / played.gradient_bound).max())
        yield at_most(source, f"{family}: FTML, R(T) over the gradient bound", share, 1.0)
        yield at_most(source, f"{family}: FTML, growth of R(2T) - R(T)", growth(ftml), FLAT)
        streaming = played.regret[STREAMING]
        yield at_most(source, f"{family}: streaming, growth", growth(streaming), SUBLINEAR)
        share = float((streaming / played.streaming_bound).max())
        yield at_most(source, f"{family}: streaming, R(T) over G^2/(2 mu/8) (1 + log T)", share, 1.0)
        yield at_least(source, f"{family}: FTL without adaptation, growth", growth(played.regret[FTL]), LINEAR)
        adapted = played.regret[FTL_ADAPTED]
        ratio = float(adapted[:, -1].mean() / ftml[:, -1].mean())
        if family == "correlated":
            yield at_least(source, f"{family}: FTL with adaptation, growth", growth(adapted), LINEAR)
            yield at_least(source, f"{family}: FTL with adaptation over FTML, R(T)", ratio, 2.0)
        elif family == "stationary":
            yield at_most(source, f"{family}: FTL with adaptation, growth", growth(adapted), SUBLINEAR)
            yield at_most(source, f"{family}: FTL with adaptation over FTML, R(T)", ratio, 1.5)


def newton_checks(alpha_factor: float = 1.0, rounds: int = 256, seeds: int = 2) -> Iterator[Check]:
    """Corollary 2 for logistic regression, where rho > 0 and the leader is found by Newton's method."""
    source = "corollary 2"
    f, support, constants = logistic_example(rounds * seeds)
    runs = []
    for seed in range(seeds):
        part = slice(rounds * seed, rounds * (seed + 1))
        tasks = rows(support, part), rows(f, part)
        try:
            runs.append(play_ftml(logistic_loss, 2, *tasks, constants, alpha_factor * constants.alpha))
        except ValueError as error:
            yield Check(source, f"logistic: FTML by Newton's method. {error}", "none", "a leader", False)
            return
    regret, leaders = torch.stack([run.regret for run in runs]), torch.stack([run.leaders for run in runs])
    farthest = float(torch.linalg.vector_norm(leaders, dim=-1).max())
    yield at_most(source, "logistic: leaders and comparator lie in W", farthest, constants.radius)
    bound = constants.regret_bound(torch.arange(1, rounds + 1, dtype=torch.float64))
    yield at_most(source, "logistic: FTML, R(T) over 32 G^2/mu (1 + log T)", float((regret / bound).max()), 1.0)
    share = float((regret / torch.stack([run.gradient_bound for run in runs])).max())
    yield at_most(source, "logistic: FTML, R(T) over the gradient bound", share, 1.0)
    yield at_most(source, "logistic: FTML, growth of R(2T) - R(T)", growth(regret), FLAT)


def random_pairs(num: int, seed: int) -> Pairs:
    """Random quadratic tasks whose f and f^ have curvatures of their own in [MU, BETA], and near minimisers."""
    random = rng("theory pairs", seed)
    low, high = random.uniform(MU, 2 * MU, (2, num)), random.uniform(BETA / 2, BETA, (2, num))
    low[:, 0], high[:, -1] = MU, BETA
    minimisers = 1 + in_ball(random, num)
    f = bowls(random, minimisers, low[0], high[0])
    return Pairs(f, bowls(random, minimisers + in_ball(random, num) / 4, low[1], high[1]))


def logistic_example(num: int = 10) -> tuple[Logistic, Logistic, Constants]:
    """Random logistic-regression tasks, f on 40 datapoints and f^ on 10 others, and their constants for |w| <= 3."""
    random = rng("theory logistic", 0)
    weights = random.standard_normal((num, 2, 1))

    def sample(datapoints: int) -> Logistic:
        x = random.uniform(-1.5, 1.5, (num, datapoints, 2))
        sure = 1 / (1 + torch.exp(-torch.from_numpy((x @ weights)[..., 0])))
        y = torch.where(torch.from_numpy(random.random((num, datapoints))) < sure, 1.0, -1.0)
        return logistic(torch.from_numpy(x), y, l2=0.1)

    f, support = sample(40), sample(10)
    first, second = logistic_constants(f, 3.0), logistic_constants(support, 3.0)
    return f, support, first.joined(second)


def logistic_scan(factors: int = 33) -> tuple[list[float], list[tuple[float, float]]]:
    """The smallest and largest eigenvalue of the logistic meta-Hessian over W, for step sizes around the bound.

    Returns:
        The step sizes as multiples of the bound, from 0.1 to 1000, and the two eigenvalues at each.
    """
    f, support, constants = logistic_example()
    points = domain_points(constants.radius, 2, num=60)
    multiples = torch.logspace(-1, 3, factors, dtype=torch.float64).tolist()
    ranges = []
    for multiple in multiples:
        found = meta_eigenvalues(logistic_loss, points, support, f, multiple * constants.alpha)
        ranges.append((float(found.min()), float(found.max())))
    return multiples, ranges


def domain_points(radius: float, dimension: int, num: int = 100) -> Tensor:
    """Points of W, |w| <= radius, half of them on its boundary, (num, dimension)."""
    points = in_ball(rng("theory points", num), num, dimension)
    points[::2] /= (points[::2] ** 2).sum(1, keepdims=True) ** 0.5
    return radius * torch.from_numpy(points)


def _least_quadratic(pairs: Pairs, alpha: float) -> float:
    return float(torch.linalg.eigvalsh(pairs.query.adapted(alpha, support=pairs.support).A).min())
