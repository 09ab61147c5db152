import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, hessian

from metaleader.gradient.meta import meta_gradient
from metaleader.tasks import rng, rows
from metaleader.theory import (
    Constants,
    Quadratics,
    StepSizeWarning,
    contraction,
    linear_regression,
    logistic,
    logistic_constants,
    logistic_loss,
    meta_eigenvalues,
    meta_hessian,
    minimise,
    quadratic_constants,
    quadratic_loss,
    quadratics,
)
from metaleader.theory import checks as theory_checks
from metaleader.theory.families import bowls, in_ball

SEEDS = st.integers(0, 10_000)
SLOW = settings(max_examples=15, deadline=None)


def pair(seed, num=6, d=3):
    """f and f^ with eigenvalues in a random range, and the constants of both."""
    draw = rng("test theory", seed)
    low, ratio = draw.uniform(0.1, 1.0), draw.uniform(1.5, 20.0)
    f, support = (
        bowls(
            draw,
            2 * in_ball(draw, num, d),
            draw.uniform(low, 1.2 * low, num),
            draw.uniform(low, ratio * low, num) + low,
        )
        for _ in range(2)
    )
    return f, support, quadratic_constants(Quadratics.stack([f, support]), radius=5.0)


def logistic_pair(seed, num=3, d=2):
    draw = rng("test logistic", seed)
    scale, l2 = draw.uniform(0.3, 3.0), float(draw.uniform(0.01, 0.5))

    def sample(datapoints):
        x = torch.from_numpy(scale * draw.standard_normal((num, datapoints, d)))
        return logistic(x, torch.from_numpy(draw.choice([-1.0, 1.0], (num, datapoints))), l2)

    f, support = sample(15), sample(6)
    radius = float(draw.uniform(0.5, 4.0))
    return f, support, logistic_constants(f, radius).joined(logistic_constants(support, radius))


def at(tasks, i):
    """One task of many."""
    return type(tasks)(*(part[i] for part in tasks))


def in_domain(seed, radius, d, num=40):
    return radius * torch.from_numpy(in_ball(rng("test points", seed), num, d))


# Appendix A.


