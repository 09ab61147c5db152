"""The Bayesian head against closed forms of Bayesian linear regression, mixed effects, and its own calibration."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn
from torch.utils._pytree import tree_map

import metaleader as ml
from metaleader.checks import check_learner
from metaleader.learners.update import gather


def head(features=3, outputs=1, loss=ml.losses.squared_error, net=None, **settings):
    torch.manual_seed(0)
    model = (net or (lambda: nn.Linear(features, outputs)))().double()
    common = {"meta_steps": 2, "tasks_per_step": 4, "support": 5, "query": 5, "adaptation": ml.BayesianHead()}
    options: dict[str, Any] = common | settings
    return ml.FTML(model, loss, **options)


def batch(num, features=3, outputs=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num, features, generator=generator, dtype=torch.float64),
        torch.randn(num, outputs, generator=generator, dtype=torch.float64),
    )


def prior(learner):
    named = learner.layout.named(learner.state.flat)
    mean = torch.cat([named["weight"].mT, named["bias"][None]])
    factor = named["prior factor"]
    covariance = torch.diag(torch.exp(2 * named["prior log scale"])) + factor @ factor.mT
    return mean, covariance, torch.exp(2 * named["log noise"]) + 1e-6


@pytest.mark.parametrize(("num", "outputs"), [(1, 1), (4, 2), (40, 2)])
def test_posterior_and_variance_are_those_of_bayesian_linear_regression(num, outputs):
    learner = head(outputs=outputs)
    x, y = batch(num, outputs=outputs)
    learner.begin("a")
    learner.observe(x, y, update=False)
    mean, covariance, noise = prior(learner)
    phi, (new, _) = torch.cat([x, torch.ones(num, 1)], 1), batch(6, seed=1)
    phi_new = torch.cat([new, torch.ones(6, 1)], 1)
    net = learner.adapt()
    for c in range(outputs):
        precision = torch.linalg.inv(covariance) + phi.mT @ phi / noise[c]
        right = torch.linalg.solve(covariance, mean[:, c]) + phi.mT @ y[:, c] / noise[c]
        weights = torch.linalg.solve(precision, right)
        torch.testing.assert_close(net(new)[:, c], phi_new @ weights, rtol=1e-8, atol=1e-9)
        expected = (phi_new @ torch.linalg.inv(precision) * phi_new).sum(1) + noise[c]
        _, variance = learner.predict(new, variance=True)
        torch.testing.assert_close(variance[:, c], expected, rtol=1e-8, atol=1e-9)


def test_before_data_the_variance_is_the_priors():
    learner = head()
    x, _ = batch(5)
    _, covariance, noise = prior(learner)
    phi = torch.cat([x, torch.ones(5, 1)], 1)
    prediction, variance = learner.predict(x, variance=True)
    torch.testing.assert_close(variance[:, 0], (phi @ covariance * phi).sum(1) + noise)
    torch.testing.assert_close(prediction, learner.adapt()(x))


def test_updates_minimise_the_negative_evidence():
    learner = head(outputs=2)
    objective = learner.definition.objective
    (x, y), (xq, yq) = batch(4, outputs=2), batch(3, outputs=2, seed=1)
    params = learner.layout.named(learner.state.flat)
    loss, gradients = objective.one_task(params, ml.Batch(x, y), ml.Batch(xq, yq))
    mean, covariance, noise = prior(learner)
    phi = torch.cat([torch.cat([x, xq]), torch.ones(7, 1)], 1)
    targets = torch.cat([y, yq])
    expected = 0.0
    for c in range(2):
        gaussian = torch.distributions.MultivariateNormal(
            phi @ mean[:, c], phi @ covariance @ phi.mT + noise[c] * torch.eye(7, dtype=torch.float64)
        )
        expected -= float(gaussian.log_prob(targets[:, c])) / 7 / 2
    assert math.isclose(float(loss), expected, rel_tol=1e-9)
    assert gradients.keys() == params.keys()


@pytest.mark.parametrize("loss", [ml.losses.squared_error, ml.losses.cross_entropy])
def test_repeated_datapoints_count_once(loss):
    """A task of three datapoints has the loss of these three, in sets of two and one."""
    learner = head(outputs=2, loss=loss, tasks_per_step=1, support=4, query=2)
    x, y = batch(3, outputs=2)
    y = y.argmax(1) if loss is ml.losses.cross_entropy else y
    learner.observe(x, y, task="small", update=False)
    draw: Any = learner.memory.draw(0, [0], 1, 4, 2)
    support, query = (tree_map(lambda leaf: leaf[0, 0], part) for part in gather(learner, draw))
    assert support.weights.tolist() == [1, 1, 0, 0]
    assert query.weights.tolist() == [1, 0]
    params, adaptation = learner.layout.named(learner.state.flat), ml.BayesianHead()
    few = [ml.Batch(part.x[part.weights > 0], part.y[part.weights > 0]) for part in (support, query)]
    if loss is ml.losses.squared_error:
        expected = adaptation.loss(learner.network, params, *few)
        torch.testing.assert_close(adaptation.loss(learner.network, params, support, query), expected)
    adapted = adaptation(learner.network, params, support)
    for name, value in adaptation(learner.network, params, few[0]).items():
        torch.testing.assert_close(adapted[name], value)


def test_support_sets_of_n_way_tasks_take_their_classes_in_turn():
    """The loss measures their first 1, 2, 4, ... datapoints too, which are of as many classes as there can be."""
    learner = head(outputs=3, loss=ml.losses.cross_entropy, tasks_per_step=4, support=6, query=3)
    x, _ = batch(24)
    for name, classes in (("a", [0, 1, 2]), ("b", [3, 4, 5])):
        learner.begin(name, classes=classes)
        learner.observe(x + classes[0], torch.arange(24) % 3, update=False)
    draw: Any = learner.memory.draw(0, [0], 4, 6, 3)
    support, query = gather(learner, draw)
    assert query.y.shape == (1, 4, 3)
    assert support.y.view(4, 2, 3).sort(-1).values.tolist() == [[[0, 1, 2]] * 2] * 4
    sorted_before, _ = learner.memory.gather(draw)
    for t in range(4):  # the same datapoints with their labels
        pairs = [
            {(*row.tolist(), int(label)) for row, label in zip(part.x[0, t], part.y[0, t], strict=True)}
            for part in (support, sorted_before)
        ]
        assert pairs[0] == pairs[1]


def trained(x, y, updates=400, **settings):
    """A head on groups, (groups, rows, ...), whose updates see whole groups, with a falling step size."""
    groups, rows = x.shape[:2]
    falling = [(i * updates // 8, 0.05 * 0.5**i) for i in range(8)]
    sizes = {"support": rows // 2, "query": rows - rows // 2, "tasks_per_step": groups, "meta_lr": falling}
    learner = head(x.shape[2], **(sizes | settings))
    for g in range(groups):
        learner.begin(f"group {g}")
        learner.observe(x[g], y[g], update=False)
    learner.update(updates)
    return learner


def test_a_constant_feature_gives_the_shrunk_offsets_of_random_effects():
    """The maximum likelihood of balanced one-way random effects has a closed form (analysis of variance)."""
    generator = torch.Generator().manual_seed(1)
    groups, rows = 60, 8
    offsets = 2 + 0.8 * torch.randn(groups, 1, 1, generator=generator, dtype=torch.float64)
    y = offsets + 0.5 * torch.randn(groups, rows, 1, generator=generator, dtype=torch.float64)
    x = torch.ones(groups, rows, 1, dtype=torch.float64)
    learner = trained(x, y, net=lambda: nn.Linear(1, 1, bias=False), adaptation=ml.BayesianHead(rank=0))
    named = learner.layout.named(learner.state.flat)
    means = y.mean(1)
    within = (y - means[:, None]).square().sum() / (groups * (rows - 1))
    between = (means - means.mean()).square().mean() - within / rows
    noise, variance = (torch.exp(2 * named[name]).squeeze() for name in ("log noise", "prior log scale"))
    torch.testing.assert_close(named["weight"].squeeze(), means.mean(), rtol=0.02, atol=0)
    torch.testing.assert_close(noise, within, rtol=0.05, atol=0)
    torch.testing.assert_close(variance, between, rtol=0.1, atol=0)
    shrinkage, mean = variance / (variance + (noise + 1e-6) / rows), named["weight"].squeeze()
    for g in (0, 7):
        prediction = learner.predict(x[g, :1], task=f"group {g}").squeeze()
        torch.testing.assert_close(prediction, mean + shrinkage * (means[g, 0] - mean), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 2])
def test_an_offset_alone_is_the_shrunk_mean_of_the_residuals(rank):
    """The posterior, the variance and the evidence of a random intercept, written out."""
    adaptation = ml.BayesianHead(rank=rank, only="bias")
    learner = head(outputs=2, adaptation=adaptation)
    (x, y), (new, _) = batch(7, outputs=2), batch(4, seed=1)
    learner.observe(x, y, task="a", update=False)
    params = learner.layout.named(learner.state.flat)
    assert params["prior log scale"].shape == (1,)
    between = torch.exp(2 * params["prior log scale"]) + params["prior factor"].square().sum()
    noise, net = torch.exp(2 * params["log noise"]) + 1e-6, learner.adapt(0)
    offsets = (y - net(x)).sum(0) * between / (noise + 7 * between)
    prediction, variance = learner.predict(new, task="a", variance=True)
    torch.testing.assert_close(prediction, net(new) + offsets)
    torch.testing.assert_close(variance, (noise + noise * between / (noise + 7 * between)).expand(4, 2))
    expected = 0.0
    for c in range(2):
        covariance = between + noise[c] * torch.eye(7, dtype=torch.float64)
        gaussian = torch.distributions.MultivariateNormal(net(x)[:, c], covariance)
        expected -= float(gaussian.log_prob(y[:, c]).detach()) / 7 / 2
    loss, gradients = learner.definition.objective.one_task(params, ml.Batch(x[:4], y[:4]), ml.Batch(x[4:], y[4:]))
    assert math.isclose(float(loss), expected, rel_tol=1e-9)
    assert gradients.keys() == params.keys()


def test_an_offset_of_classes_is_the_shrunk_mean_of_the_residuals_of_the_gaussian_targets():
    """One class after the other, weighted by the precision of each label, against the sums written out."""
    adaptation = ml.BayesianHead(scale=2.0, noise=0.1, rank=0, only="bias")
    learner = head(outputs=3, loss=ml.losses.cross_entropy, adaptation=adaptation)
    x, _ = batch(6)
    labels = [0, 2, 2, 0, 2, 0]
    learner.begin("a")
    logits, old = learner.adapt()(x).detach(), learner.adapt().state_dict()
    learner.observe(x, torch.tensor(labels), update=False)
    new = learner.adapt().state_dict()
    torch.testing.assert_close(new["weight"], old["weight"])
    for c in range(3):
        precision, weighted = 1 / 2.0**2, 0.0
        for row, label in zip(logits, labels, strict=True):
            concentration = 0.1 + (label == c)
            variance = math.log(1 + 1 / concentration)
            weighted += (math.log(concentration) - variance / 2 - float(row[c])) / variance
            precision += 1 / variance
        offset = float((new["bias"] - old["bias"])[c])
        assert math.isclose(offset, weighted / precision, rel_tol=1e-9)


def test_an_offset_alone_is_refused_without_a_bias():
    with pytest.raises(ValueError, match='only must be "bias", or None'):
        ml.BayesianHead(only="last")
    with pytest.raises(ValueError, match="needs a last linear layer with a bias"):
        head(net=lambda: nn.Linear(3, 1, bias=False), adaptation=ml.BayesianHead(only="bias"))


def mixed_effects(phi, y, steps=500):
    """Random intercepts and slopes by expectation maximisation: mean, covariance and noise variance."""
    size, groups = phi.shape[-1], len(phi)
    mean, covariance = torch.zeros(size, dtype=phi.dtype), torch.eye(size, dtype=phi.dtype)
    noise = torch.ones((), dtype=phi.dtype)
    for _ in range(steps):
        posterior = torch.linalg.inv(torch.linalg.inv(covariance) + phi.mT @ phi / noise)
        right = torch.linalg.solve(covariance, mean) + (phi.mT @ y[..., None])[..., 0] / noise
        weights = (posterior @ right[..., None])[..., 0]
        mean = weights.mean(0)
        centred = weights - mean
        covariance = posterior.mean(0) + centred.mT @ centred / groups
        residuals = y - (phi @ weights[..., None])[..., 0]
        noise = (residuals.square().sum() + torch.einsum("gnd,gde,gne->", phi, posterior, phi)) / y.numel()
    return mean, covariance, noise


def test_without_hidden_layers_it_is_mixed_effects_regression():
    """Correlated intercepts and slopes: the estimates are those of expectation maximisation, and calibrated."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.tensor([[0.4, 0.0], [0.5, 0.6]], dtype=torch.float64)

    def draw(groups, rows):
        effects = torch.randn(groups, 2, generator=generator, dtype=torch.float64) @ factor.mT
        x = torch.randn(groups, rows, 1, generator=generator, dtype=torch.float64)
        weights = torch.tensor([1.0, 2.0], dtype=torch.float64) + effects
        noise = 0.3 * torch.randn(groups, rows, 1, generator=generator, dtype=torch.float64)
        return x, x * weights[:, None, :1] + weights[:, None, 1:] + noise

    x, y = draw(100, 8)
    learner = trained(x, y)
    mean, covariance, noise = prior(learner)
    expected = mixed_effects(torch.cat([x, torch.ones_like(x)], -1), y[..., 0])
    torch.testing.assert_close(mean[:, 0], expected[0], rtol=0.02, atol=0.01)
    torch.testing.assert_close(covariance, expected[1], rtol=0.1, atol=0.02)
    torch.testing.assert_close(noise.squeeze(), expected[2], rtol=0.05, atol=0)
    # Calibration on new groups: standardised errors have variance one, and intervals hold their share.
    new_x, new_y = draw(300, 8)
    scores = []
    for g in range(300):
        learner.begin("new")
        learner.observe(new_x[g, :3], new_y[g, :3], update=False)
        prediction, variance = learner.predict(new_x[g, 3:], variance=True)
        scores.append((prediction - new_y[g, 3:]) / variance.sqrt())
    z = torch.cat(scores)
    assert 0.9 < z.square().mean() < 1.1
    for width, share in ((0.674, 0.5), (1.645, 0.9)):
        assert abs((z.abs() < width).double().mean() - share) < 0.03


