"""Measurements between reveals and before a round's training, against learners that are played to that point."""

import copy
import functools
from typing import Any

import pytest
import torch
from tiny import tiny, tiny_nway
from torch import nn

import metaleader as ml
from metaleader.checks.trees import differences, snapshot
from metaleader.evaluate import play_together
from metaleader.learners import store, trial
from metaleader.learners.measure import measure
from metaleader.runner.plan import make_learner, make_stream
from metaleader.streams.base import View

EXPERIMENTS = {"tasks": tiny, "n-way": tiny_nway}
CASES = [("tasks", name) for name in ("ftml", "ftml-last", "ftl", "toe", "scratch")]
CASES += [("n-way", name) for name in ("ftml", "toe", "scratch")]


class Own(ml.FTML):
    def update(self, steps: Any = None) -> None:
        super().update(1)


def made(kind: str, method: str, seed: int = 0, **options: Any):
    experiment = EXPERIMENTS[kind]()
    return make_learner(experiment, method, seed=seed, engine="eager", **options), make_stream(experiment, seed, None)


def played(kind: str, method: str, rounds: int, seeds: int = 1, **options: Any):
    """The learners after some rounds, and the records by seed, round and datapoints."""
    experiment = EXPERIMENTS[kind]()
    pairs = [made(kind, method, seed) for seed in range(seeds)]
    learners, streams = [pair[0] for pair in pairs], [View(pair[1], range(rounds)) for pair in pairs]
    records = {}
    for found in play_together(
        learners, streams, experiment.reveal, reveals=experiment.reveals, steps=(2, 0), **options
    ):
        records |= {(seed, record.round, record.datapoints): record for seed, record in enumerate(found)}
    return learners, records


@pytest.mark.parametrize(("kind", "method"), CASES)
@pytest.mark.parametrize("seeds", [1, 2])
def test_measurements_leave_the_learner_as_it_is(kind: str, method: str, seeds: int) -> None:
    every, plain = played(kind, method, 3, seeds)
    reveal = EXPERIMENTS[kind]().reveal
    sizes = [1, reveal, reveal + 1, reveal + 2, 2 * reveal]
    measured, records = played(kind, method, 3, seeds, measure_at=sizes, before_at=(1, reveal))
    for one, other in zip(every, measured, strict=True):
        assert not differences(snapshot(one), snapshot(other))
    assert {size for _, _, size in records} == {*sizes}
    for key, record in plain.items():
        if key in records:
            more = {name: value for name, value in records[key].more.items() if not name.endswith("_before")}
            assert (records[key].loss, records[key].accuracy, more) == (record.loss, record.accuracy, record.more)


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_a_size_between_reveals_is_that_of_a_shorter_reveal(kind: str, method: str) -> None:
    experiment = EXPERIMENTS[kind]()
    reveal, metric = experiment.reveal, ml.losses.unsmoothed(experiment.loss)
    size = reveal + 1
    _, records = played(kind, method, 2, measure_at=(size,))
    (learner,), _ = played(kind, method, 1)
    task = made(kind, method)[1][1]
    learner.begin(task.name, **({} if task.classes is None else {"classes": task.classes}))
    for rows in (slice(0, reveal), slice(reveal, size)):
        learner.observe(task.train.x[rows], task.train.y[rows], **({} if task.ids is None else {"ids": task.ids[rows]}))
    expected = measure(learner, task.test, metric, (2, 0))
    assert records[0, 1, size].loss == pytest.approx(expected["loss"], rel=1e-5)
    assert records[0, 1, size].more["loss_0"] == pytest.approx(expected["loss_0"], rel=1e-5)
    if task.ids is not None:
        assert records[0, 1, size].more["new_datapoints"] == learner.num_new


