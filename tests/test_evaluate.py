"""The play against Algorithm 1 written out, the regret protocol, and what a record says."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import oracles
import pandas as pd
import polars as pl
import pytest
import torch
from torch import Tensor, nn

import metaleader as ml
from metaleader.checks.calls import garbage
from metaleader.checks.trees import differences, snapshot
from metaleader.evaluate import play_together
from metaleader.tasks import Batch, rng, rows

SMALL: Any = {"meta_steps": 1, "tasks_per_step": 2, "query": 2, "seed": 3}
STREAM = ml.streams.SinusoidStream(tasks=3, train=7, test=5, seed=1)


def ftml(**options: Any) -> ml.FTML:
    return ml.FTML(
        lambda: ml.models.mlp(1, 1, (6,)), ml.losses.squared_error, support=2, inner_lr=0.02, **SMALL, **options
    )


def labelled(num_tasks: int = 2, train: int = 6, test: int = 8) -> list[ml.Task]:
    """Three classes of points; each task has another rotation of the labels."""
    found = []
    for t in range(num_tasks):
        draw = rng("test evaluate", t)
        y = torch.from_numpy(draw.integers(3, size=train + test))
        x = torch.from_numpy(draw.standard_normal((train + test, 4))).float() + 2 * y[:, None]
        batch = ml.Batch(x, (y + t) % 3)
        found.append(ml.Task(f"task {t}", rows(batch, slice(0, train)), rows(batch, slice(train, None))))
    return found


class Constant(nn.Module):
    """Predicts one number for every row."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return torch.full((len(x), 1), self.value)


class Spy:
    """Writes down what it is told; its predictions are the number of datapoints times the number of steps."""

    loss = staticmethod(ml.losses.squared_error)

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.seen = 0

    def begin(self, name: str) -> None:
        self.told.append(("begin", name))
        self.seen = 0

    def observe(self, x: Tensor, y: Tensor, *, update: bool = True) -> None:
        self.told.append(("observe", x.flatten().tolist(), y.flatten().tolist(), update))
        self.seen += len(x)

    def update(self) -> None:
        self.told.append(("update",))

    def adapt(self, steps: Any = None, statistics: str = "task") -> Any:
        self.told.append(("adapt", list(steps), statistics))
        return [Constant(float(self.seen * number)) for number in steps]


def line(name: str, num: int) -> ml.Task:
    """x = 0, 1, 2, ... and y = 0."""
    x = torch.arange(float(num))[:, None]
    return ml.Task(name, ml.Batch(x, 0 * x), ml.Batch(x[:2] + 0.5, 0 * x[:2]))


def test_algorithm_1() -> None:
    spy = Spy()
    records = list(ml.play(spy, [line("a", 5), line("b", 2)], reveal=2))
    adapt = ("adapt", [5], "batch")
    assert spy.told == [
        ("begin", "a"),
        ("observe", [0, 1], [0, 0], True),
        adapt,
        ("observe", [2, 3], [0, 0], True),
        adapt,
        ("observe", [4], [0], True),  # the last reveal is short
        adapt,
        ("begin", "b"),
        ("observe", [0, 1], [0, 0], True),
        adapt,
    ]
    # A prediction of 5 times the datapoints, for a target of 0.
    expected = [(0, "a", 2, 100.0), (0, "a", 4, 400.0), (0, "a", 5, 625.0), (1, "b", 2, 100.0)]
    assert [(r.round, r.task, r.datapoints, r.loss) for r in records] == expected
    assert all((r.protocol, r.accuracy, r.needed, r.more) == ("online", None, None, {}) for r in records)


def test_the_regret_protocol() -> None:
    spy = Spy()
    records = list(ml.play(spy, [line("a", 3), line("b", 2)], reveal=2, regret=True))
    adapt = ("adapt", [5], "batch")
    assert spy.told == [
        ("begin", "a"),
        ("observe", [0, 1], [0, 0], False),
        adapt,
        ("observe", [2], [0], False),
        adapt,
        ("begin", "b"),
        ("update",),  # only now that task a is a past one, and as many as it had reveals
        ("update",),
        ("observe", [0, 1], [0, 0], False),
        adapt,
    ]
    assert [record.protocol for record in records] == ["regret"] * 3


