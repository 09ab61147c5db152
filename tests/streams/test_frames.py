"""Streams of data frames: the same from pandas and polars, and what is refused."""

import builtins
import datetime
import decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

import metaleader as ml
from metaleader.checks import check_stream
from metaleader.streams import from_frame

LIBRARIES = [pd.DataFrame, pl.DataFrame]


def columns(num=60) -> dict[str, Any]:
    """Rows of customers in turns; x1 is the number of the row."""
    draw = np.random.default_rng(0)
    customer = [f"c{i}" for i in draw.integers(4, size=num)]
    return {
        "customer": customer,
        "x1": np.arange(num),
        "x2": draw.standard_normal(num).astype(np.float32),
        "vip": draw.random(num) < 0.5,
        "y": draw.standard_normal(num) * 5,
        "region": ["north" if name in ("c0", "c3") else "south" for name in customer],
        "tier": [int(name[1]) // 2 for name in customer],
        "day": [datetime.date(2026, 1, 1) + datetime.timedelta(int(days)) for days in draw.permutation(num)],
        "kind": draw.choice(["low", "mid", "high"], num).tolist(),
        "test": draw.random(num) < 0.4,
    }


FEATURES = ["x1", "x2", "vip"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_task_per_group_in_order_of_first_appearance(library):
    data = columns()
    stream = from_frame(library(data), group="customer", target="y", features=FEATURES)
    check_stream(stream)
    assert list(stream.groups) == list(dict.fromkeys(data["customer"]))
    assert (stream.features, stream.targets, stream.labels) == (tuple(FEATURES), ("y",), None)
    for name, task in zip(stream.groups, stream, strict=True):
        rows = [i for i, customer in enumerate(data["customer"]) if customer == name]
        assert task.name == name
        assert task.test.x.shape == (round(0.2 * len(rows)), 3)
        assert sorted(task.train.x[:, 0].tolist() + task.test.x[:, 0].tolist()) == rows
        for part in (task.train, task.test):
            assert part.x.dtype == part.y.dtype == torch.float32
            kept = part.x[:, 0].long().tolist()
            assert kept == sorted(kept)
            assert torch.equal(part.x[:, 1], torch.from_numpy(data["x2"][kept]))
            assert torch.equal(part.x[:, 2], torch.from_numpy(data["vip"][kept]).float())
            assert torch.equal(part.y[:, 0], torch.from_numpy(data["y"][kept]).float())


def test_pandas_polars_and_pyarrow_like_frames_give_the_same_stream():
    options: Any = {"group": "customer", "target": "y", "features": FEATURES, "time": "day", "standardise": 2}
    one, other = (from_frame(library(columns()), **options) for library in LIBRARIES)
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip((*a.train, *a.test), (*b.train, *b.test), strict=True))
    assert one.statistics == other.statistics
    assert one.attributes == other.attributes


def test_what_is_held_out_depends_on_seed_and_group_alone():
    frame = pd.DataFrame(columns())

    def held_out(frame=frame, **options):
        stream = from_frame(frame, "customer", "y", features=["x1"], **options)
        return {task.name: task.test.x[:, 0].tolist() for task in stream}

    assert held_out() == held_out()
    assert held_out() != held_out(seed=1)
    assert held_out(order="random") == held_out()
    assert held_out(order=["c2", "c1"]) == {name: held_out()[name] for name in ("c2", "c1")}
    assert list(held_out(order=["c2", "c1"])) == ["c2", "c1"]
    assert len(held_out(held_out=0.5)["c1"]) > len(held_out()["c1"])


@pytest.mark.parametrize("library", LIBRARIES)
def test_by_time_the_last_rows_are_held_out(library):
    data = columns()
    stream = from_frame(library(data), "customer", "y", features=["x1"], time="day", held_out=0.3)
    days = [data["day"].index(min(day for day, c in zip(data["day"], data["customer"], strict=True) if c == name))
            for name in stream.groups]  # fmt: skip
    assert [data["day"][i] for i in days] == sorted(data["day"][i] for i in days)
    for task in stream:
        when = [data["day"][int(row)] for row in (*task.train.x[:, 0], *task.test.x[:, 0])]
        assert when == sorted(when)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_column_says_what_is_held_out(library):
    data = columns()
    stream = from_frame(library(data), "customer", "y", features=["x1"], held_out="test")
    for task in stream:
        assert not data["test"][task.train.x[:, 0].long()].any()
        assert data["test"][task.test.x[:, 0].long()].all()
    # Columns named by other arguments are no features.
    whole = from_frame(library(data).drop(columns=["region", "kind"]) if library is pd.DataFrame else
                       library(data).drop("region", "kind"), "customer", "y", time="day", held_out="test")  # fmt: skip
    assert whole.features == ("x1", "x2", "vip", "tier")


def test_standardised_columns():
    frame = pd.DataFrame(columns()).assign(constant=3.0)
    options: Any = {"features": [*FEATURES, "constant"]}
    raw = from_frame(frame, "customer", "y", **options)
    for num in (1, 4):
        stream = from_frame(frame, "customer", "y", standardise=num, **options)
        train = torch.cat([torch.cat([task.train.x, task.train.y], 1) for task in stream[:num]]).double()
        torch.testing.assert_close(train.mean(0), torch.zeros(5, dtype=torch.float64), atol=1e-5, rtol=0)
        expected = torch.tensor([1.0, 1, 1, 0, 1], dtype=torch.float64)
        torch.testing.assert_close(train.std(0, correction=0), expected, atol=1e-5, rtol=0)
        for part, values in (("x", raw[2].test.x), ("y", raw[2].test.y)):
            names = stream.features if part == "x" else stream.targets
            mean, deviation = (torch.tensor([stream.statistics[name][i] for name in names]) for i in (0, 1))
            torch.testing.assert_close(getattr(stream[2].test, part), (values - mean) / deviation)
    again = from_frame(frame, "customer", "y", standardise=stream.statistics, **options)
    assert torch.equal(again[1].train.x, stream[1].train.x)
    assert raw.statistics == {}
    labelled = from_frame(frame, "customer", "kind", standardise=4, **options)
    assert list(labelled.statistics) == options["features"]


def test_labels():
    data = columns()
    data["grade"] = np.where(np.arange(60) % 3 == 0, 7, 3)
    frame = pd.DataFrame(data)
    text = from_frame(frame, "customer", "kind", features=["x1"])
    assert text.labels == ("high", "low", "mid")
    stated = from_frame(frame, "customer", "kind", features=["x1"], labels=["low", "mid", "high"])
    assert stated.labels == ("low", "mid", "high")
    for stream in (text, stated):
        for task in stream:
            assert task.train.y.dtype == torch.int64
            known: Any = stream.labels
            rows = task.train.x[:, 0].long().tolist()
            assert [known[i] for i in task.train.y.tolist()] == [data["kind"][row] for row in rows]
    assert from_frame(frame, "customer", "vip", features=["x1"]).labels == (False, True)
    grades = from_frame(frame, "customer", "grade", features=["x1"], labels=[7, 3])
    assert grades[0].train.y.tolist() == [int(x) % 3 != 0 for x in grades[0].train.x[:, 0]]
    assert from_frame(frame, "customer", "grade", features=["x1"]).labels is None
    both = from_frame(frame, "customer", ["y", "grade"], features=["x1"])
    assert both[0].train.y.shape[1] == 2
    categories = from_frame(frame.assign(kind=frame["kind"].astype("category")), "customer", "kind", features=["x1"])
    assert categories.labels == text.labels


def test_orders_by_columns_that_are_constant_within_groups():
    frame = pd.DataFrame(columns())
    stream = from_frame(frame, "customer", "y", features=["x1"], order="tier")
    assert set(stream.attributes) == {"region", "tier"}
    assert stream.attributes["tier"] == sorted(stream.attributes["tier"])
    assert dict(zip(stream.groups, stream.attributes["region"], strict=True)) == {
        "c0": "north",
        "c3": "north",
        "c1": "south",
        "c2": "south",
    }
    assert stream[1:].attributes["tier"] == stream.attributes["tier"][1:]
    grouped = from_frame(frame, "customer", "y", features=["x1"], order="recurring:region").attributes["region"]
    assert grouped in (["north", "south"] * 2, ["south", "north"] * 2)
    with pytest.raises(ValueError, match="did you mean 'region'"):
        from_frame(frame, "customer", "y", features=["x1"], order="regions")


def test_a_frame_plays():
    stream = from_frame(pl.DataFrame(columns()), "customer", "y", features=FEATURES, standardise=1)
    learner = ml.FTML(lambda: ml.models.mlp(3, 1, (4,)), ml.losses.squared_error, meta_steps=1, support=2, query=2)
    records = list(ml.play(learner, stream, reveal=5))
    assert {record.task for record in records} == {"c0", "c1", "c2", "c3"}


def changed(**change: Any) -> dict[str, Any]:
    data = columns() | change
    return {name: values for name, values in data.items() if values is not None}


def replaced(name: str, row: int, value: Any) -> dict[str, Any]:
    values = list(columns()[name])
    values[row] = value
    return changed(**{name: values})


REFUSED: list[Any] = [
    (changed(y=None), {}, "no column 'y'. Its columns are 'customer'"),
    (changed(), {"target": "regions"}, "no column 'regions'; did you mean 'region'"),
    (changed(), {"features": ["x1", "x1"]}, "'x1' is given twice"),
    (changed(), {"features": ["x1", "y"]}, "'y' is the group, target or held-out column"),
    (changed(), {"features": ["customer"]}, "'customer' is the group, target or held-out column"),
    (changed(), {"features": None}, "numbers or booleans: 'region' has dtype String, 'day' .*, 'kind' .*features="),
    (replaced("x2", 17, float("nan")), {}, r"'x2' has .* in row 17 \(group 'c\d'\); drop"),
    (replaced("x2", 17, None), {}, r"'x2' has .* in row 17 \(group 'c\d'\); drop"),
    (replaced("x2", 17, float("inf")), {}, "'x2' has the value inf in row 17"),
    (replaced("y", 5, None), {}, r"'y' has .* in row 5 \(group"),
    (replaced("y", 5, 1e300), {}, "'y' holds 1e[+]300 in row 5 .*, too large for float32"),
    (replaced("customer", 8, None), {}, "'customer' has no value in row 8; every row needs a group"),
    (replaced("customer", 8, "new"), {}, "group 'new' of column 'customer' has 1 row: row 8 "),
    (replaced("day", 8, None), {"time": "day"}, "'day' has no value in row 8"),
    (replaced("test", 8, None), {"held_out": "test"}, "'test' has no value in row 8|takes booleans"),
    (changed(test=[name == "c1" for name in columns()["customer"]]), {"held_out": "test"}, "'test' is (true|false) in"),
    (changed(), {"held_out": "x1"}, "'x1' has dtype Int64; held_out takes booleans"),
    (changed(), {"held_out": 1.0}, "held_out must lie between 0 and 1"),
    (changed(), {"seed": -1}, "seed"),
    (changed(), {"order": ["c1", "c9"]}, "'c9' is not in column 'customer'"),
    (changed(), {"order": ["c1", "c1"]}, "a group is given twice"),
    (changed(), {"order": "sorted"}, "order must be one of given, random, region, tier, similar"),
    (changed(), {"standardise": 5}, r"number of first tasks in 0\.\.4"),
    (changed(), {"standardise": True}, "number of first tasks"),
    (changed(), {"standardise": {"x9": (0, 1)}}, "'x9', which is no column of numbers"),
    (changed(), {"standardise": {"x1": (0, 0)}}, "'x1' has .*positive"),
    (changed(), {"target": "kind", "labels": ["low", "mid"]}, "'kind' holds 'high' in row"),
    (changed(), {"target": "kind", "labels": ["low"]}, "two or more different labels"),
    (changed(), {"target": ["kind", "y"]}, "must be one column"),
    (changed(), {"target": "day"}, "targets must be numbers or booleans: 'day'"),
    (changed(), {"target": []}, "there are none"),
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("data", "options", "message"), REFUSED)
def test_refused(library, data, options, message):
    options = {"group": "customer", "target": "y", "features": FEATURES} | options
    with pytest.raises(ValueError, match=message):
        from_frame(library(data), **options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([*range(30), "n/a", *range(29)], r"'x1' mixes int and str: row 30 .* holds 'n/a', row 0 .* holds 0"),
        ([decimal.Decimal(1)] * 60, "'x1' has dtype Object of Decimal; encode"),
    ],
)
def test_columns_of_python_objects(values, message):
    frame = pd.DataFrame(changed(x1=values))
    with pytest.raises(ValueError, match=message):
        from_frame(frame, "customer", "y", features=FEATURES)
    with pytest.raises(ValueError, match=r"dtype Object|mixes"):
        from_frame(frame, "customer", "x1", features=["x2"])


