"""The means of a history, against means of everything that was added; bounded, and restored from its file."""

import json
import logging
import random

import numpy as np
import pytest

from metaleader.live.serve.history import COLUMNS, NAME, History


def filled(history, observations, seed=0):
    draw, added = random.Random(seed), []
    for _ in range(observations):
        number = int(draw.random() ** 2 * 700)
        one = (draw.randint(1, 4), draw.random(), 1 + draw.random(), draw.choice([0, 1, 4, 5, 19, 20, 1000]), number)
        history.add(f"task {number}", *one)
        added.append(one)
    return added


@pytest.mark.parametrize("observations", [1, 99, 100, 101, 2345])
def test_means_are_those_of_the_blocks(observations):
    history = History()
    added = filled(history, observations)
    curves = history.curves()
    size = 1
    while -(-observations // size) > 100:
        size *= 2
    blocks = [added[i : i + size] for i in range(0, observations, size)]
    assert len(curves["observations"]) == len(blocks) <= 100
    for (end, loss, unadapted, _), block, i in zip(curves["observations"], blocks, range(1000), strict=False):
        rows = [one[0] for one in block]
        assert end == min((i + 1) * size, observations)
        assert loss == pytest.approx(np.average([one[1] for one in block], weights=rows))
        assert unadapted == pytest.approx(np.average([one[2] for one in block], weights=rows))
    assert history.totals()[0] == sum(one[0] for one in added)
    last = max(one[4] for one in added)
    width = 1
    while last // width >= 100:
        width *= 2
    assert len(curves["tasks"]) <= 100
    for start, *means in curves["tasks"]:
        for column, mean in enumerate(means):
            low, high = COLUMNS[column], [*COLUMNS, 10**9][column + 1]
            some = [one for one in added if start <= one[4] < start + width and low <= one[3] < high]
            if mean is None:
                assert some == []
            else:
                assert mean == pytest.approx(np.average([s[1] for s in some], weights=[s[0] for s in some]))


def test_the_file_continues(tmp_path):
    history, whole = History(tmp_path), History()
    filled(history, 500)
    filled(whole, 500)
    history.save()
    again = History(tmp_path)
    filled(again, 77, seed=1)
    filled(whole, 77, seed=1)

    def values(one):
        curves = one.curves()
        return [row[:3] for row in curves["observations"]], curves["tasks"], one.totals()

    assert values(again) == values(whole)
    assert "task" not in json.dumps(json.loads((tmp_path / NAME).read_text())["cells"])
    assert "task 1" not in (tmp_path / NAME).read_text()


def test_the_latest_tasks_are_listed():
    history = History()
    for i in range(60):
        history.add(f"task {i}", 1, 0.5, 0.5, 0, i)
    history.add("task 20", 1, 0.25, 0.5, 1, 20)
    assert [name for name, _ in history.recent()][:3] == ["task 20", "task 59", "task 58"]
    assert len(history.recent()) == 50
    history.forget("task 59")
    history.forget("nothing")
    assert [name for name, _ in history.recent()][:2] == ["task 20", "task 58"]


def test_losses_that_are_not_finite_are_left_out():
    history = History()
    history.add("a", 1, float("nan"), 1.0, 0, 0)
    history.add("a", 1, 1.0, float("inf"), 0, 0)
    assert history.totals()[0] == 0
    assert history.curves()["skipped"] == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: b"{",
        lambda state: b"[]",
        lambda state: json.dumps({**state, "format": 2}).encode(),
        lambda state: json.dumps({**state, "count": 7}).encode(),
        lambda state: json.dumps({**state, "size": 0}).encode(),
        lambda state: json.dumps({**state, "blocks": [[1, 2]]}).encode(),
        lambda state: json.dumps({**state, "blocks": [[0, 0.0, 0.0, 0.0]]}).encode(),
        lambda state: json.dumps({**state, "cells": [[0, 0, 0, 0, 0]]}).encode(),
        lambda state: json.dumps({**state, "cells": [[0, 9, 1, 1, 1]]}).encode(),
        lambda state: json.dumps({k: v for k, v in state.items() if k != "tasks"}).encode(),
    ],
)
def test_a_damaged_file_is_not_read(damage, tmp_path, caplog):
    history = History(tmp_path)
    history.add("a", 1, 0.5, 0.5, 0, 0)
    history.save()
    path = tmp_path / NAME
    path.write_bytes(damage(json.loads(path.read_bytes())))
    with caplog.at_level(logging.WARNING):
        again = History(tmp_path)
    assert "is not read" in caplog.text
    again.add("a", 1, 0.5, 0.5, 0, 0)
    assert again.curves()["observations"][0][:3] == [1, 0.5, 0.5]