def test_records_come_one_at_a_time() -> None:
    spy = Spy()
    records = ml.play(spy, [line("a", 4)], reveal=2)
    assert next(records).datapoints == 2
    assert spy.told[-1] == ("adapt", [5], "batch")
    assert len(spy.told) == 3


def test_reveals_bounds_what_is_used_of_a_task() -> None:
    spy = Spy()
    records = list(ml.play(spy, [line("a", 9), line("b", 3)], reveal=2, reveals=2))
    assert [(record.task, record.datapoints) for record in records] == [("a", 2), ("a", 4), ("b", 2), ("b", 3)]
    assert [told[1] for told in spy.told if told[0] == "observe"] == [[0, 1], [2, 3], [0, 1], [2]]


def test_measure_at_some_sizes_only() -> None:
    spy = Spy()
    records = list(ml.play(spy, [line("a", 6), line("b", 6)], reveal=2, measure_at={4}))
    assert [(record.round, record.datapoints) for record in records] == [(0, 4), (1, 4)]
    assert [told[0] for told in spy.told] == ["begin", "observe", "observe", "adapt", "observe"] * 2


def test_the_learner_is_the_same_however_often_it_is_measured() -> None:
    states = []
    for measure_at in (None, {4}, ()):
        learner = ftml()
        list(ml.play(learner, STREAM, reveal=2, measure_at=measure_at))
        states.append(snapshot(learner))
    assert not differences(states[0], states[1])
    assert not differences(states[0], states[2])


def test_start_skips_rounds() -> None:
    records = list(ml.play(Spy(), [line("a", 2), line("b", 2), line("c", 2)], reveal=2, start=1))
    assert [(record.round, record.task) for record in records] == [(1, "b"), (2, "c")]


def test_a_restored_learner_starts_where_it_stopped() -> None:
    learner, other = ftml(), ftml()
    whole = list(ml.play(learner, STREAM, reveal=4))
    first = list(ml.play(other, [STREAM[0], STREAM[1]], reveal=4))
    restored = ftml()
    restored.load_state_dict(other.state_dict())
    assert first + list(ml.play(restored, STREAM, reveal=4, start=2)) == whole
    assert not differences(learner.state_dict(), restored.state_dict())


def test_the_threshold_of_a_regression_is_a_loss() -> None:
    class Improving(Spy):
        losses = iter([9.0, 4.0, 1.0, 16.0, 4.0])

        def adapt(self, steps: Any = None, statistics: str = "task") -> Any:
            return [Constant(next(self.losses) ** 0.5) for _ in steps]

    records = list(ml.play(Improving(), [line("a", 4), line("b", 1)], reveal=1, gamma=4.0))
    assert [record.loss for record in records] == pytest.approx([9.0, 4.0, 1.0, 16.0, 4.0])
    assert [record.needed for record in records] == [None, 2, 2, 2, 1]


def test_the_threshold_of_a_classification_is_an_accuracy() -> None:
    stream = labelled(train=6)

    def scratch() -> ml.Learner:
        return ml.Scratch(lambda: ml.models.mlp(4, 3, (16,)), ml.losses.cross_entropy, meta_lr=0.03, **SMALL)

    accuracies = [record.accuracy for record in ml.play(scratch(), stream, reveal=2)]
    gamma = sorted(accuracy for accuracy in accuracies if accuracy is not None)[-2]
    needed: dict[int, int] = {}
    for record in ml.play(scratch(), stream, reveal=2, gamma=gamma):
        assert record.accuracy is not None
        if record.accuracy >= gamma:
            needed.setdefault(record.round, record.datapoints)
        assert record.needed == needed.get(record.round)
    assert needed
    with pytest.raises(ValueError, match="gamma is an accuracy here, at most 1; got 75"):
        list(ml.play(scratch(), stream, gamma=75))


