"""Support sizes drawn per task: the update is the mean over tasks of gradients with as many datapoints as drawn."""

import copy
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from torch import nn

import metaleader as ml
from metaleader.checks import check_learner
from metaleader.evaluate import play_together
from metaleader.learners.update import draw_meta_batches, gather
from metaleader.tasks import rng

SETTINGS: Any = {"meta_steps": 2, "tasks_per_step": 5, "query": 3, "inner_lr": 0.1, "inner_steps": 2, "meta_lr": 0.5}
SIZES = (1, 2, 4, 8)


def net():
    """Batch norm: with it, weights of datapoints would not be enough."""
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    return nn.Sequential(nn.Linear(3, 6), norm, nn.Tanh(), nn.Linear(6, 2)).double()


def learner(support, loss=ml.losses.squared_error, **settings):
    options = SETTINGS | {"optimizer": torch.optim.SGD} | settings
    made = ml.FTML(net, loss, support=support, **options)
    for t in range(3):
        made.begin(f"task {t}")
        made.observe(oracles.normal(f"x {t}", 14, 3), oracles.normal(f"y {t}", 14, 2), update=False)
    return made


def sizes_of(made, step):
    """The number of different datapoints of each support set of an update, and its draw."""
    draw = draw_meta_batches(made, [step])
    assert draw is not None
    return [len(set(rows)) for rows in draw.support[0].tolist()], draw.at(0)


def test_an_update_is_the_mean_over_tasks_with_as_many_datapoints():
    made = learner(SIZES)
    sizes, draw = sizes_of(made, 0)
    assert len(set(sizes)) > 2
    support, query = made.memory.gather(draw)
    before, total = copy.deepcopy(made.params), {}
    for i, size in enumerate(sizes):
        one = ml.Batch(support.x[i : i + 1, :size], support.y[i : i + 1, :size])
        other = ml.Batch(query.x[i : i + 1], query.y[i : i + 1])
        _, gradient = ml.meta_gradient(made.loss_fn, before, one, other, 0.1, 2)
        total = {name: total.get(name, 0) + value / len(sizes) for name, value in gradient.items()}
    made.update(1)
    for name, value in before.items():
        torch.testing.assert_close(made.params[name], value - 0.5 * total[name], rtol=1e-9, atol=1e-12)


def test_sizes_are_drawn_with_equal_probability():
    made = learner(SIZES, tasks_per_step=20)
    drawn = np.concatenate([sizes_of(made, step)[0] for step in range(100)])
    counts = np.array([(drawn == size).sum() for size in SIZES])
    assert counts.sum() == 2000
    assert abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)


@pytest.mark.parametrize("engine", ["eager", pytest.param("compiled", marks=pytest.mark.torture)])
def test_one_size_is_ftml_bit_for_bit(engine):
    one, other = learner((8,), engine=engine), learner(8, engine=engine)
    one.update(3)
    other.update(3)
    assert torch.equal(one.state.flat, other.state.flat)


@pytest.mark.torture
def test_compiled_is_eager():
    one, other = learner(SIZES, engine="compiled"), learner(SIZES)
    one.update(3)
    other.update(3)
    assert one.engine.mode == "compiled"
    torch.testing.assert_close(one.state.flat, other.state.flat, rtol=1e-8, atol=1e-10)


def test_the_contract():
    settings = SETTINGS | {"tasks_per_step": 2, "meta_lr": 1e-3, "meta_steps": 1}
    check_learner(
        lambda: ml.FTML(lambda: ml.models.mlp(1, 1, (6,)), ml.losses.squared_error, support=(1, 4), **settings),
        ml.streams.SinusoidStream(tasks=2, train=20),
    )


def test_n_way_support_sets_stay_balanced():
    made = ml.FTML(lambda: nn.Linear(4, 2), ml.losses.cross_entropy, support=(2, 4, 8), **(SETTINGS | {"query": 2}))
    stream = [
        ml.Task(str(t), ml.Batch(x[:24], y[:24]), ml.Batch(x[24:], y[24:]), classes=(2 * t, 2 * t + 1))
        for t in range(3)
        for x, y in [(torch.from_numpy(rng("x", t).standard_normal((30, 4))).float(), torch.arange(30) % 2)]
    ]
    for _ in play_together([made], [stream], 12):
        pass
    draws = [draw_meta_batches(made, [step]) for step in range(20)]
    seen = set()
    for draw in draws:
        assert draw is not None
        assert draw.support_y is not None
        for rows, labels in zip(draw.support[0].tolist(), draw.support_y[0].tolist(), strict=True):
            pairs = set(zip(rows, labels, strict=True))
            seen.add(len(pairs))
            assert [label for _, label in pairs].count(0) == len(pairs) / 2
            assert labels.count(0) == 4
    assert seen == {2, 4, 8}


def test_a_file_holds_the_sizes(tmp_path):
    made = learner(SIZES, optimizer="adam")
    made.update(2)
    made.save(tmp_path / "learner.safetensors")
    loaded = ml.FTML.load(tmp_path / "learner.safetensors", net, ml.losses.squared_error)
    assert loaded.options.support == SIZES
    made.update(2)
    loaded.update(2)
    assert torch.equal(made.state.flat, loaded.state.flat)


@pytest.mark.parametrize("sizes", [(1, 3, 8), (0, 4), (), (2.0, 4), "ab"])
def test_sizes_that_do_not_divide_the_largest_are_refused(sizes):
    with pytest.raises(ValueError, match="support"):
        learner(sizes)


def test_sums_over_datapoints_are_refused():
    learner(SIZES, loss=lambda p, y: (p - y).square().mean())  # a mean is fine
    with pytest.raises(ValueError, match=r"support=\[1, 2, 4, 8\] needs a loss and an adaptation that are means"):
        learner(SIZES, loss=lambda p, y: (p - y).square().sum())


def test_repetitions_count_once_for_the_bayesian_head():
    settings: Any = {"support": (1, 4), "query": 3, "adaptation": ml.BayesianHead()}
    head = ml.FTML(nn.Linear(3, 2), ml.losses.squared_error, **settings)
    head.begin("a")
    head.observe(oracles.normal("x", 9, 3).float(), oracles.normal("y", 9, 2).float(), update=False)
    draw = draw_meta_batches(head, [0])
    assert draw is not None
    support, _ = gather(head, draw)
    assert set(support.weights[0].sum(-1).tolist()) == {1.0, 4.0}


def test_a_size_that_is_no_multiple_of_the_classes_is_refused():
    made = ml.FTML(lambda: nn.Linear(4, 2), ml.losses.cross_entropy, support=(1, 4), **(SETTINGS | {"query": 2}))
    made.begin("a", classes=[0, 1])
    with pytest.raises(ValueError, match="support must be a multiple of the 2 classes of a task, got 1"):
        made.observe(torch.rand(8, 4), torch.arange(8) % 2)


def test_a_bad_task_is_set_aside_with_drawn_sizes():
    made = learner(SIZES, meta_lr=1e-3)
    made.observe(*(torch.full((14, size), 1e200, dtype=torch.float64) for size in (3, 2)), task="bad", update=False)
    made.update(2)
    assert list(made.set_aside) == ["bad"]
