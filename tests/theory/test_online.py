import dataclasses

import pytest
import torch

from metaleader.gradient.meta import meta_gradient
from metaleader.tasks import rows
from metaleader.theory import StepSizeWarning, growth, minimise, quadratic_loss, simulate
from metaleader.theory import online as online_module
from metaleader.theory.checks import logistic_example, newton_checks, regret_checks
from metaleader.theory.families import BETA, FAMILIES, MU, Pairs, draw
from metaleader.theory.newton import play_ftml
from metaleader.theory.online import FTL, FTL_ADAPTED, FTML, STREAMING, doublings
from metaleader.theory.quadratics import Quadratics


@pytest.fixture(scope="module")
def simulations():
    return {family: simulate(draw(family, 1000, 4)) for family in FAMILIES}


def one_seed(pairs):
    return tuple(Quadratics(*(part[0] for part in tasks)) for tasks in pairs)


def test_simulation_against_the_obvious_loop():
    rounds = 5
    pairs = draw("few-shot", rounds, 2)
    played = simulate(pairs)
    f, support = one_seed(pairs)
    alpha, constants = played.alpha, played.constants

    def meta(w, first, stop, steps=1):
        part = slice(first, stop)
        loss, gradient = meta_gradient(quadratic_loss, {"w": w}, rows(support, part), rows(f, part), alpha, steps)
        return float(loss) * (stop - first), gradient["w"]

    def leader(stop, steps):
        start = torch.zeros(4, dtype=torch.float64)
        if stop == 0:
            return start
        part = slice(0, stop)
        tasks = rows(support, part), rows(f, part)
        return minimise(quadratic_loss, start, tasks[0], tasks[1], constants, alpha=alpha, inner_steps=steps)

    streaming = torch.zeros(4, dtype=torch.float64)
    totals = dict.fromkeys((FTML, STREAMING, FTL_ADAPTED, FTL), 0.0)
    for t in range(rounds):
        joint = leader(t, 0)
        totals[FTML] += meta(leader(t, 1), t, t + 1)[0]
        totals[FTL_ADAPTED] += meta(joint, t, t + 1)[0]
        totals[FTL] += meta(joint, t, t + 1, steps=0)[0]
        cost, gradient = meta(streaming, t, t + 1)
        totals[STREAMING] += cost
        streaming = streaming - gradient / (constants.mu / 8 * (t + 1))
        if streaming.norm() > constants.radius:
            streaming = streaming * constants.radius / streaming.norm()
        best = meta(leader(t + 1, 1), 0, t + 1)[0]
        for name, total in totals.items():
            assert float(played.regret[name][0, t]) == pytest.approx(total - best, abs=1e-7)


def test_families_are_what_they_say():
    for family in FAMILIES:
        pairs = draw(family, 40, 2)
        eigenvalues = torch.linalg.eigvalsh(pairs.query.A)
        assert pairs.query.b.shape == (2, 40, 4)
        assert torch.equal(draw(family, 40, 2).query.b, pairs.query.b)
        assert not torch.equal(pairs.query.b[0], pairs.query.b[1])
        if family != "few-shot":
            assert float(eigenvalues.min()) >= MU * (1 - 1e-9)
            assert float(eigenvalues.max()) <= BETA * (1 + 1e-9)
    steep = torch.linalg.eigvalsh(draw("correlated", 200, 1).query.A)[0, :, 0] > 2 * MU
    side = draw("correlated", 200, 1).query.minimiser()[0, :, 0] > 1
    assert torch.equal(steep, side)


def test_the_adversary_picks_the_worst_of_its_pool():
    pairs = draw("adversarial", 60, 1)
    f, _ = one_seed(pairs)
    meta = f.adapted(1 / (2 * BETA))
    sums = meta.cumsum(0)
    for t in (5, 20, 40):
        w = Quadratics(*(part[t - 1] for part in sums)).minimiser()
        assert float(meta.value(w).max()) == pytest.approx(float(meta.value(w)[t]))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_regret_checks_pass(simulations, family):
    found = list(regret_checks({family: simulations[family]}))
    assert [check.claim for check in found if not check.passed] == []
    assert len(found) >= 8


def swap(played, name, by):
    return dataclasses.replace(played, regret={**played.regret, name: played.regret[by]})


