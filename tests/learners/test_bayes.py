"""The Bayesian head against closed forms of Bayesian linear regression, mixed effects, and its own calibration."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import metaleader as ml
from metaleader.checks import check_learner
from metaleader.learners.update import _gather


def head(features=3, outputs=1, loss=ml.losses.squared_error, net=None, **settings):
    torch.manual_seed(0)
    model = (net or (lambda: nn.Linear(features, outputs)))().double()
    common: dict[str, Any] = {"meta_steps": 2, "tasks_per_step": 4, "support": 5, "query": 5} | settings
    return ml.FTML(model, loss, adaptation=ml.BayesianHead(), **common)


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
    return mean, covariance, torch.exp(2 * named["log noise"])


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
    support, query = (tree_map(lambda leaf: leaf[0, 0], part) for part in _gather(learner, draw))
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


def test_the_prior_is_learned_as_by_mixed_effects():
    """y = 2 + a_g + (1 + b_g) x + noise: standard deviations 0.8, 0.4 and 0.3 are found from 150 groups."""
    generator = torch.Generator().manual_seed(0)
    learner = head(1, meta_steps=6, meta_lr=0.03, tasks_per_step=50)
    for g in range(150):
        a, b = torch.randn(2, generator=generator, dtype=torch.float64) * torch.tensor([0.8, 0.4])
        x = torch.randn(10, 1, generator=generator, dtype=torch.float64)
        y = 2 + a + (1 + b) * x + 0.3 * torch.randn(10, 1, generator=generator, dtype=torch.float64)
        learner.begin(f"group {g}")
        learner.observe(x, y)
    mean, covariance, noise = prior(learner)
    assert abs(mean[0, 0] - 1) < 0.1
    assert abs(mean[1, 0] - 2) < 0.2
    deviations = covariance.diagonal().sqrt()
    assert abs(deviations[0] - 0.4) < 0.1
    assert abs(deviations[1] - 0.8) < 0.15
    assert abs(noise.sqrt() - 0.3) < 0.03
    # Calibration: standardised errors of predictions from three datapoints have variance one.
    scores = []
    for _ in range(200):
        a, b = torch.randn(2, generator=generator, dtype=torch.float64) * torch.tensor([0.8, 0.4])
        x = torch.randn(8, 1, generator=generator, dtype=torch.float64)
        y = 2 + a + (1 + b) * x + 0.3 * torch.randn(8, 1, generator=generator, dtype=torch.float64)
        learner.begin("new")
        learner.observe(x[:3], y[:3], update=False)
        prediction, variance = learner.predict(x[3:], variance=True)
        scores.append((prediction - y[3:]).square() / variance)
    assert 0.85 < torch.cat(scores).mean() < 1.15


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
    with pytest.raises(ValueError, match="inner_lr concern gradient steps"):
        head(inner_lr=0.5)
    with pytest.raises(ValueError, match="rank must be"):
        ml.BayesianHead(rank=-1)
    learner = head(net=lambda: nn.Sequential(nn.Linear(3, 1), nn.Tanh()))
    learner.begin("a")
    with pytest.raises(ValueError, match="output of its last linear layer"):
        learner.observe(*batch(4))
    with pytest.raises(ValueError, match="needs a learner with adaptation"):
        ml.FTML(nn.Linear(3, 1), ml.losses.squared_error).predict(torch.rand(2, 3), variance=True)
