"""The paper's claims as checks, each with a measured number and a required range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from metaleader.tasks import rng, rows
from metaleader.theory.convexity import Constants, contraction, meta_eigenvalues, minimise, quadratic_constants
from metaleader.theory.families import BETA, DIMENSION, MU, Pairs, bowls, in_ball
from metaleader.theory.logistic import Logistic, logistic, logistic_constants, logistic_loss
from metaleader.theory.newton import play_ftml
from metaleader.theory.online import FTL, FTL_ADAPTED, FTML, STREAMING, Simulation, growth
from metaleader.theory.quadratics import Quadratics, linear_regression, quadratic_loss

# Growth exponents: flat is at most FLAT, sublinear at most SUBLINEAR, linear at least LINEAR.
FLAT, SUBLINEAR, LINEAR = 0.2, 0.5, 0.85


@dataclass(frozen=True)
class Check:
    """One claim and its measurement.

    Attributes:
        source: the place of the claim in the paper.
        claim: a description of the claim.
        measured: the measured number.
        required: the range of numbers that support the claim.
        passed: whether the number is in this range.
    """

    source: str
    claim: str
    measured: str
    required: str
    passed: bool


def at_most(source: str, claim: str, value: float, limit: float) -> Check:
    """Return a check that a number does not exceed a limit; NaN fails."""
    return Check(source, claim, f"{value:.3g}", f"<= {limit:.3g}", value <= limit)


def at_least(source: str, claim: str, value: float, limit: float) -> Check:
    """Return a check that a number is not below a limit; NaN fails."""
    return Check(source, claim, f"{value:.3g}", f">= {limit:.3g}", value >= limit)


def quadratic_checks(alpha_factor: float = 1.0, instances: int = 50, minimised: int = 3) -> Iterator[Check]:
    """Check the closed forms of joint training and MAML (appendix A).

    Args:
        alpha_factor: the step size as a multiple of Theorem 1's bound.
        instances: the number of random sets of ten tasks.
        minimised: the number of sets that are also minimised numerically.
    """
    source = "appendix A"
    sets = [random_pairs(10, seed) for seed in range(instances)]
    alpha = alpha_factor / (2 * BETA)
    errors: dict[str, float] = {"joint training": 0.0, "MAML": 0.0, "MAML, f^ not f": 0.0}
    for f, f_hat in sets[:minimised]:
        for name, support, steps in (("joint training", f, 0), ("MAML", f, 1), ("MAML, f^ not f", f_hat, 1)):
            closed_form = f.adapted(alpha, steps, support).mean().minimiser()
            constants = quadratic_constants(Quadratics.stack([f, support]), radius=10.0)
            start = torch.zeros_like(closed_form)
            try:
                minimiser = minimise(
                    quadratic_loss, start, support, f, constants, alpha=alpha, inner_steps=steps, max_iterations=2000
                )
                error = float(torch.linalg.vector_norm(minimiser - closed_form))
            except ValueError:
                error = math.inf
            errors[name] = max(errors[name], error)
    for name, error in errors.items():
        yield at_most(source, f"{name}: closed form against meta_gradient", error, 1e-8)

    tasks = Quadratics.stack([pairs.query for pairs in sets])
    meta = tasks.adapted(alpha).mean(1)
    joint, maml = tasks.mean(1).minimiser(), meta.minimiser()
    distance = torch.linalg.vector_norm(joint - maml, dim=-1)
    yield at_least(source, "joint and MAML minimisers differ (smallest distance)", float(distance.min()), 1e-3)
    gain = (meta.value(joint) - meta.value(maml)) / (MU / 16 * distance.square())
    claim = "MAML is better after adaptation (smallest gain over mu/16 distance^2)"
    yield at_least(source, claim, float(gain.min()), 1.0)

    equal_A = tasks._replace(A=tasks.A[:, :1].expand_as(tasks.A))
    difference = equal_A.mean(1).minimiser() - equal_A.adapted(alpha).mean(1).minimiser()
    claim = "joint and MAML minimisers coincide if all A_i are equal (distance)"
    yield at_most(source, claim, float(difference.abs().max()), 1e-8)

    random = rng("theory regression", 0)
    x, y = torch.from_numpy(random.standard_normal((10, 30, 4))), torch.from_numpy(random.standard_normal((10, 30)))
    least_squares = torch.linalg.lstsq(x, y[..., None]).solution[..., 0]
    error = float((linear_regression(x, y).minimiser() - least_squares).abs().max())
    yield at_most(source, "linear regression: -A^-1 b against least squares", error, 1e-8)


def theorem_checks(alpha_factor: float = 1.0, instances: int = 100) -> Iterator[Check]:
    """Check Theorem 1, corollary 1, the contraction and several steps, for quadratics and for logistic regression."""
    pairs = random_pairs(instances, 0)
    quadratic = quadratic_constants(Quadratics.stack([pairs.query, pairs.support]), radius=3.0)
    for name, d, loss_fn, f, support, constants in (
        ("quadratics", DIMENSION, quadratic_loss, pairs.query, pairs.support, quadratic),
        ("logistic", 2, logistic_loss, *logistic_example()),
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
        mean = meta_eigenvalues(loss_fn, points, support, f, alpha, mean=True)
        claim = f"{name}: MAML's objective, {{}} eigenvalue"
        yield at_least("corollary 1", claim.format("smallest"), float(mean.min()), constants.meta_mu)
        yield at_most("corollary 1", claim.format("largest"), float(mean.max()), constants.meta_beta)
        for steps in (steps for steps in (2, 5) if constants.allows(alpha, steps)):
            low, high = constants.curvature(alpha, steps)
            several = meta_eigenvalues(loss_fn, points, support, f, alpha, steps)
            claim = f"{name}, {steps} steps: {{}} eigenvalue of the meta-Hessian"
            yield at_least("several steps", claim.format("smallest"), float(several.min()), low * (1 - 1e-9))
            yield at_most("several steps", claim.format("largest"), float(several.max()), high * (1 + 1e-9))

    doubled = pairs.query.adapted(2 * quadratic.alpha)
    least = float(torch.linalg.eigvalsh(doubled.A).min())
    claim = "quadratics: smallest eigenvalue at twice the bound is below mu/8"
    yield at_most("Theorem 1", claim, least, quadratic.meta_mu * (1 - 1e-9))
    beyond = (pairs.query.adapted(factor * quadratic.alpha, support=pairs.support) for factor in (10.0, 100.0, 1000.0))
    least = min(float(torch.linalg.eigvalsh(tasks.A).min()) for tasks in beyond)
    yield at_least("Theorem 1", "quadratics: convex at 10, 100, 1000 times the bound", least, -1e-8)
    factors, eigenvalues = logistic_scan()
    broken = next((factor for factor, (least, _) in zip(factors, eigenvalues, strict=True) if least < 0), math.inf)
    yield at_most("Theorem 1", "logistic: convexity breaks at this multiple of the bound", broken, factors[-1])


def regret_checks(simulations: Mapping[str, Simulation]) -> Iterator[Check]:
    """Check corollary 2 on every simulated family, and FTL's regret of Eq. 2, which it extends."""
    source = "corollary 2"
    for family, simulation in simulations.items():
        ftml, radius = simulation.regret[FTML], simulation.constants.radius
        yield at_most(source, f"{family}: leaders and comparator lie in W", simulation.farthest, radius)
        difference = float((ftml - simulation.telescoped).abs().max())
        claim = f"{family}: FTML's regret minus its telescoped form"
        yield at_most(source, claim, difference, 1e-8 * (1 + float(ftml.max())))
        ratio = float((ftml / simulation.bound).max())
        yield at_most(source, f"{family}: FTML, R(T) over 32 G^2/mu (1 + log T)", ratio, 1.0)
        ratio = float((ftml / simulation.gradient_bound).max())
        yield at_most(source, f"{family}: FTML, R(T) over the gradient bound", ratio, 1.0)
        yield at_most(source, f"{family}: FTML, growth of R(2T) - R(T)", growth(ftml), FLAT)
        streaming = simulation.regret[STREAMING]
        yield at_most(source, f"{family}: streaming, growth", growth(streaming), SUBLINEAR)
        ratio = float((streaming / simulation.streaming_bound).max())
        yield at_most(source, f"{family}: streaming, R(T) over G^2/(2 mu/8) (1 + log T)", ratio, 1.0)
        yield at_least(source, f"{family}: FTL without adaptation, growth", growth(simulation.regret[FTL]), LINEAR)
        fixed = simulation.fixed_regret
        yield at_most("Eq. 2", f"{family}: FTL against the best fixed parameters, growth", growth(fixed), FLAT)
        ratio = float((fixed / simulation.fixed_bound).max())
        yield at_most("Eq. 2", f"{family}: FTL, R(T) over the gradient bound", ratio, 1.0)
        adapted = simulation.regret[FTL_ADAPTED]
        ratio = float(adapted[:, -1].mean() / ftml[:, -1].mean())
        if family == "correlated":
            yield at_least(source, f"{family}: FTL with adaptation, growth", growth(adapted), LINEAR)
            yield at_least(source, f"{family}: FTL with adaptation over FTML, R(T)", ratio, 2.0)
        elif family == "stationary":
            yield at_most(source, f"{family}: FTL with adaptation, growth", growth(adapted), SUBLINEAR)
            yield at_most(source, f"{family}: FTL with adaptation over FTML, R(T)", ratio, 1.5)


