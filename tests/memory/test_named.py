"""Data stored under names, in any order, beside rounds of `begin`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metaleader.checks.trees import differences
from metaleader.memory.by_class import ClassBuffer
from metaleader.memory.by_task import TaskBuffer
from metaleader.memory.limits import Limits
from metaleader.tasks import Batch


def batch(first: int, num: int) -> Batch:
    return Batch(torch.arange(first, first + num), torch.arange(first, first + num) * 2)


def values(found: Batch | None) -> list[int]:
    assert found is None or torch.equal(found.y, found.x * 2)
    return [] if found is None else found.x.tolist()


def drawn(buffer: TaskBuffer, which: Any = "all", num: int = 40) -> list[list[int]]:
    """The datapoints of each task drawn."""
    draw = buffer.draw(3, range(num), 5, 2, 2, which)
    if draw is None:
        return []
    support, query = buffer.gather(draw)
    return torch.cat([support.x, query.x], -1).flatten(0, 1).tolist()


def test_draws_are_those_of_contiguous_tasks() -> None:
    """In turns or at once, the same datapoints of the same tasks are drawn."""
    turns, at_once = TaskBuffer(), TaskBuffer()
    pieces = [(0, 2), (1, 5), (2, 2), (0, 3), (2, 1), (0, 1), (1, 4)]
    data: dict[int, list[Batch]] = {}
    for first, (name, num) in enumerate(pieces):
        data.setdefault(name, []).append(batch(100 * first, num))
        turns.append(data[name][-1], task=str(name))
    for name, batches in data.items():
        at_once.append(Batch(*(torch.cat(part) for part in zip(*batches, strict=True))), task=str(name))
    assert len(turns) == len(at_once) == 3
    assert drawn(turns) == drawn(at_once)
    assert turns.sizes() == at_once.sizes() == {"0": 6, "1": 9, "2": 3}
    assert [turns.size(name) for name in ("0", "1", "2", "none")] == [6, 9, 3, 0]
    assert [turns.number(name) for name in ("0", "1", "2", "none")] == [0, 1, 2, 3]


def test_a_single_datapoint_is_kept_and_not_drawn_until_a_second_one_comes() -> None:
    buffer = TaskBuffer()
    buffer.append(batch(0, 1), task="single")
    assert buffer.draw(0, [0], 5, 1, 1) is None
    buffer.append(batch(10, 4), task="other")
    assert {x for row in drawn(buffer) for x in row} == {10, 11, 12, 13}
    assert values(buffer.named("single")) == [0]
    assert buffer.sizes() == {"single": 1, "other": 4}
    buffer.append(batch(20, 1), task="single")
    assert {x for row in drawn(buffer) for x in row} == {0, 20, 10, 11, 12, 13}
    buffer.begin("a round")  # rounds are drawn from the first datapoint on
    buffer.append(batch(30, 1))
    assert 30 in {x for row in drawn(buffer) for x in row}


def test_the_open_round_stays_and_its_closed_rounds_are_merged() -> None:
    buffer = TaskBuffer()
    for first in (0, 10, 20):
        buffer.begin("a")
        buffer.append(batch(first, 2))
    buffer.append(batch(30, 2), task="a")
    assert values(buffer.current()) == [20, 21]
    assert len(buffer) == 2
    buffer.append(batch(40, 1))
    assert values(buffer.current()) == [20, 21, 40]
    assert {x for row in drawn(buffer, "past") for x in row} == {0, 1, 10, 11, 30, 31}
    assert {x for row in drawn(buffer, "current") for x in row} == {20, 21, 40}
    assert sorted(values(buffer.named("a"))) == [0, 1, 10, 11, 20, 21, 30, 31, 40]
    buffer.begin("b")
    buffer.append(batch(50, 1), task="a")
    assert len(buffer) == 1
    assert buffer.current() is None


@pytest.mark.parametrize("which", ["all", "past"])
def test_every_task_is_drawn_as_often(which: Any) -> None:
    buffer = TaskBuffer()
    buffer.append(batch(0, 3), task="a")
    buffer.begin("round")
    buffer.append(batch(1000, 30))
    for i in range(1, 4):
        buffer.append(batch(100 * i, 2), task=str(i))
    owners = np.array([row[0] // 100 for row in drawn(buffer, which, 400)])
    expected = [0, 1, 2, 3] + ([10] if which == "all" else [])
    assert set(owners.tolist()) == set(expected)
    counts = np.array([(owners == owner).sum() for owner in expected])
    assert ((counts - 2000 / len(expected)) ** 2 / (2000 / len(expected))).sum() < 30


def test_weights_are_by_the_first_datapoint() -> None:
    """Task 1 was first seen second, and is drawn only since its second datapoint."""
    buffer = TaskBuffer(weights=lambda num: np.arange(1.0, num + 1))
    for name, num in (("0", 2), ("1", 1), ("2", 2), ("1", 1)):
        buffer.append(batch(100 * int(name) + (50 if name == "1" and num == 1 else 0), num), task=name)
    owners = np.array([row[0] // 100 for row in drawn(buffer, num=1000)])
    shares = [(owners == i).mean() for i in range(3)]
    np.testing.assert_allclose(shares, [1 / 6, 2 / 6, 3 / 6], atol=0.03)


# Random sequences of calls against lists by name.

NAMES = ["a", "b", "c", "d"]
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("round"), st.just(""), st.integers(1, 3)),
        st.tuples(st.just("task"), st.sampled_from(NAMES), st.integers(1, 3)),
        st.tuples(st.just("refused"), st.sampled_from(["", *NAMES]), st.integers(1, 3)),
        st.tuples(st.just("forget"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("reload"), st.just(""), st.integers(0, 1)),
    ),
    max_size=25,
)


class Lists:
    """The slow, obvious memory: lists of datapoints, and which round each belongs to."""

    def __init__(self) -> None:
        self.data: list[tuple[str, int, int]] = []  # name, round, value
        self.round, self.open = 0, ""

    def current(self) -> list[int]:
        return [value for _, number, value in self.data if self.open and number == self.round]


def play(buffer: TaskBuffer, calls: Sequence[tuple[str, str, int]], first: int = 0) -> tuple[TaskBuffer, Lists]:
    lists = Lists()
    for kind, name, num in calls:
        first += 10
        new = batch(first, num)
        if kind == "begin":
            buffer.begin(name)
            lists.open, lists.round = name, lists.round + 1
        elif kind == "forget" and name in buffer.sizes():
            buffer.forget(name)
            lists.data = [item for item in lists.data if item[0] != name]
        elif kind == "reload":
            other = TaskBuffer(limits=buffer.limits)
            if num:  # the data is present already
                other.load_state_dict(buffer.state_dict())
            other.load_state_dict(buffer.state_dict(data=not num))
            assert not differences(buffer.state_dict(), other.state_dict())
            buffer = other
        elif kind == "task" or (kind == "round" and lists.open):
            mark = buffer.mark()
            buffer.append(new, task=name or None)
            lists.data += [(name or lists.open, 0 if name else lists.round, int(x)) for x in new.x]
        elif kind == "refused" and (name or lists.open):
            mark, before = buffer.mark(), buffer.state_dict()
            buffer.append(new, task=name or None)
            buffer.rollback(mark)
            assert not differences(before, buffer.state_dict())
    return buffer, lists


@given(CALLS)
def test_any_sequence_of_calls(calls: list[tuple[str, str, int]]) -> None:
    buffer, lists = play(TaskBuffer(), calls)
    names = {name for name, _, _ in lists.data}
    assert buffer.sizes() == {name: sum(item[0] == name for item in lists.data) for name in names}
    for name in names:
        assert sorted(values(buffer.named(name))) == sorted(value for n, _, value in lists.data if n == name)
    assert values(buffer.current()) == lists.current()
    assert buffer.num_datapoints == len(lists.data) == sum(buffer.counts())
    for which in ("all", "past", "current"):
        rows, current = drawn(buffer, which, 4), set(lists.current())
        owner = {value: (name, value in current) for name, _, value in lists.data}
        assert all(len({owner[value] for value in row}) == 1 for row in rows)
        assert which != "past" or not current & {value for row in rows for value in row}


@given(CALLS)
def test_a_state_draws_as_its_buffer(calls: list[tuple[str, str, int]]) -> None:
    """And goes on alike, with the layout of a file or its own."""
    buffer, _ = play(TaskBuffer(), calls)
    other = TaskBuffer()
    other.load_state_dict(buffer.state_dict())
    for one in (buffer, other):
        one.append(batch(7000, 2), task="c")
        one.begin("d")
        one.append(batch(8000, 2), task="d")
    assert drawn(buffer) == drawn(other)
    assert not differences(buffer.state_dict(), other.state_dict())


@given(CALLS, st.integers(2, 4))
def test_a_bounded_memory(calls: list[tuple[str, str, int]], most: int) -> None:
    buffer, _ = play(TaskBuffer(limits=Limits(max_tasks=most)), calls)
    assert len(buffer) <= most
    assert all(min(row) >= 0 for row in drawn(buffer))
    for name, size in buffer.sizes().items():
        assert len(values(buffer.named(name))) == size


def test_the_task_that_was_not_observed_for_longest_is_dropped() -> None:
    buffer = TaskBuffer(limits=Limits(max_tasks=3))
    for first, name in enumerate(["a", "b", "c", "a", "d", "e"]):
        buffer.append(batch(10 * first, 2), task=name)
    assert set(buffer.sizes()) == {"a", "d", "e"}
    assert len(values(buffer.named("a"))) == 4
    with pytest.raises(
        ValueError, match=r"no data of task 'b'; tasks with data: .*; 2 tasks were dropped by max_tasks=3"
    ):
        buffer.named("b")


def test_what_was_taken_before_a_task_is_forgotten_stays() -> None:
    buffer = TaskBuffer()
    for i in range(8):
        buffer.append(batch(10 * i, 3), task=str(i))
    taken, state = buffer.named("1"), buffer.state_dict()
    for i in range(7):
        buffer.forget(str(i))
    assert values(taken) == [10, 11, 12]
    assert state["data"]["x"].tolist() == [10 * i + j for i in range(8) for j in range(3)]
    assert buffer.state_dict()["data"]["x"].tolist() == [70, 71, 72]
    assert buffer.store.data is not None
    assert len(buffer.store.data.x) < 12  # the rows of the others are gone
    buffer.forget("7")
    assert buffer.store.data is None
    with pytest.raises(ValueError, match="no data of task '7'; tasks with data: none yet"):
        buffer.forget("7")


def test_an_unknown_name_is_a_short_error() -> None:
    buffer = TaskBuffer()
    for i in range(1000):
        buffer.append(batch(i, 1), task=f"customer {i} " + "x" * 500)
    with pytest.raises(
        ValueError, match=r"no data of task 'nobody'; tasks with data: customer 0 .* and 990 more"
    ) as info:
        buffer.named("nobody")
    assert len(str(info.value)) < 1000


def test_n_way_tasks_have_no_names() -> None:
    buffer = ClassBuffer()
    buffer.begin("open", [3, 4])
    buffer.append(Batch(torch.zeros(2, 1), torch.tensor([0, 1])))
    assert buffer.sizes() == {"open": 2}
    with pytest.raises(ValueError, match="task 'a': n-way tasks store their data by class"):
        buffer.append(Batch(torch.zeros(2, 1), torch.tensor([0, 1])), task="a")
    with pytest.raises(ValueError, match="task 'open': n-way tasks store their data by class"):
        buffer.forget("open")
    assert buffer.num_datapoints == 2


def test_crafted_states_are_refused() -> None:
    buffer = TaskBuffer()
    buffer.append(batch(0, 3), task="a")
    state = buffer.state_dict()
    for change in ({"length": -1}, {"length": 2}, {"starts": [1]}, {"starts": [0, 1]}, {"names": []}):
        with pytest.raises(ValueError, match="state"):
            TaskBuffer().load_state_dict(state | change)