def test_loss_and_accuracy_by_hand() -> None:
    learner = ml.TOE(lambda: ml.models.mlp(4, 3, (8,)), ml.losses.cross_entropy, **SMALL)
    (task,) = labelled(1)
    *_, record = ml.play(learner, [task], reveal=3)
    prediction = learner.adapt()(task.test.x).detach()
    assert record.loss == pytest.approx(float(nn.functional.cross_entropy(prediction, task.test.y)), rel=1e-6)
    assert record.accuracy == pytest.approx(float((prediction.argmax(1) == task.test.y).float().mean()))


def test_several_numbers_of_steps() -> None:
    learner = ftml()
    (record,) = ml.play(learner, [STREAM[0]], reveal=7, steps=(5, 1, 10))
    assert set(record.more) == {"loss_1", "loss_10"}
    for steps, found in ((5, record.loss), (1, record.more["loss_1"]), (10, record.more["loss_10"])):
        prediction = learner.adapt(steps=steps)(STREAM[0].test.x).detach()
        expected = (prediction - STREAM[0].test.y).square().mean()
        assert found == pytest.approx(float(expected), rel=1e-6)
    (one,) = ml.play(ftml(), [STREAM[0]], reveal=7, steps=10)
    assert (one.loss, one.more) == (record.more["loss_10"], {})
    (record,) = ml.play(ml.FTL(ml.models.mlp(4, 3), ml.losses.cross_entropy, **SMALL), labelled(1), steps=(1, 5, 10))
    assert set(record.more) == {"loss_5", "accuracy_5", "loss_10", "accuracy_10"}


@pytest.mark.parametrize("hidden", [nn.Identity(), nn.Dropout(0.5)], ids=["together", "one by one"])
def test_parts_of_the_outputs(hidden: nn.Module) -> None:
    learner = ml.FTL(lambda: nn.Sequential(nn.Linear(2, 8), hidden, nn.Linear(8, 3)), ml.losses.squared_error, **SMALL)
    batch = Batch(oracles.normal("parts x", 5, 2).float(), oracles.normal("parts y", 5, 3).float())
    parts = {"first": slice(0, 1), "others": slice(1, 3)}
    (record,) = ml.play(learner, [ml.Task("a", batch, batch)], steps=(5, 1), parts=parts)
    assert set(record.more) == {"loss_1", "loss_first", "loss_others"}
    away = (learner.adapt(steps=5)(batch.x).detach() - batch.y).square()
    assert record.more["loss_first"] == pytest.approx(float(away[:, 0].mean()), rel=1e-5)
    assert record.more["loss_others"] == pytest.approx(float(away[:, 1:].mean()), rel=1e-5)
    assert record.loss == pytest.approx((record.more["loss_first"] + 2 * record.more["loss_others"]) / 3, rel=1e-5)


def test_parts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="cannot be named \\['10', 'task'\\]"):
        list(ml.play(Spy(), [line("a", 2)], steps=(5, 10), parts={"task": slice(0, 1), "10": slice(0, 1)}))
    with pytest.raises(ValueError, match="there is no part 'angle' \\(slice\\(1, 3, None\\)\\) of outputs \\(5, 1\\)"):
        list(ml.play(ftml(), STREAM, parts={"angle": slice(1, 3)}))


def test_a_net_with_batch_norm_reports_both_statistics() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU(), nn.Linear(6, 3))
    learner = ml.FTML(net, ml.losses.cross_entropy, support=2, **SMALL)
    (task,) = labelled(1)
    (record,) = ml.play(learner, [task], reveal=6)
    assert set(record.more) == {"loss_task", "accuracy_task"}
    nets = [learner.adapt(steps=5, statistics="batch"), learner.adapt(steps=5, statistics="task")]
    for net, found in zip(nets, (record.loss, record.more["loss_task"]), strict=True):
        prediction = net(task.test.x).detach()
        assert found == pytest.approx(float(nn.functional.cross_entropy(prediction, task.test.y)), rel=1e-5)
    assert record.loss != pytest.approx(record.more["loss_task"], rel=1e-3)