def newton_checks(alpha_factor: float = 1.0, rounds: int = 256, seeds: int = 2) -> Iterator[Check]:
    """Check corollary 2 for logistic regression, where rho > 0 and Newton's method finds the leader."""
    source = "corollary 2"
    f, support, constants = logistic_example(rounds * seeds)
    runs = []
    for seed in range(seeds):
        index = slice(rounds * seed, rounds * (seed + 1))
        tasks = rows(support, index), rows(f, index)
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
    ratio = float((regret / torch.stack([run.gradient_bound for run in runs])).max())
    yield at_most(source, "logistic: FTML, R(T) over the gradient bound", ratio, 1.0)
    yield at_most(source, "logistic: FTML, growth of R(2T) - R(T)", growth(regret), FLAT)


def random_pairs(num: int, seed: int) -> Pairs:
    """Draw quadratic tasks whose f and f^ have independent curvatures in [MU, BETA], and minimisers close together."""
    random = rng("theory pairs", seed)
    low, high = random.uniform(MU, 2 * MU, (2, num)), random.uniform(BETA / 2, BETA, (2, num))
    low[:, 0], high[:, -1] = MU, BETA
    minimisers = 1 + in_ball(random, num)
    f = bowls(random, minimisers, low[0], high[0])
    return Pairs(f, bowls(random, minimisers + in_ball(random, num) / 4, low[1], high[1]))