@pytest.mark.parametrize(("kind", "method"), [case for case in CASES if case[1] != "scratch"])
def test_the_loss_before_is_that_of_a_learner_that_only_stores_the_data(kind: str, method: str) -> None:
    experiment = EXPERIMENTS[kind]()
    size, metric = experiment.reveal, ml.losses.unsmoothed(experiment.loss)
    _, records = played(kind, method, 2, before_at=(size,))
    (learner,), _ = played(kind, method, 1)
    task = made(kind, method)[1][1]
    learner.begin(task.name, **({} if task.classes is None else {"classes": task.classes}))
    ids = {} if task.ids is None else {"ids": task.ids[:size]}
    learner.observe(task.train.x[:size], task.train.y[:size], update=False, **ids)
    expected = measure(learner, task.test, metric, (2,))
    record = records[0, 1, size]
    assert record.more["loss_before"] == pytest.approx(expected["loss"], rel=1e-5)
    assert record.more.get("accuracy_before") == pytest.approx(expected.get("accuracy"))
    assert record.more["loss_before"] != record.loss
    assert not [name for key, other in records.items() if key[2] != size for name in other.more if "before" in name]


def test_the_regret_protocol_has_the_same_losses_in_the_first_round() -> None:
    """Before any update, both protocols measure the initialisation."""
    _, online = played("tasks", "ftml", 1, before_at=(4, 8))
    experiment = tiny()
    learner, stream = made("tasks", "ftml")
    for record in ml.play(learner, View(stream, range(1)), experiment.reveal, reveals=2, steps=(2, 0), regret=True):
        assert record.loss == online[0, 0, record.datapoints].more["loss_before"]


def test_a_learner_that_restarts_has_no_loss_before() -> None:
    _, records = played("tasks", "scratch", 1, before_at=(4,))
    assert "loss_before" not in records[0, 0, 4].more


@pytest.mark.parametrize("shards", [1, 3])
def test_a_trial_restores_learners_after_errors_too(shards: int) -> None:
    learner, stream = made("tasks", "ftml", **({"shards": shards} if shards > 1 else {}))
    list(ml.play(learner, View(stream, range(2)), 4, reveals=2))
    learner.begin("next")
    learner.observe(stream[2].train.x[:4], stream[2].train.y[:4])
    before, twin = snapshot(learner), copy.deepcopy(learner)
    x, y = stream[2].train.x[4:6], stream[2].train.y[4:6]

    def tried(y: Any) -> None:
        with trial([learner]):
            store(learner, x, y)
            learner.update()
            assert differences(before, snapshot(learner))
            raise ZeroDivisionError

    for targets, error in ((y, ZeroDivisionError), (y + 1e38, ValueError), (y[:1], ValueError)):
        with pytest.raises(error):
            tried(targets)
        assert not differences(before, snapshot(learner))
        assert learner.skipped == 0
    for one in (learner, twin):
        one.observe(x, y)
    assert not differences(snapshot(learner), snapshot(twin))


def test_learners_that_cannot_return_are_refused() -> None:
    net = functools.partial(nn.Linear, 1, 1)
    stream = ml.streams.SinusoidStream(tasks=1, train=6, test=5)
    for options, name in (({"measure_at": (3,)}, "measure_at has"), ({"before_at": (4,)}, "before_at has")):
        with pytest.raises(ValueError, match=rf"{name} .* a Own with its own observe or update cannot"):
            list(ml.play(Own(net, ml.losses.squared_error, support=2, query=2), stream, 4, **options))
    learner = ml.FTML(net, ml.losses.squared_error, support=2, query=2)
    with pytest.raises(ValueError, match=r"before_at has \[5\], but round 0 is measured at \[4, 6\] datapoints"):
        list(ml.play(learner, stream, 4, before_at=(5,)))
    with pytest.raises(ValueError, match="cannot be named"):
        list(ml.play(learner, stream, 4, parts={"before": slice(0, 1)}))
    assert learner.step == 0
    assert torch.equal(learner.state.flat, ml.FTML(net, ml.losses.squared_error, support=2, query=2).state.flat)