def test_the_loss_is_reported_without_smoothing() -> None:
    smooth = functools.partial(ml.losses.cross_entropy, smoothing=0.3)
    learner = ml.FTL(ml.models.mlp(4, 3), smooth, **SMALL)
    (task,) = labelled(1)
    (record,) = ml.play(learner, [task])
    prediction = learner.adapt(steps=5)(task.test.x).detach()
    plain = float(nn.functional.cross_entropy(prediction, task.test.y))
    assert record.loss == pytest.approx(plain, rel=1e-5)
    assert plain != pytest.approx(float(smooth(prediction, task.test.y).mean()), rel=1e-3)


def test_another_loss_to_report() -> None:
    def absolute(prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction - target).abs().mean()

    (record,) = ml.play(Spy(), [line("a", 2)], loss=absolute)
    assert record.loss == 10.0


def test_a_poisoned_test_set_changes_nothing_but_the_numbers() -> None:
    poisoned = [ml.Task(task.name, task.train, garbage(task.test)) for task in (STREAM[t] for t in range(3))]
    for regret in (False, True):
        results = []
        for stream in (STREAM, poisoned):
            learner = ftml()
            losses = [record.loss for record in ml.play(learner, stream, reveal=3, regret=regret)]
            results.append((losses, snapshot(learner)))
        assert all(one != other for one, other in zip(results[0][0], results[1][0], strict=True))
        assert not differences(results[0][1], results[1][1])


LEARNERS = {
    "ftml": ftml,
    "toe": lambda: ml.TOE(lambda: ml.models.mlp(1, 1, (6,)), ml.losses.squared_error, **SMALL),
    "ftl": lambda: ml.FTL(lambda: ml.models.mlp(1, 1, (6,)), ml.losses.squared_error, inner_lr=0.02, **SMALL),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_in_the_regret_protocol_a_round_is_played_with_what_came_before_it(name: str) -> None:
    """w_t is the same whatever task t's data, while the round lasts; and it is learned from afterwards."""
    stream = [STREAM[t] for t in range(3)]
    other = [*stream[:2], ml.Task("other", ml.Batch(stream[2].train.x, 3 - stream[2].train.y), stream[2].test)]
    before: list[Any] = []
    losses = []
    for tasks in (stream, other):
        learner = LEARNERS[name]()
        list(ml.play(learner, tasks[:2], reveal=3, regret=True))
        fixed = None
        for record in ml.play(learner, tasks, reveal=3, regret=True, start=2):
            fixed = fixed or snapshot(learner)["params"]
            assert not differences(fixed, learner.params), "w_t moved in the middle of its round"
            losses.append(record.loss)
        before.append(fixed)
        learner.begin("next")
        learner.update(10)
        before.append(snapshot(learner)["params"])
    assert not differences(before[0], before[2]), "w_t depends on the data of its own round"
    assert differences(before[1], before[3]), "the round's data is never learned from"
    if name != "toe":
        assert losses[:3] != losses[3:], "what is measured is adapted to the task's own data"


def test_in_the_online_protocol_the_learner_trains_before_it_is_measured() -> None:
    learner = ftml()
    start = snapshot(learner)["params"]
    next(ml.play(learner, STREAM, reveal=3))
    assert differences(start, learner.params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reveal": 0}, "reveal"),
        ({"reveals": 0}, "reveals"),
        ({"steps": ()}, "steps"),
        ({"steps": (-1,)}, "steps"),
        ({"stream": []}, "no tasks"),
        ({"stream": (task for task in STREAM)}, "pass a list of tasks, not an iterator"),
        ({"stream": [STREAM[0].train]}, r"stream\[0\] is a Batch, not a Task"),
        ({"start": len(STREAM) + 1}, f"start must be a round of the stream's {len(STREAM)} tasks"),
        ({"start": -1}, "start must be a round"),
    ],
)
def test_plays_that_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(ml.play(ftml(), **{"stream": STREAM, **options}))


