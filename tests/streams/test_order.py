"""Orders of tasks, against their definitions."""

import itertools

import numpy as np
import pytest
import torch

import metaleader as ml
from metaleader.streams import PoseStream, QuadraticStream, SinusoidStream, make_stream, rainbow_digits, reorder
from metaleader.streams.order import arrange


def tasks(num):
    x = torch.zeros(2, 1)
    return [ml.Task(str(t), ml.Batch(x, x), ml.Batch(x, x)) for t in range(num)]


def order_of(stream, order, attributes=None, seed=0):
    return [int(task.name) for task in reorder(stream, order, seed, attributes)]


def test_given_random_and_lists():
    stream = tasks(20)
    assert order_of(stream, "given") == list(range(20))
    orders = [order_of(stream, "random", seed=seed) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(20))
    assert order_of(stream, [3, 1, 3, -1]) == [3, 1, 3, 19]


def test_by_an_attribute():
    attributes = {"size": [3, 1, 2, 1], "kind": ["b", "a", "b", "c"]}
    assert order_of(tasks(4), "size", attributes) == [1, 3, 2, 0]
    # Text in the order of its first appearance.
    assert order_of(tasks(4), "kind", attributes) == [0, 2, 1, 3]


def test_similar_is_a_path_of_nearest_neighbours():
    draw = np.random.default_rng(0)
    values = {"a": draw.standard_normal(30).tolist(), "b": list(draw.choice(["x", "y"], 30))}
    assert order_of(tasks(30), "similar:a", values) == order_of(tasks(30), "a", values)
    path = order_of(tasks(30), "similar", values)
    assert sorted(path) == list(range(30))
    spread = np.std(values["a"])

    def distance(i, j):
        return abs(values["a"][i] - values["a"][j]) / spread + (values["b"][i] != values["b"][j])

    for i, (here, following) in enumerate(itertools.pairwise(path)):
        assert distance(here, following) <= min(distance(here, other) for other in path[i + 1 :]) + 1e-12


def test_drifting_is_between_sorted_and_random():
    values = {"a": np.random.default_rng(0).permutation(200).tolist()}
    ranks = np.array(values["a"])[order_of(tasks(200), "drifting", values)]
    assert sorted(ranks) == list(range(200))
    assert 0.9 < np.corrcoef(ranks, np.arange(200))[0, 1] < 0.999
    assert order_of(tasks(200), "drifting", values) == order_of(tasks(200), "drifting:a", values)
    assert order_of(tasks(200), "drifting", values, seed=1) != order_of(tasks(200), "drifting", values)


def test_recurring_comes_back_to_every_group():
    kinds = ["a", "b", "a", "c", "b", "a", "a", "c", "b"]
    order = order_of(tasks(9), "recurring", {"kind": kinds})
    assert sorted(order) == list(range(9))
    assert order == [0, 2, 1, 4, 3, 5, 6, 8, 7]
    # Many values: quarters of the range.
    values = np.random.default_rng(0).random(16)
    order = order_of(tasks(16), "recurring:a", {"b": list(range(16)), "a": values.tolist()})
    quarters = np.argsort(np.argsort(values))[order] // 4
    assert quarters.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    for few in range(1, 4):
        assert sorted(order_of(tasks(few), "recurring", {"a": list(range(few))})) == list(range(few))


@pytest.mark.parametrize(
    ("order", "attributes", "message"),
    [
        ("color", {"colour": [1, 2]}, "must be one of given, random, colour, similar, .*did you mean 'colour'"),
        ("drifting:color", {"colour": [1, 2]}, "got 'drifting:color' .*did you mean 'colour'.*drifting:colour"),
        ("colour:drifting", {"colour": [1, 2]}, "got 'colour:drifting'"),
        ("recurring", {}, "got 'recurring'; the stream has no attributes for other orders"),
        ("colour", {"colour": [1, 2, 3]}, "'colour' has 3 values for 2 tasks"),
        ([0, 2], {}, "round 2 of a stream of 2 tasks"),
    ],
)
def test_unknown_orders(order, attributes, message):
    with pytest.raises((ValueError, IndexError), match=message):
        reorder(tasks(2), order, 0, attributes)
    with pytest.raises(ValueError, match="seed"):
        reorder(tasks(2), "random", -1)


def test_every_stream_takes_the_orders():
    rainbow = make_stream("rainbow-digits", order="recurring:colour")
    colours = [colour for colour, _ in itertools.groupby(rainbow.attributes["colour"])]
    assert colours == ["red", "orange", "yellow", "green", "blue", "indigo", "violet"] * 2
    assert len({task.name for task in rainbow_digits(order="similar")}) == 56
    sinusoid = SinusoidStream(tasks=8, order="phase")
    assert sinusoid.attributes["phase"] == sorted(SinusoidStream(tasks=8).attributes["phase"])
    assert [task.name for task in sinusoid] == [task.name for task in reorder(SinusoidStream(tasks=8), "phase")]
    views = PoseStream(order="drifting:azimuth").views
    assert set(views) == set(PoseStream().views)
    assert views != PoseStream().views
    scales = reorder(QuadraticStream(tasks=6), "scale").attributes["scale"]
    assert scales == sorted(scales)


def test_arrangements_are_permutations_of_any_attributes():
    draw = np.random.default_rng(1)
    for num in range(1, 12):
        attributes = {"a": draw.integers(3, size=num).tolist(), "b": list(draw.choice(["x", "y", "z"], num))}
        for order in ("a", "b", "similar", "similar:b", "drifting", "drifting:b", "recurring", "recurring:b"):
            assert sorted(arrange(order, attributes, 0, others=())) == list(range(num)), (num, order)