def test_groups_that_look_alike():
    frame = pd.DataFrame({"g": pd.Series([1, "1"] * 4, dtype=object), "x": range(8), "y": range(8)})
    with pytest.raises(ValueError, match="different groups of the same text"):
        from_frame(frame, "g", "y")


def test_rows_of_groups_that_are_not_used_may_be_wrong():
    data = replaced("x2", 17, float("nan"))
    others = [f"c{i}" for i in range(4) if f"c{i}" != data["customer"][17]]
    stream = from_frame(pl.DataFrame(data), "customer", "y", features=FEATURES, order=others)
    assert list(stream.groups) == others


def test_frames_that_are_none(monkeypatch):
    for frame, message in (
        ({"customer": [1]}, "got dict; for arrays, use metaleader.streams.ArrayStream"),
        (pl.DataFrame(columns()).lazy(), "got LazyFrame; call its method collect"),
        (pd.DataFrame([[1, 2, 3]], columns=pd.Index(["customer", "y", "y"])), "columns of the same name"),
        (pl.DataFrame({"customer": [], "y": [], "x1": []}), "no rows"),
    ):
        with pytest.raises(ValueError, match=message):
            from_frame(frame, "customer", "y")
    original = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("narwhals"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install 'metaleader\[frames\]'"):
        from_frame(pd.DataFrame(columns()), "customer", "y")