@given(SEEDS, st.integers(0, 4))
@SLOW
def test_loss_after_adaptation_is_what_the_kernel_says(seed, steps):
    f, support, constants = pair(seed)
    w = in_domain(seed, 3.0, 3, 1)[0]
    closed = f.adapted(constants.alpha, steps, support).mean()
    loss, gradient = meta_gradient(quadratic_loss, {"w": w}, support, f, constants.alpha, steps)
    torch.testing.assert_close(closed.value(w), loss, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(closed.gradient(w), gradient["w"], rtol=1e-11, atol=1e-11)


def test_dagger_matrices_of_the_paper():
    f, _, constants = pair(0)
    alpha = constants.alpha
    shrunk = torch.eye(3, dtype=torch.float64) - alpha * f.A
    dagger = f.adapted(alpha).mean()
    torch.testing.assert_close(dagger.A, (shrunk @ shrunk @ f.A).mean(0))
    torch.testing.assert_close(dagger.b, (shrunk @ shrunk @ f.b[..., None]).mean(0)[:, 0])


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("own", [True, False])
def test_closed_minimisers_against_numerical_minimisation(steps, own):
    f, support, constants = pair(1)
    support = f if own else support
    found = minimise(quadratic_loss, f.b[0], support, f, constants, alpha=constants.alpha, inner_steps=steps)
    closed = f.adapted(constants.alpha, steps, support).mean().minimiser()
    assert float(torch.linalg.vector_norm(found - closed)) < 1e-8


def test_the_papers_b_dagger_is_not_the_minimiser_when_support_differs():
    f, support, constants = pair(1)
    alpha = constants.alpha
    shrunk = torch.eye(3, dtype=torch.float64) - alpha * support.A
    adapted = f.adapted(alpha, support=support).mean()
    wrong = -torch.linalg.solve(adapted.A, (shrunk @ shrunk @ f.b[..., None]).mean(0)[:, 0])
    assert float(torch.linalg.vector_norm(wrong - adapted.minimiser())) > 1e-3


@given(SEEDS)
@SLOW
def test_joint_and_maml(seed):
    f, _, constants = pair(seed)
    meta = f.adapted(constants.alpha).mean()
    joint, maml = f.mean().minimiser(), meta.minimiser()
    gap = float(meta.value(joint) - meta.value(maml))
    assert gap >= constants.meta_mu / 2 * float((joint - maml).square().sum()) - 1e-12
    assert float(f.mean().value(maml) - f.mean().value(joint)) >= 0
    same = f._replace(A=f.A[:1].expand_as(f.A))
    torch.testing.assert_close(same.mean().minimiser(), same.adapted(constants.alpha).mean().minimiser())


def test_linear_regression_is_least_squares():
    draw = rng("test regression", 0)
    x, y = torch.from_numpy(draw.standard_normal((4, 20, 3))), torch.from_numpy(draw.standard_normal((4, 20)))
    f = linear_regression(x, y)
    w = torch.from_numpy(draw.standard_normal(3))
    torch.testing.assert_close(f.value(w), 0.5 * (x @ w - y).square().mean(-1))
    torch.testing.assert_close(f.minimiser(), torch.linalg.lstsq(x, y[..., None]).solution[..., 0])


# Theorem 1.


@given(SEEDS)
@SLOW
def test_theorem_1_for_quadratics(seed):
    f, support, constants = pair(seed)
    assert constants.alpha == 1 / (2 * constants.beta)
    points = in_domain(seed, constants.radius, 3, 5)
    found = meta_eigenvalues(quadratic_loss, points, support, f, constants.alpha)
    closed = torch.linalg.eigvalsh(f.adapted(constants.alpha, support=support).A)
    torch.testing.assert_close(found, closed[:, None].expand_as(found))
    assert float(found.min()) >= constants.meta_mu
    assert float(found.max()) <= constants.meta_beta
    ratio = contraction(quadratic_loss, points, points.roll(1, 0), support, constants.alpha)
    assert float(ratio.max()) <= (1 - constants.alpha * constants.mu) * (1 + 1e-12)


@given(SEEDS)
@SLOW
def test_theorem_1_for_logistic_regression(seed):
    f, support, constants = logistic_pair(seed)
    assert 0 < constants.alpha <= 1 / (2 * constants.beta)
    points = in_domain(seed, constants.radius, 2)
    found = meta_eigenvalues(logistic_loss, points, support, f, constants.alpha)
    assert float(found.min()) >= constants.meta_mu
    assert float(found.max()) <= constants.meta_beta
    ratio = contraction(logistic_loss, points, points.roll(1, 0), support, constants.alpha)
    assert float(ratio.max()) <= (1 - constants.alpha * constants.mu) * (1 + 1e-12)


@given(SEEDS)
@SLOW
def test_logistic_constants_hold(seed):
    f, _, _ = logistic_pair(seed, num=1)
    constants = logistic_constants(f, radius=2.0)
    task = at(f, 0)
    loss = lambda w: logistic_loss({"w": w}, task)  # noqa: E731
    points = in_domain(seed, 2.0, 2, 12)
    slopes = torch.stack([grad(loss)(w) for w in points])
    curvatures = torch.stack([hessian(loss)(w) for w in points])
    eigenvalues = torch.linalg.eigvalsh(curvatures)
    assert float(torch.linalg.vector_norm(slopes, dim=-1).max()) <= constants.G
    assert constants.mu <= float(eigenvalues.min())
    assert float(eigenvalues.max()) <= constants.beta
    change = torch.linalg.matrix_norm(curvatures - curvatures.roll(1, 0), ord=2)
    assert bool((change <= constants.rho * torch.linalg.vector_norm(points - points.roll(1, 0), dim=-1)).all())
    # What a step reaches is inside the domain that G was taken over.
    reached = points - slopes / (2 * constants.beta)
    assert float(torch.stack([grad(loss)(w).norm() for w in reached]).max()) <= constants.G


@given(SEEDS)
@SLOW
def test_quadratic_constants_hold(seed):
    f, _, constants = pair(seed)
    points = in_domain(seed, constants.radius, 3)[:, None]
    reached = points - constants.alpha * f.gradient(points)
    assert float(f.gradient(points).norm(dim=-1).max()) <= constants.G
    assert float(f.gradient(reached).norm(dim=-1).max()) <= constants.G


def test_the_constant_is_within_a_factor_of_two():
    identity = torch.eye(2, dtype=torch.float64)
    f, support = quadratics(0.3 * identity, torch.zeros(2)), quadratics(2.0 * identity, torch.zeros(2))
    constants = quadratic_constants(Quadratics.stack([f, support]), radius=1.0)
    curvature = meta_hessian(quadratic_loss, torch.ones(2).double(), support, f, constants.alpha)
    torch.testing.assert_close(curvature, 0.3 / 4 * identity)
    assert float(meta_hessian(quadratic_loss, torch.ones(2).double(), support, f, 1 / 2.0).abs().max()) < 1e-15


def test_logistic_regression_loses_convexity_far_above_the_bound():
    f, support, constants = theory_checks.logistic_example()
    alpha = 200 * constants.alpha
    points = theory_checks.domain_points(constants.radius, 2)
    curvatures = meta_eigenvalues(logistic_loss, points, support, f, alpha)[..., 0]
    task, point = divmod(int(curvatures.argmin()), len(points))
    # Seen without any second derivative: the value at the middle of a chord lies above the chord.
    values = []
    _, vectors = torch.linalg.eigh(meta_hessian(logistic_loss, points[point], at(support, task), at(f, task), alpha))
    for shift in (-1e-2, 0.0, 1e-2):
        w = {"w": points[point] + shift * vectors[:, 0]}
        one = slice(task, task + 1)
        values.append(float(meta_gradient(logistic_loss, w, rows(support, one), rows(f, one), alpha, 1)[0]))
    assert values[1] > (values[0] + values[2]) / 2


# The checks can fail.


def failed(found):
    return [check.claim for check in found if not check.passed]


def test_all_checks_of_theorem_and_closed_forms_pass():
    assert failed(theory_checks.quadratic_checks(minimised=1)) == []
    assert failed(theory_checks.theorem_checks(instances=20)) == []


def test_a_step_above_the_bound_fails_a_check():
    with pytest.warns(StepSizeWarning, match="above Theorem 1's bound"):
        assert any("smallest eigenvalue" in claim for claim in failed(theory_checks.theorem_checks(2.0, instances=20)))


@pytest.mark.parametrize(
    ("name", "wrong", "claim"),
    [
        ("meta_mu", property(lambda c: c.mu), "smallest eigenvalue"),
        ("meta_beta", property(lambda c: c.beta / 2), "largest eigenvalue"),
        ("alpha", property(lambda c: 100 * c.mu / (8 * max(c.rho, 0.1) * c.G)), "logistic"),
    ],
)
@pytest.mark.filterwarnings("ignore::metaleader.theory.StepSizeWarning")
def test_wrong_constants_fail_a_check(monkeypatch, name, wrong, claim):
    monkeypatch.setattr(Constants, name, wrong)
    assert any(claim in failure for failure in failed(theory_checks.theorem_checks(instances=20)))


def test_the_papers_sign_fails_a_check(monkeypatch):
    right = linear_regression

    def paper(x, y):
        return right(x, -y)

    monkeypatch.setattr(theory_checks, "linear_regression", paper)
    assert any("least squares" in claim for claim in failed(theory_checks.quadratic_checks(minimised=0)))


def test_closed_forms_without_adaptation_fail_a_check(monkeypatch):
    monkeypatch.setattr(Quadratics, "adapted", lambda self, alpha, steps=1, support=None: self)
    assert any("MAML" in claim for claim in failed(theory_checks.quadratic_checks(minimised=1)))


# Bad input.


def test_step_size_above_the_bound_warns():
    constants = Constants(G=1.0, beta=2.0, rho=0.5, mu=1.0, radius=1.0)
    assert constants.alpha == 0.25
    constants.check_alpha(0.25)
    with pytest.warns(StepSizeWarning, match=r"alpha = 0\.3 is above"):
        constants.check_alpha(0.3)
    for alpha in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="alpha must be a positive number"):
            constants.check_alpha(alpha)


