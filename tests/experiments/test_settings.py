"""Settings inside an option: the fields of an adaptation."""

import dataclasses

import pytest
import tiny
import torch

import metaleader as ml
from metaleader.experiments.ranges import search_space
from metaleader.experiments.settings import settings_of, with_settings
from metaleader.system.builders import plain


@pytest.fixture
def experiment():
    bayes = ml.Method(ml.FTML, label="bayes", adaptation=ml.BayesianHead(rank=1))
    return dataclasses.replace(tiny.tiny(), methods={"bayes": bayes, "toe": {}})


def test_they_are_listed_changed_and_searched(experiment):
    assert settings_of(experiment, ["bayes"])["bayes.adaptation.rank"] == 1
    for text in ("bayes.adaptation.rank=3", "all.adaptation.rank=3", "adaptation.rank=3"):
        if text.startswith("adaptation"):
            with pytest.raises(ValueError, match=r"did you mean|unknown"):
                with_settings(experiment, [text], ["bayes", "toe"])
            continue
        changed = with_settings(experiment, [text, "bayes.adaptation.scale=0.5"], ["bayes", "toe"])
        assert changed.methods["bayes"].options["adaptation"] == ml.BayesianHead(scale=0.5, rank=3)
    assert experiment.methods["bayes"].options["adaptation"] == ml.BayesianHead(rank=1)
    space = search_space(experiment, ["bayes.adaptation.rank=1..3"], ["bayes"])
    assert space["bayes"]["adaptation.rank"][1] == 1
    with pytest.raises(ValueError, match=r"did you mean 'adaptation.rank'"):
        with_settings(experiment, ["bayes.adaptation.rnak=3"], ["bayes"])
    with pytest.raises(ValueError, match="rank must be an integer"):
        with_settings(experiment, ["bayes.adaptation.rank=-1"], ["bayes"])


def test_the_settings_of_a_method_are_those_of_its_learner(experiment):
    methods = {"toe": experiment.methods["toe"], "ftml": ml.Method(ml.FTML), "more": ml.Method(ml.FTML, meta_steps=7)}
    experiment = dataclasses.replace(experiment, methods=methods, meta_steps=3)
    listed = settings_of(experiment, list(methods))
    for name, method in methods.items():
        made = method(experiment.network, experiment.loss, meta_steps=experiment.meta_steps)
        assert listed[f"{name}.meta_steps"] == made.options.meta_steps, name
        assert f"{name}.data_folder" not in listed
    with pytest.raises(ValueError, match="unknown setting of toe 'data_folder'"):
        with_settings(experiment, ["toe.data_folder=/tmp"], list(methods))


@pytest.mark.parametrize(("sizes", "at"), [({}, 1), ({}, 6), ({"measure_at": (1, 4)}, 2), ({"reveal": 3}, 2)])
def test_a_claim_at_a_size_that_is_not_measured_is_refused(sizes, at):
    experiment = dataclasses.replace(tiny.tiny(), reveal=2, reveals=2, panels=(), before_at=None)
    with pytest.raises(ValueError, match=f"a claim is made at={at} datapoints, which are not measured"):
        dataclasses.replace(experiment, **sizes, claims=[ml.better("ftml", "toe", at=at)])


def tasks_of(rows):
    batch = ml.Batch(torch.ones(rows, 1), torch.ones(rows, 1))
    return [ml.Task("a", batch, batch)]


@pytest.mark.parametrize("reveals", [None, 3])
def test_a_claim_between_two_reveals_is_refused_unless_that_is_all_data(reveals):
    claims = [ml.better("ftml", "toe", at=7)]
    experiment = dataclasses.replace(
        tiny.tiny(), reveal=3, reveals=reveals, panels=(), before_at=None, tasks=1, claims=claims
    )
    assert experiment.sized(tasks_of(7)).claims == tuple(claims)
    with pytest.raises(ValueError, match="a claim has the size 7, but a reveal has 3 datapoints and all data 8"):
        experiment.sized(tasks_of(8))
    with_settings(experiment, ["reveal=4"], ["ftml", "toe"]).sized(tasks_of(8))  # undecided


@pytest.mark.parametrize(("rows", "sizes"), [(7, (3, 7)), (6, (3, 6)), (9, (3, 9)), (2, (2,)), (100, (3, 9))])
def test_the_sizes_shown_end_with_all_data(rows, sizes):
    """Also if the last reveal is a part of one: the tables have no numbers of a size that is not measured."""
    experiment = dataclasses.replace(tiny.tiny(), reveal=3, reveals=None, panels=(), before_at=None, tasks=1, claims=())
    if rows == 100:
        experiment = dataclasses.replace(experiment, reveals=3)
    sized = experiment.sized(tasks_of(rows))
    assert (sized.sizes(), sized.sizes_before()) == (sizes, sizes)
    learner = ml.TOE(ml.models.mlp(1, 1, (2,)), ml.losses.squared_error, meta_steps=1)
    records = ml.play(learner, tasks_of(rows), sized.reveal, reveals=sized.reveals, before_at=sized.sizes_before())
    assert set(sizes) <= {record.datapoints for record in records}


def test_settings_may_change_the_sizes_of_claims():
    """The claim is kept, and is undecided when the run has no records of its size."""
    experiment = dataclasses.replace(
        tiny.tiny(), reveal=2, reveals=2, panels=(), claims=[ml.better("ftml", "toe", at=4)]
    )
    changed = with_settings(experiment, ["reveal=3"], ["ftml", "toe"])
    assert (changed.measured(), changed.claims) == ((3, 6), experiment.claims)


def test_a_stream_without_tasks_is_refused():
    with pytest.raises(ValueError, match="it has no tasks"):
        tiny.tiny().sized([])


@dataclasses.dataclass(frozen=True)
class Mine:
    rate: float = 0.5


def test_other_dataclasses_are_described_with_their_fields():
    assert plain({"a": Mine(0.25)}) == {"a": {"class": f"{Mine.__module__}.Mine", "rate": 0.25}}
