"""The table of methods: styles that can be told apart, and defaults for methods that are not in it."""

import functools

import pytest
import torch
from torch import nn

import metaleader as ml
from metaleader.experiments.settings import with_settings
from metaleader.methods import METHODS, PAPER, known_method, label, styles
from metaleader.presets import PRESETS


def test_styles_can_be_told_apart_with_and_without_colour():
    for field in ("label", "colour", "marker", "dashes"):
        assert len({getattr(method.style, field) for method in METHODS.values()}) == len(METHODS)


def test_every_method_of_the_presets_is_in_the_table():
    assert {name for make in PRESETS.values() for name in make("standard").all_methods} == set(METHODS)
    assert list(METHODS)[:5] == list(PAPER)


def test_other_methods_have_their_name_as_label_and_a_colour_to_themselves():
    names = [f"mine {number}" for number in range(8)]
    chosen = styles([*names, "toe", "ftml"])
    assert list(chosen) == ["ftml", "toe", *names]
    assert [chosen[name].label for name in names] == names
    everyone = [*(chosen[name] for name in names), *(method.style for method in METHODS.values())]
    assert len({style.colour for style in everyone}) == len({style.dashes for style in everyone}) == len(everyone)
    assert styles(["mine 3", "toe"])["mine 3"] == styles(["mine 3"])["mine 3"]
    assert label("mine 3") == "mine 3"
    assert len(styles(f"{number}" for number in range(20))) == 20


def test_labels_in_sentences_have_no_comma():
    assert METHODS["ftml"].style.phrase == "FTML"
    assert METHODS["ftml-last"].style.phrase == "last-layer FTML"


def test_known_methods_have_their_options_and_those_given():
    assert known_method("ftml-last", {"inner_lr": 0.5}).options == {"only": "last", "inner_lr": 0.5}
    with pytest.raises(ValueError, match="unknown method 'ftml-lost'; did you mean 'ftml-last'"):
        known_method("ftml-lost", {})


def shops(tasks, rows, features=2):
    """y = x0 + a + b x1 + noise, with a and b of each task; (tasks, rows, ...)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tasks, rows, features, generator=generator)
    a, b = 0.8 * torch.randn(2, tasks, 1, generator=generator)
    return x, (x[..., 0] + a + b * x[..., 1] + 0.3 * torch.randn(tasks, rows, generator=generator))[..., None]


def test_mixed_is_a_linear_model_with_shrunk_coefficients():
    """With the true variances, best linear unbiased predictions in closed form; learned, they are hardly worse."""
    x, y = shops(80, 25)
    method = known_method("mixed", {"tasks_per_step": 40, "support": 5, "query": 5})
    learner = method(lambda: ml.models.mlp(2, 1), ml.losses.squared_error, meta_steps=0, seed=0)
    assert [tuple(value.shape) for value in learner.params.values()] == [(1, 2), (1,)]
    for t in range(80):
        learner.observe(x[t, :10], y[t, :10], task=str(t), update=False)
    learner.update(300)
    precision = torch.diag(torch.tensor([1e8, 1 / 0.64, 1 / 0.64]))  # of x0, x1 and the intercept
    mean, errors = torch.tensor([[1.0], [0.0], [0.0]]), []
    phi = torch.cat([x, torch.ones(80, 25, 1)], -1)
    for t in range(80):
        few, rest = phi[t, :10], phi[t, 10:]
        weights = mean + torch.linalg.solve(precision + few.mT @ few / 0.09, few.mT @ (y[t, :10] - few @ mean) / 0.09)
        found = learner.predict(x[t, 10:], task=str(t))
        errors.append([float((prediction - y[t, 10:]).square().mean()) for prediction in (found, rest @ weights)])
    own, best = torch.tensor(errors).mean(0).tolist()
    assert 0.1 < best < 0.13
    assert own < 1.05 * best


def test_joint_offset_is_one_network_with_an_offset_per_task():
    x, y = shops(10, 20)
    settings = {"tasks_per_step": 10, "support": 5, "query": 5, "meta_lr": 1e-2}
    learner = known_method("joint-offset", settings)(
        lambda: ml.models.mlp(2, 1, [16]), ml.losses.squared_error, meta_steps=20, seed=0
    )
    for t in range(10):
        learner.observe(x[t, :10], y[t, :10], task=str(t))
    initial, named = learner.adapt(0, task="3"), learner.layout.named(learner.state.flat)
    between, noise = (float(torch.exp(2 * named[name])) for name in ("prior log scale", "log noise"))
    offset = (y[3, :10] - initial(x[3, :10])).sum() * between / (10 * between + noise + 1e-6)
    torch.testing.assert_close(learner.predict(x[3], task="3"), initial(x[3]) + offset)
    models = learner.adapt(task="3"), initial
    errors = [float((model(x[3, 10:]) - y[3, 10:]).square().mean().detach()) for model in models]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("name", ["mixed", "joint-offset"])
def test_baselines_in_closed_form_are_for_regression(name):
    with pytest.raises(ValueError, match=f"{name} is for metaleader.losses.squared_error.* compare with toe"):
        known_method(name, {})(lambda: ml.models.mlp(2, 3), ml.losses.cross_entropy, meta_steps=1)


def test_mixed_needs_rows_of_features_or_a_model():
    network = functools.partial(nn.Sequential, nn.Conv1d(2, 3, 1), nn.Flatten(), nn.Linear(12, 1))
    with pytest.raises(ValueError, match="begins with Conv1d and ends with Linear"):
        known_method("mixed", {})(network, ml.losses.squared_error, meta_steps=1)
    options = {"model": lambda: nn.Linear(5, 2)}
    learner = known_method("mixed", options)(network, ml.losses.squared_error, meta_steps=1)
    assert learner.predict(torch.zeros(3, 5)).shape == (3, 2)


def test_settings_of_gradient_steps_leave_closed_forms_as_they_are():
    preset, methods = PRESETS["sinusoid"]("quick"), ["ftml", "mixed"]
    changed = with_settings(preset, ["all.inner_lr=0.5", "all.meta_lr=0.02"], methods).all_methods
    assert [changed["ftml"].options[name] for name in ("inner_lr", "meta_lr")] == [0.5, 0.02]
    assert (changed["mixed"].options["meta_lr"], "inner_lr" in changed["mixed"].options) == (0.02, False)
    with pytest.raises(ValueError, match="unknown setting of mixed 'inner_lr'"):
        with_settings(preset, ["mixed.inner_lr=0.5"], methods)