def test_bad_quadratics():
    identity = torch.eye(2)
    with pytest.raises(ValueError, match="positive definite, its smallest eigenvalue is -1"):
        quadratics(torch.diag(torch.tensor([1.0, -1.0])), torch.zeros(2))
    with pytest.raises(ValueError, match="positive definite"):
        linear_regression(torch.ones(5, 2), torch.ones(5))
    with pytest.raises(ValueError, match="symmetric"):
        quadratics(torch.tensor([[1.0, 0.5], [0.0, 1.0]]), torch.zeros(2))
    with pytest.raises(ValueError, match=r"got \(2, 2\), \(3,\)"):
        quadratics(identity, torch.zeros(3))
    with pytest.raises(ValueError, match="finite"):
        quadratics(identity, torch.tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match="radius"):
        quadratic_constants(quadratics(identity, torch.zeros(2)), radius=0.0)


def test_bad_logistic_tasks():
    x, y = torch.ones(4, 2), torch.tensor([1.0, -1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="labels must be -1 or 1"):
        logistic(x, torch.tensor([0.0, 1.0, 1.0, 0.0]), 0.1)
    with pytest.raises(ValueError, match="l2 must be positive, got 0"):
        logistic(x, y, 0.0)
    with pytest.raises(ValueError, match="takes x"):
        logistic(x, y[:3], 0.1)
    with pytest.raises(ValueError, match="radius"):
        logistic_constants(logistic(x, y, 0.1), -1.0)


def test_constants_of_different_domains_do_not_join():
    with pytest.raises(ValueError, match="different domains"):
        Constants(1.0, 1.0, 0.0, 1.0, radius=1.0).joined(Constants(1.0, 1.0, 0.0, 1.0, radius=2.0))


def test_minimise_says_when_it_cannot():
    f, _, constants = pair(2)
    with pytest.raises(ValueError, match="no minimiser within"):
        minimise(quadratic_loss, f.b[0], f, f, constants, alpha=constants.alpha, max_iterations=3)


# Several steps.


@given(SEEDS, st.integers(0, 5))
@SLOW
def test_the_hessian_after_several_steps_is_that_of_the_closed_form(seed, steps):
    f, support, constants = pair(seed)
    w = in_domain(seed, 3.0, 3, 1)[0]
    expected = f.adapted(constants.alpha, steps, support)
    for i in range(2):
        found = meta_hessian(quadratic_loss, w, at(support, i), at(f, i), constants.alpha, steps)
        torch.testing.assert_close(found, expected.A[i], rtol=1e-10, atol=1e-10)
    mean = meta_eigenvalues(quadratic_loss, w[None], support, f, constants.alpha, steps, mean=True)
    torch.testing.assert_close(mean[0], torch.linalg.eigvalsh(expected.mean().A), rtol=1e-10, atol=1e-10)


@given(SEEDS, st.integers(1, 5), st.floats(0.01, 1.0))
@SLOW
def test_curvature_after_several_steps_lies_within_its_bounds(seed, steps, factor):
    """Also for steps larger than Theorem 1 allows, as long as the constants hold for all iterates."""
    f, support, constants = logistic_pair(seed)
    alpha = factor / (2 * constants.beta * steps)
    assert constants.allows(alpha, steps)
    assert not constants.allows(1.01 / (2 * constants.beta * steps), steps)
    low, high = constants.curvature(alpha, steps)
    for w in in_domain(seed, constants.radius, 2, 20):
        for task in range(2):
            hessian_of_one = meta_hessian(logistic_loss, w, at(support, task), at(f, task), alpha, steps)
            eigenvalues = torch.linalg.eigvalsh(hessian_of_one)
            assert low - 1e-9 <= float(eigenvalues[0]) <= float(eigenvalues[-1]) <= high + 1e-9


@given(SEEDS)
@SLOW
def test_one_step_is_theorem_1(seed):
    for constants in (pair(seed)[2], logistic_pair(seed)[2]):
        low, high = constants.curvature(constants.alpha, 1)
        assert low >= constants.meta_mu * (1 - 1e-9)
        assert high <= constants.meta_beta * (1 + 1e-9)


def test_the_bound_after_two_steps_is_reached():
    """f with A = mu I and f^ with A = beta I: the smallest eigenvalue is mu (1 - alpha beta)^4."""
    identity = torch.eye(2, dtype=torch.float64)
    f, support = quadratics(0.5 * identity, identity[0]), quadratics(2.0 * identity, identity[1])
    constants = quadratic_constants(Quadratics.stack([f, support]), radius=1.0)
    found = meta_hessian(quadratic_loss, torch.ones(2, dtype=torch.float64), support, f, 0.2, 2)
    assert float(torch.linalg.eigvalsh(found)[0]) == pytest.approx(constants.curvature(0.2, 2)[0])