def test_scratch_is_trained_in_the_regret_protocol() -> None:
    """It trains on the data of the round alone, in either protocol."""
    make = lambda: ml.Scratch(lambda: ml.models.mlp(1, 1, (8,)), ml.losses.squared_error, meta_lr=0.03, **SMALL)  # noqa: E731
    players = make(), make()
    online, regret = (list(ml.play(players[i], STREAM, reveal=3, regret=bool(i))) for i in range(2))
    assert [record.loss for record in regret] == [record.loss for record in online]
    assert {record.protocol for record in regret} == {"regret"}
    assert players[1].step == players[0].step == 2 * len(regret) > 0


def test_other_objects_play_side_by_side() -> None:
    """Two objects that are no `Learner` are told what one alone is told, and get the records of one alone."""
    streams = [[line("a", 3), line("b", 2)], [line("c", 3), line("d", 2)]]
    for regret in (False, True):
        alone = [Spy(), Spy()]
        expected = [list(ml.play(spy, stream, 2, regret=regret)) for spy, stream in zip(alone, streams, strict=True)]
        together = [Spy(), Spy()]
        records = list(play_together(together, streams, 2, regret=regret))
        assert [list(column) for column in zip(*records, strict=True)] == expected
        for one, other in zip(alone, together, strict=True):
            assert one.told == other.told


def test_a_learner_beside_another_object() -> None:
    learner, alone = ftml(), ftml()
    mixed = list(play_together([learner, Spy()], [STREAM, STREAM], 4))
    # Up to rounding: measured as one of several learners, and as one net.
    records, expected = [record for record, _ in mixed], list(ml.play(alone, STREAM, 4))
    assert [record.loss for record in records] == pytest.approx([record.loss for record in expected], rel=1e-6)
    assert [replace(record, loss=0.0) for record in records] == [replace(record, loss=0.0) for record in expected]
    assert not differences(learner.state_dict(), alone.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": "0.1"}, "gamma must be a number or None, got '0.1'"),
        ({"gamma": float("nan")}, "gamma must be a number or None, got nan"),
        ({"reveal": 2.5}, "reveal must be an integer of at least 1, got 2.5"),
        ({"reveals": 0}, "reveals must be an integer of at least 1, got 0"),
    ],
)
def test_options_that_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(ml.play(ftml(), STREAM, **options))


class Silent:
    begin = observe = adapt = staticmethod(lambda *args, **kwargs: None)


@pytest.mark.parametrize(
    ("learner", "options", "message"),
    [
        (Silent(), {}, r"a Silent has no loss; .*loss="),
        (Silent(), {"loss": ml.losses.squared_error, "regret": True}, "Silent cannot be played: it has no update"),
        (Constant(1.0), {}, "Constant cannot be played: it has no begin and no observe and no adapt"),
    ],
)
def test_objects_that_cannot_be_played(learner: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(ml.play(learner, STREAM, **options))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (pd.DataFrame({"x": [1.0], "y": [2.0]}), "got a DataFrame; make a stream with .*from_frame"),
        (pl.DataFrame({"x": [1.0], "y": [2.0]}), "got a DataFrame; make a stream with .*from_frame"),
        (
            torch.utils.data.TensorDataset(torch.ones(2)),
            "got a TensorDataset of torch; make a stream with .*from_dataset",
        ),
    ],
)
def test_frames_and_datasets_are_no_streams(stream: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(ml.play(ftml(), stream))


def test_tasks_of_arrays_with_one_target_per_row_are_played() -> None:
    x = np.linspace(-1, 1, 12)[:, None]
    stream = [ml.Task(name, ml.Batch(x, x[:, 0]), ml.Batch(x, x[:, 0])) for name in ("a", "b")]
    learner = ml.FTML(lambda: ml.models.mlp(1, 1, (4,)), ml.losses.squared_error, meta_steps=1, support=3, query=3)
    batch = ml.Batch(x, x)
    columns = [ml.Task(task.name, batch, batch) for task in stream]
    other = ml.FTML(lambda: ml.models.mlp(1, 1, (4,)), ml.losses.squared_error, meta_steps=1, support=3, query=3)
    assert list(ml.play(learner, stream, reveal=6)) == list(ml.play(other, columns, reveal=6))
