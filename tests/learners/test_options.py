"""Settings of learners: declared once, checked by name, read by the constructor's signature."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import metaleader as ml
from metaleader.checks.trees import differences


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iner_lr": 0.1}, "FTML has no setting 'iner_lr'; did you mean inner_lr?"),
        ({"divice": "cpu"}, "FTML has no setting 'divice'; did you mean device?"),
        ({"xyz": 1}, "FTML has no setting 'xyz'; it has meta_lr, meta_steps, .*, device, engine"),
    ],
)
def test_a_misspelt_setting_is_refused_with_a_suggestion(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ml.FTML(ml.models.mlp(1, 1), ml.losses.squared_error, **settings)


@pytest.mark.parametrize("kind", [ml.FTML, ml.FTL, ml.TOE, ml.Scratch])
def test_the_signature_is_that_of_the_options(kind: type[ml.Learner]) -> None:
    parameters = inspect.signature(kind).parameters
    fields = {field.name: field.default for field in dataclasses.fields(kind.Options)}
    assert list(parameters) == ["model", "loss", "device", "engine", "data_folder", *fields]
    assert {name: parameters[name].default for name in fields} == fields


def test_settings_are_read_as_attributes_and_not_changed() -> None:
    learner = ml.FTML(ml.models.mlp(1, 1), ml.losses.squared_error, inner_lr=0.2)
    assert (learner.inner_lr, learner.options.inner_lr) == (0.2, 0.2)
    with pytest.raises(ValueError, match="inner_lr is set when a learner is built"):
        learner.inner_lr = 0.3
    with pytest.raises(AttributeError, match="FTML has no attribute 'plain'"):
        _ = learner.plain


def test_a_model_that_fails_at_begin_leaves_the_learner() -> None:
    calls = []

    def build() -> nn.Module:
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("no model")
        return ml.models.mlp(1, 1, (4,))

    learner = ml.Scratch(build, ml.losses.squared_error, meta_steps=1)
    learner.begin("a")
    learner.observe(torch.ones(4, 1), torch.ones(4, 1))
    before = learner.state_dict()
    with pytest.raises(RuntimeError, match="no model"):
        learner.begin("b")
    assert not differences(before, learner.state_dict())
    learner.begin("b")
    assert (learner.round, learner.task, learner.num_datapoints) == (1, "b", 0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"learn_lr": "yes"}, "learn_lr must be True or False, got 'yes'"),
        ({"every_step": 1}, "every_step must be True or False, got 1"),
        ({"inner_lr": True}, "inner_lr must be no boolean, got True"),
    ],
)
def test_booleans_and_numbers_are_not_exchanged(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ml.FTML(lambda: ml.models.mlp(1, 1), ml.losses.squared_error, **setting)