def test_regret_checks_fail_for_other_learners(simulations):
    played = simulations["correlated"]

    def failures(changed):
        return [check.claim for check in regret_checks({"correlated": changed}) if not check.passed]

    assert any("FTML, growth" in claim for claim in failures(swap(played, FTML, FTL_ADAPTED)))
    assert any("telescoped" in claim for claim in failures(swap(played, FTML, FTL_ADAPTED)))
    assert any("streaming, growth" in claim for claim in failures(swap(played, STREAMING, FTL)))
    assert any("without adaptation" in claim for claim in failures(swap(played, FTL, FTML)))
    assert any("with adaptation, growth" in claim for claim in failures(swap(played, FTL_ADAPTED, FTML)))
    assert any("lie in W" in claim for claim in failures(dataclasses.replace(played, farthest=100.0)))
    # A claim of stronger convexity than there is: the gradient bound is close enough to catch it.
    small = dataclasses.replace(played, gradient_bound=played.gradient_bound / 20)
    assert any("gradient bound" in claim for claim in failures(small))
    constants = dataclasses.replace(played.constants, G=0.01)
    assert any("32 G^2/mu" in claim for claim in failures(dataclasses.replace(played, constants=constants)))


def test_a_leader_that_looks_ahead_is_caught(monkeypatch):
    monkeypatch.setattr(online_module, "_delayed", lambda leaders: leaders)
    played = simulate(draw("stationary", 200, 2))
    assert any(not check.passed for check in regret_checks({"stationary": played}))


def test_without_projection_the_streaming_learner_is_lost(monkeypatch):
    right = online_module._online_gradient_descent
    monkeypatch.setattr(
        online_module,
        "_online_gradient_descent",
        lambda meta, constants: right(meta, dataclasses.replace(constants, radius=1e30)),
    )
    played = simulate(draw("stationary", 500, 2))
    assert float(played.regret[STREAMING].max()) > 1e6


def test_growth_tells_logarithm_root_and_line_apart():
    T = torch.arange(1, 2001, dtype=torch.float64)[None]
    assert growth(torch.log(T)) == pytest.approx(0, abs=1e-9)
    assert growth(T.sqrt()) == pytest.approx(0.5, abs=1e-3)
    assert growth(3 * T) == pytest.approx(1, abs=1e-9)
    assert growth(-3 * T) == pytest.approx(1, abs=1e-9)
    starts, differences = doublings(3 * T)
    assert starts == [125, 250, 500, 1000]
    assert differences.tolist() == pytest.approx([375, 750, 1500, 3000])
    with pytest.raises(ValueError, match="at least 32 rounds, got 20"):
        doublings(T[:, :20])


def test_newton_plays_what_the_closed_form_plays():
    pairs = draw("few-shot", 20, 1)
    played = simulate(pairs)
    f, support = one_seed(pairs)
    run = play_ftml(quadratic_loss, 4, support, f, played.constants)
    torch.testing.assert_close(run.regret, played.regret[FTML][0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(run.gradient_bound, played.gradient_bound[0], rtol=1e-9, atol=1e-9)


def test_logistic_regret_is_flat():
    found = list(newton_checks(rounds=80, seeds=2))
    assert [check.claim for check in found if not check.passed] == []
    assert len(found) == 4


def test_newton_notices_less_curvature_than_promised(monkeypatch):
    def boastful(num):
        f, support, constants = logistic_example(num)
        return f, support, dataclasses.replace(constants, mu=20 * constants.mu, rho=constants.rho * 20)

    monkeypatch.setattr("metaleader.theory.checks.logistic_example", boastful)
    (check,) = newton_checks(rounds=40, seeds=1)
    assert not check.passed
    assert "below mu/8" in check.claim


def test_bad_input():
    with pytest.raises(ValueError, match=r"rounds \(T\) and seeds must be at least 1, got 0"):
        draw("stationary", 0, 3)
    with pytest.raises(ValueError, match="no family 'other'; there are stationary"):
        draw("other", 10, 1)
    pairs = draw("stationary", 5, 1)
    with pytest.warns(StepSizeWarning, match=r"alpha = 0\.4"):
        simulate(pairs, alpha=0.4)
    with pytest.raises(ValueError, match="T at least 1"):
        simulate(Pairs(*(Quadratics(*(part[:, :0] for part in tasks)) for tasks in pairs)))
    flipped = pairs.query._replace(A=-pairs.query.A)
    with pytest.raises(ValueError, match="positive definite"):
        simulate(Pairs(flipped, flipped))


def test_the_regret_of_eq_2_by_hand():
    """FTL against the best fixed parameters, by a loop; adaptation plays no part."""
    pairs = draw("stationary", 40, 2)
    played = simulate(pairs)
    for seed in range(2):
        tasks = [Quadratics(*(values[seed, t] for values in pairs.query)) for t in range(40)]
        w, loss = torch.zeros(4, dtype=torch.float64), 0.0
        for t in range(40):
            loss += float(tasks[t].value(w))
            A, b = sum(task.A for task in tasks[: t + 1]), sum(task.b for task in tasks[: t + 1])
            w = -torch.linalg.solve(A, b)
            best = sum(float(task.value(w)) for task in tasks[: t + 1])
            assert float(played.fixed_regret[seed, t]) == pytest.approx(loss - best, abs=1e-9)
            assert float(played.fixed_regret[seed, t]) <= float(played.fixed_bound[seed, t]) * (1 + 1e-9)