def test_the_variance_of_a_row_does_not_depend_on_the_rows_beside_it():
    norm = lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 1))  # noqa: E731
    learner = head(net=norm)
    learner.begin("a")
    learner.observe(*batch(8), update=False)
    x, _ = batch(5, seed=1)
    together, alone = (
        [learner.predict(rows, variance=True) for rows in ([x] if several else x.split(1))] for several in (True, False)
    )
    for i in range(2):
        torch.testing.assert_close(together[0][i], torch.cat([pair[i] for pair in alone]))


def test_data_without_noise_stays_solvable():
    """In float32: the noise falls to its smallest value."""
    learner = ml.FTML(nn.Linear(2, 1), ml.losses.squared_error, adaptation=ml.BayesianHead(noise=1e-6), meta_steps=20)
    x = torch.linspace(-1, 1, 40).view(20, 2)
    for t in range(3):
        learner.begin(str(t))
        learner.observe(x, x[:, :1] * (t + 1))
    prediction, variance = learner.predict(x, variance=True)
    torch.testing.assert_close(prediction, x[:, :1] * 3, rtol=1e-2, atol=1e-2)
    assert bool((variance >= 1e-6).all())


def newton(phi, y, classes, deviation, steps):
    """Multinomial logistic regression with a Gaussian prior of mean zero, by Newton's method."""

    def objective(w):
        likelihood = nn.functional.cross_entropy(phi @ w.view(-1, classes), y, reduction="sum")
        return likelihood + w.square().sum() / (2 * deviation**2)

    w = torch.zeros(phi.shape[1] * classes, dtype=phi.dtype)
    for _ in range(steps):
        w = w - torch.linalg.solve(torch.func.hessian(objective)(w), torch.func.grad(objective)(w))
    return w.view(-1, classes)