def logistic_example(num: int = 10) -> tuple[Logistic, Logistic, Constants]:
    """Draw logistic-regression tasks, f on 40 datapoints and f^ on 10 others, with their constants for |w| <= 3."""
    random = rng("theory logistic", 0)
    weights = random.standard_normal((num, 2, 1))

    def sample(datapoints: int) -> Logistic:
        x = random.uniform(-1.5, 1.5, (num, datapoints, 2))
        probability = 1 / (1 + torch.exp(-torch.from_numpy((x @ weights)[..., 0])))
        y = torch.where(torch.from_numpy(random.random((num, datapoints))) < probability, 1.0, -1.0)
        return logistic(torch.from_numpy(x), y, l2=0.1)

    f, support = sample(40), sample(10)
    return f, support, logistic_constants(f, 3.0).joined(logistic_constants(support, 3.0))


def logistic_scan(factors: int = 33) -> tuple[list[float], list[tuple[float, float]]]:
    """Return the extreme eigenvalues of the logistic meta-Hessian over W, for step sizes around the bound.

    Returns:
        The step sizes as multiples of the bound, from 0.1 to 1000, and the smallest and largest eigenvalue for each.
    """
    f, support, constants = logistic_example()
    points = domain_points(constants.radius, 2, num=60)
    multiples = torch.logspace(-1, 3, factors, dtype=torch.float64).tolist()
    ranges = []
    for multiple in multiples:
        eigenvalues = meta_eigenvalues(logistic_loss, points, support, f, multiple * constants.alpha)
        ranges.append((float(eigenvalues.min()), float(eigenvalues.max())))
    return multiples, ranges


def domain_points(radius: float, dimension: int, num: int = 100) -> Tensor:
    """Draw points of W, |w| <= radius, half of them on its boundary, (num, dimension)."""
    points = in_ball(rng("theory points", num), num, dimension)
    points[::2] /= (points[::2] ** 2).sum(1, keepdims=True) ** 0.5
    return radius * torch.from_numpy(points)