@pytest.mark.parametrize(("classes", "num"), [(2, 10), (2, 40), (3, 30)])
def test_classification_is_close_to_logistic_regression(classes, num):
    """The Gaussian approximation of labels against a few Newton steps under the same prior, on untrained features."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for _ in range(20):
        centres = torch.randn(classes, 4, generator=generator, dtype=torch.float64)
        y = torch.arange(num + 90) % classes
        x = centres[y] + torch.randn(num + 90, 4, generator=generator, dtype=torch.float64)
        learner = head(4, classes, ml.losses.cross_entropy, adaptation=ml.BayesianHead(rank=0))
        learner.state.flat[: 5 * classes] = 0  # the prior mean
        learner.begin("a")
        learner.observe(x[:num], y[:num], update=False)
        phi = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        expected = phi[num:] @ newton(phi[:num], y[:num], classes, 5 / math.sqrt(5), 4)
        both = [logits.argmax(1) for logits in (learner.predict(x[num:]), expected)]
        results.append([(both[0] == both[1]).double().mean(), *((one == y[num:]).double().mean() for one in both)])
    agreement, own, reference = torch.tensor(results).mean(0).tolist()
    assert agreement > 0.9
    assert own > reference - 0.03


def test_classification_learns_from_few_labels():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    tasks = []
    for t in range(12):
        centres = torch.randn(3, 4, generator=generator) * 1.5
        y = torch.arange(60) % 3
        x = centres[y] + 0.7 * torch.randn(60, 4, generator=generator)
        tasks.append(ml.Task(str(t), ml.Batch(x[:12], y[:12]), ml.Batch(x[12:], y[12:])))
    settings = {"meta_steps": 5, "meta_lr": 0.01, "tasks_per_step": 8, "support": 6, "query": 6}
    learner = ml.FTML(
        lambda: ml.models.mlp(4, 3, (16,)), ml.losses.cross_entropy, adaptation=ml.BayesianHead(), **settings
    )
    records = [record for record in ml.play(learner, tasks, reveal=6, steps=(1, 0)) if record.round >= 6]
    accuracy = sum(record.accuracy or 0 for record in records) / len(records)
    unadapted = sum(record.more["accuracy_0"] for record in records) / len(records)
    assert accuracy > 0.85
    assert unadapted < 0.6
    with pytest.raises(ValueError, match="softmax"):
        learner.predict(tasks[0].test.x, variance=True)


@pytest.mark.parametrize("loss", [ml.losses.squared_error, ml.losses.cross_entropy])
def test_the_contract_of_learners(loss):
    settings = {"meta_steps": 2, "tasks_per_step": 3, "support": 4, "query": 4, "adaptation": ml.BayesianHead(rank=1)}
    if loss is ml.losses.squared_error:
        check_learner(
            lambda: ml.FTML(lambda: ml.models.mlp(1, 1, (8,)), loss, **settings),
            ml.streams.SinusoidStream(tasks=2, train=20),
        )
    else:
        check_learner(
            lambda: ml.FTML(lambda: ml.models.conv_net(10, image_size=16, filters=4, layers=2), loss, **settings),
            ml.streams.rainbow_digits(tasks=2, train=20, test=10),
        )


def test_what_it_does_not_support_is_refused():
    with pytest.raises(ValueError, match=r"last layer of the model must be nn.Linear"):
        head(net=lambda: nn.Sequential(nn.Linear(3, 1), nn.LayerNorm(1)))
    with pytest.raises(ValueError, match="squared_error or cross_entropy"):
        head(loss=lambda prediction, y: (prediction - y).abs().mean(1))
    with pytest.raises(ValueError, match="inner_lr would have no effect with adaptation="):
        head(inner_lr=0.5)
    with pytest.raises(ValueError, match="rank must be"):
        ml.BayesianHead(rank=-1)
    learner = head(net=lambda: nn.Sequential(nn.Linear(3, 1), nn.Tanh()))
    learner.begin("a")
    with pytest.raises(ValueError, match="output of its last linear layer"):
        learner.observe(*batch(4))
    with pytest.raises(ValueError, match="needs a learner with adaptation"):
        ml.FTML(nn.Linear(3, 1), ml.losses.squared_error).predict(torch.rand(2, 3), variance=True)


def test_with_dof_updates_minimise_the_negative_log_density_of_a_t_distribution():
    head = ml.BayesianHead(dof=5.0)
    learner = ml.FTML(lambda: nn.Linear(3, 2).double(), ml.losses.squared_error, adaptation=head)
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    params = learner.layout.named(learner.state.flat)
    support, query = ml.Batch(x[:4], y[:4]), ml.Batch(x[4:], y[4:])
    mean, covariance, noise = prior(learner)
    phi = torch.cat([x, torch.ones(7, 1, dtype=torch.float64)], 1)
    densities = [
        scipy.stats.multivariate_t.logpdf(
            y[:, c].numpy(),
            (phi @ mean[:, c]).numpy(),
            (phi @ covariance @ phi.mT + noise[c] * torch.eye(7, dtype=torch.float64)).numpy(),  # pyright: ignore[reportArgumentType]
            df=5,
        )
        for c in range(2)
    ]
    assert float(head.loss(learner.network, params, support, query)) == pytest.approx(-np.mean(densities) / 7)


def test_with_dof_the_variance_is_that_of_the_predictive_t_distribution():
    learner = ml.FTML(
        lambda: nn.Linear(2, 1).double(), ml.losses.squared_error, adaptation=ml.BayesianHead(dof=5.0), meta_steps=0
    )
    x, y, new = (torch.randn(n, d, dtype=torch.float64) for n, d in ((6, 2), (6, 1), (3, 2)))
    learner.observe(x, y, task="a")
    mean, covariance, noise = prior(learner)
    phi, phi_new = (torch.cat([v, torch.ones(len(v), 1, dtype=torch.float64)], 1) for v in (x, new))
    kernel = phi @ covariance @ phi.mT + noise * torch.eye(6, dtype=torch.float64)
    residual, cross = y - phi @ mean, phi_new @ covariance @ phi.mT
    scale = (5 + (residual * torch.linalg.solve(kernel, residual)).sum()) / (5 + 6)
    gaussian = (
        (phi_new @ covariance * phi_new).sum(1) + noise - (cross * torch.linalg.solve(kernel, cross.mT).mT).sum(1)
    )
    found, variance = learner.predict(new, task="a", variance=True)
    torch.testing.assert_close(found, phi_new @ mean + cross @ torch.linalg.solve(kernel, residual))
    torch.testing.assert_close(variance[:, 0], gaussian * scale * 11 / 9)
    _, before = learner.predict(new, variance=True)
    torch.testing.assert_close(before[:, 0], ((phi_new @ covariance * phi_new).sum(1) + noise) * 5 / 3)


@pytest.mark.parametrize("dof", [2.0, -1.0, float("nan"), float("inf")])
def test_dof_must_give_a_variance(dof: float):
    with pytest.raises(ValueError, match="dof must be a number above 2"):
        ml.BayesianHead(dof=dof)


def test_dof_is_for_regression():
    with pytest.raises(ValueError, match="is for regression"):
        ml.FTML(nn.Linear(2, 3), ml.losses.cross_entropy, adaptation=ml.BayesianHead(dof=4.0))
