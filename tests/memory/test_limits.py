"""Limits of tasks, of datapoints per task and of bytes, against lists."""

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

ROW = 16  # bytes: two integers
NAMES = ["a", "b", "c", "d"]
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("round"), st.just(""), st.integers(1, 9)),
        st.tuples(st.just("task"), st.sampled_from(NAMES), st.integers(1, 9)),
        st.tuples(st.just("refused"), st.sampled_from(["", *NAMES]), st.integers(1, 9)),
        st.tuples(st.just("forget"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("reload"), st.just(""), st.integers(0, 1)),
    ),
    max_size=30,
)
LIMITS = [
    {"max_datapoints": 5},
    {"max_bytes": 12 * ROW},
    {"max_tasks": 2, "max_datapoints": 3, "max_bytes": 9 * ROW},
    {"max_tasks": 3, "max_bytes": 20 * ROW},
]


def batch(first: int, num: int) -> Batch:
    return Batch(torch.arange(first, first + num), torch.arange(first, first + num) * 2)


def values(found: Batch | None) -> list[int]:
    assert found is None or torch.equal(found.y, found.x * 2)
    return [] if found is None else found.x.tolist()


class Lists:
    """The slow, obvious memory: a list of tasks, each with a list of datapoints."""

    def __init__(self, max_tasks: int | None = None, max_datapoints: int = 10**9, max_bytes: int = 10**9) -> None:
        self.max_tasks, self.total = max_tasks or 10**9, max_bytes // ROW
        self.most = min(max_datapoints, self.total // 2)
        self.tasks: list[dict[str, Any]] = []
        self.round: dict[str, Any] | None = None
        self.open: str | None = None
        self.clock = 0

    def begin(self, name: str) -> None:
        self.round, self.open = None, name
        while len(self.tasks) + 1 > self.max_tasks:
            self.tasks.remove(min(self.tasks, key=lambda task: task["touched"]))

    def add(self, name: str | None, new: list[int]) -> None:
        same = [task for task in self.tasks if task["name"] == name and task is not self.round]
        task = self.round if name is None else same[0] if same else None
        is_new = task is None
        if task is None:
            task = {"name": self.open if name is None else name, "values": []}
        for other in same[1:]:
            task["values"] += other["values"]
            self.tasks.remove(other)
        kept = (task["values"] + new)[-self.most :]
        others = sorted((t for t in self.tasks if t is not task and t is not self.round), key=lambda t: t["touched"])
        reserved = int(self.open is not None and self.round is None and name is not None)
        while others and (
            (is_new and name is not None and len(self.tasks) + reserved + 1 > self.max_tasks)
            or sum(len(t["values"]) for t in self.tasks if t is not task) + len(kept) > self.total
        ):
            self.tasks.remove(others.pop(0))
        task["values"], task["touched"] = kept, self.clock
        self.clock += 1
        if is_new:
            self.tasks.append(task)
        if name is None:
            self.round, self.open = task, None

    def forget(self, name: str) -> None:
        if self.round is not None and self.round["name"] == name:
            self.round, self.open = None, name
        self.tasks = [task for task in self.tasks if task["name"] != name]


def play(buffer: TaskBuffer, lists: Lists, calls: Sequence[tuple[str, str, int]]) -> TaskBuffer:
    first = 0
    for kind, name, num in calls:
        first += 10
        has_open = lists.round is not None or lists.open is not None
        if kind == "begin":
            buffer.mark()
            buffer.begin(name)
            lists.begin(name)
        elif kind == "forget" and name in buffer.sizes():
            buffer.mark()
            buffer.forget(name)
            buffer.scrub()
            lists.forget(name)
        elif kind == "reload":
            other = TaskBuffer(limits=buffer.limits)
            if num:  # the data is present already
                other.load_state_dict(buffer.state_dict())
            other.load_state_dict(buffer.state_dict(data=not num))
            assert not differences(buffer.state_dict(), other.state_dict())
            buffer = other
        elif kind == "task" or (kind == "round" and has_open):
            buffer.mark()
            buffer.append(batch(first, num), task=name or None)
            lists.add(name or None, list(range(first, first + num)))
        elif kind == "refused" and (name or has_open):
            mark, before = buffer.mark(), buffer.state_dict()
            buffer.append(batch(first, num), task=name or None)
            buffer.rollback(mark)
            assert not differences(before, buffer.state_dict())
    return buffer


@pytest.mark.parametrize("limits", LIMITS)
@given(calls=CALLS)
def test_any_sequence_of_calls_keeps_what_lists_keep(limits: dict[str, int], calls: list[tuple[str, str, int]]) -> None:
    lists = Lists(**limits)
    buffer = play(TaskBuffer(limits=Limits(**limits)), lists, calls)  # pyright: ignore[reportArgumentType]
    sizes = {name: sum(len(t["values"]) for t in lists.tasks if t["name"] == name) for name in NAMES}
    assert buffer.sizes() == {name: size for name, size in sizes.items() if size}
    for name in buffer.sizes():
        expected = [value for task in lists.tasks if task["name"] == name for value in task["values"]]
        assert sorted(values(buffer.named(name))) == sorted(expected)
    assert values(buffer.current()) == (lists.round["values"] if lists.round else [])
    assert buffer.num_datapoints == sum(sizes.values())
    assert buffer.num_bytes == sum(sizes.values()) * ROW
    # No datapoint that is not kept is drawn, and each drawn task is one task.
    draw = buffer.draw(1, range(4), 5, 2, 2)
    owners = {value: i for i, task in enumerate(lists.tasks) for value in task["values"]}
    for part in buffer.gather(draw) if draw is not None else ():
        assert all(len({owners[value] for value in row}) == 1 for row in part.x.flatten(0, 1).tolist())
    # The rows of what was dropped are used again.
    most = sum(sizes.values()) + 9 * 3 + 20
    assert buffer.store.length <= 4 * most


@pytest.mark.parametrize("limits", [{"max_datapoints": 3}, {"max_datapoints": 4, "max_bytes": 9 * ROW}])
@given(calls=CALLS)
def test_a_reservoir_continues_from_its_state(limits: dict[str, int], calls: list[tuple[str, str, int]]) -> None:
    """Bit for bit, with the rows elsewhere, after refused calls, and however often the state is loaded."""
    made = Limits(**limits, reservoir=True, seed=3)  # pyright: ignore[reportArgumentType]
    buffer = play(TaskBuffer(limits=made), Lists(**limits), calls)
    plain = [("none", "", 0) if call[0] in ("reload", "refused") else call for call in calls]
    assert not differences(buffer.state_dict(), play(TaskBuffer(limits=made), Lists(**limits), plain).state_dict())
    observed = {(n or "open", first) for first, (k, n, num) in enumerate(calls, 1) if k in ("task", "round")}
    for name in buffer.sizes():
        owners = {(name, value // 10) for value in values(buffer.named(name))}
        assert owners <= observed | {(name, first) for key, first in observed if key == "open"}
    other = TaskBuffer(limits=made)
    other.load_state_dict(buffer.state_dict())
    for one in (buffer, other):
        for i in range(5):
            one.mark()
            one.append(batch(1000 + 10 * i, 3), task="c")
    assert not differences(buffer.state_dict(), other.state_dict())
    assert all(len(values(buffer.named(name))) == size for name, size in buffer.sizes().items())


def algorithm_r(count: int, observed: int, num: int, most: int, places: Sequence[int]) -> list[int]:
    """One datapoint after the other: those kept are 0 .. count - 1, new ones -1, -2, ..."""
    kept = list(range(count))
    for j in range(num):
        if len(kept) < most and observed + j == len(kept):
            kept.append(-1 - j)
        else:
            place = places[j]
            if place < len(kept):
                kept[place] = -1 - j
    return kept


@given(st.integers(0, 8), st.integers(0, 30), st.integers(1, 20), st.integers(2, 8), st.integers(0, 2**20))
def test_a_reservoir_is_algorithm_r(count: int, more: int, num: int, most: int, seed: int) -> None:
    count = min(count, most)
    observed = count if count < most else count + more
    kept = Limits(max_datapoints=most, reservoir=True, seed=seed).kept(7, count, observed, num, most)
    found = list(range(count))
    for place, new in zip(kept.replaced.tolist(), kept.replacing.tolist(), strict=True):
        found[place] = -1 - new
    found += [-1 - new for new in kept.added.tolist()]
    assert kept.dropped == 0
    places = Limits(seed=seed).places(7, observed, num).tolist()
    assert found == algorithm_r(count, observed, num, most, places)


@given(st.integers(0, 30), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**20))
def test_the_places_of_datapoints_do_not_depend_on_the_calls(observed: int, sizes: list[int], seed: int) -> None:
    limits, parts, at = Limits(seed=seed), list[int](), observed
    for size in sizes:
        parts += limits.places(3, at, size).tolist()
        at += size
    assert parts == limits.places(3, observed, sum(sizes)).tolist()
    assert all(0 <= place <= observed + j for j, place in enumerate(parts))


@pytest.mark.parametrize("merged", [False, True])
def test_a_reservoir_is_a_uniform_sample(merged: bool) -> None:
    """Of datapoints that came in batches of several sizes, or in two rounds of unequal length that are merged."""
    total, most, times = 24, 6, 3000
    found = np.zeros(total)
    for seed in range(times):
        buffer = TaskBuffer(limits=Limits(max_datapoints=most, reservoir=True, seed=seed))
        if merged:
            buffer.begin("a")
            buffer.append(batch(0, 4))
            buffer.begin("a")
            for first in range(4, 22, 9):
                buffer.append(batch(first, 9))
            buffer.begin("b")
        for first, num in [(22, 1), (23, 1)] if merged else [(0, 1), (1, 7), (8, 3), (11, 12), (23, 1)]:
            buffer.append(batch(first, num), task="a")
        found[values(buffer.named("a"))] += 1
    assert found.sum() == most * times
    expected = times * most / total
    assert ((found - expected) ** 2 / expected).sum() < 24 + 6 * (2 * 24) ** 0.5 + 12


def test_the_newest_stay_in_order_of_arrival() -> None:
    buffer = TaskBuffer(limits=Limits(max_datapoints=4))
    for first, num in ((0, 3), (10, 2), (20, 9), (30, 1)):
        buffer.mark()
        buffer.append(batch(first, num), task="a")
    assert values(buffer.named("a")) == [26, 27, 28, 30]


def test_the_storage_does_not_grow_past_the_limits() -> None:
    buffer = TaskBuffer(limits=Limits(max_datapoints=5))
    for i in range(600):
        buffer.mark()
        buffer.append(batch(10 * i, 3), task=str(i % 7))
    assert buffer.num_datapoints == 35
    assert buffer.store.length < 50
    assert buffer.store.data is not None
    assert len(buffer.store.data.x) < 70


def test_the_open_round_is_kept_and_the_oldest_tasks_go() -> None:
    buffer = TaskBuffer(limits=Limits(max_bytes=12 * ROW))
    buffer.begin("open")
    buffer.append(batch(0, 8))  # at most half of the bytes
    assert values(buffer.current()) == [2, 3, 4, 5, 6, 7]
    for i, name in enumerate(["a", "b", "a", "c"]):
        buffer.append(batch(100 * (i + 1), 2), task=name)
    assert buffer.sizes() == {"open": 6, "a": 4, "c": 2}
    assert buffer.num_bytes == 12 * ROW
    with pytest.raises(ValueError, match=r"no data of task 'b'; .*; 1 tasks were dropped by max_bytes=192"):
        buffer.named("b")


@pytest.mark.parametrize("weights", [None, lambda num: np.arange(num, 0.0, -1)])
def test_weights_decide_which_tasks_go(weights: Any) -> None:
    buffer = TaskBuffer(weights=weights, limits=Limits(max_bytes=8 * ROW))
    for i in range(6):
        buffer.append(batch(10 * i, 2), task=str(i))
    kept = ["2", "3", "4", "5"] if weights is None else ["0", "1", "2", "5"]
    assert sorted(buffer.sizes()) == kept


def test_bad_limits() -> None:
    for name, value in [("max_datapoints", 1), ("max_datapoints", 2.0), ("max_bytes", 0), ("max_bytes", True)]:
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least . or None|{name} must be"):
            Limits(**{name: value})
    with pytest.raises(ValueError, match="reservoir=True has no effect without max_datapoints or max_bytes"):
        Limits(reservoir=True, max_tasks=3)
    with pytest.raises(ValueError, match="reservoir must be True or False, got 'newest'"):
        Limits(reservoir="newest", max_datapoints=3)  # pyright: ignore[reportArgumentType]
    buffer = TaskBuffer(limits=Limits(max_bytes=3 * ROW))
    with pytest.raises(ValueError, match="max_bytes=48 holds 3 datapoints of 16 bytes; set it to 64 or more"):
        buffer.append(batch(0, 1), task="a")
    assert buffer.sizes() == {}


def test_a_state_of_more_datapoints_is_cut_with_the_next_ones() -> None:
    every = TaskBuffer()
    every.append(batch(0, 20), task="a")
    every.append(batch(100, 4), task="b")
    for reservoir in (False, True):
        few = TaskBuffer(limits=Limits(max_datapoints=6, reservoir=reservoir))
        few.load_state_dict(every.state_dict())
        few.append(batch(200, 1), task="a")
        kept = values(few.named("a"))
        assert len(kept) == 6
        assert reservoir or kept == [15, 16, 17, 18, 19, 200]
        assert len(values(few.named("b"))) == 4


def test_crafted_states_with_limits_are_refused() -> None:
    buffer = TaskBuffer(limits=Limits(max_datapoints=2, reservoir=True))
    buffer.append(batch(0, 5), task="a")
    state = buffer.state_dict()
    assert state["observed"] == [5]
    for change in ({"observed": [1]}, {"observed": [5, 5]}, {"observed": [-5]}, {"observed": "5"}):
        with pytest.raises(ValueError, match="state"):
            TaskBuffer().load_state_dict(state | change)


# Images by class.


def feed(
    buffer: ClassBuffer, ways: Sequence[int], numbers: Sequence[int], labels: Sequence[int], ids: Any = None
) -> None:
    if tuple(ways) != buffer.ways:
        buffer.mark()
        buffer.begin("task", list(ways))
    buffer.mark()
    buffer.append(Batch(torch.tensor(numbers)[:, None], torch.tensor(labels)), ids)


def pools(buffer: ClassBuffer) -> dict[int, list[int]]:
    """The images of each class, by their numbers."""
    state, found = buffer.state_dict(), dict[int, list[int]]()
    if state["data"] is None:
        return found
    for number, one in zip(state["data"]["x"][:, 0].tolist(), state["classes"].tolist(), strict=True):
        found.setdefault(one, []).append(number)
    return found


CLASS_CALLS = st.lists(
    st.tuples(st.sampled_from(["append", "refused", "reload"]), st.integers(0, 3), st.integers(1, 8)), max_size=20
)


@pytest.mark.parametrize(("most", "total"), [(3, None), (None, 16), (4, 12)])
@given(calls=CLASS_CALLS)
def test_images_of_each_class(most: int | None, total: int | None, calls: list[tuple[str, int, int]]) -> None:
    """The newest of each class; classes that were not observed for longest are dropped."""
    limits = Limits(max_datapoints=most, max_bytes=None if total is None else total * ROW)
    buffer, first = ClassBuffer(limits=limits), 0
    in_class = min(most or 10**9, 10**9 if total is None else total // 2)
    expected: dict[int, list[int]] = {}
    for kind, start, num in calls:
        first += 10
        ways, labels = (start, start + 1), [i % 2 for i in range(num)]
        numbers = list(range(first, first + num))
        if kind == "reload":
            other = ClassBuffer(limits=limits)
            other.load_state_dict(buffer.state_dict())
            other.load_state_dict(buffer.state_dict(data=False))
            assert not differences(buffer.state_dict(), other.state_dict())
            buffer = other
            continue
        if kind == "refused":
            mark, before = buffer.mark(), buffer.state_dict()
            buffer.begin("task", list(ways))
            buffer.append(Batch(torch.tensor(numbers)[:, None], torch.tensor(labels)), numbers)
            buffer.rollback(mark)
            assert not differences(before, buffer.state_dict())
            continue
        feed(buffer, ways, numbers, labels, numbers)
        for label in sorted(set(labels), key=lambda label: labels[::-1].index(label), reverse=True):
            one = ways[label]
            expected[one] = (expected.pop(one, []) + numbers[label::2])[-in_class:]
        while total is not None and sum(map(len, expected.values())) > total:
            del expected[next(one for one in expected if one not in ways)]
    assert {one: sorted(kept) for one, kept in pools(buffer).items()} == expected
    assert buffer.num_datapoints == sum(map(len, expected.values()))
    current = buffer.current()
    if current is not None:
        assert {n for kept in expected.values() for n in kept} >= set(current.x[:, 0].tolist())
    draw = buffer.draw(0, range(3), 2, 2, 2) if len(expected) > 1 else None
    for part in buffer.gather(draw) if draw is not None else ():
        assert set(part.x.flatten().tolist()) <= {n for kept in expected.values() for n in kept}


def test_a_reservoir_of_each_class_is_uniform_and_continues() -> None:
    found = np.zeros(20)
    for seed in range(1500):
        limits = Limits(max_datapoints=4, reservoir=True, seed=seed)
        buffer, other = ClassBuffer(limits=limits), ClassBuffer(limits=limits)
        for first, num in ((0, 5), (5, 8), (13, 7)):
            for one in (buffer, other):
                feed(one, (5, -6), list(range(first, first + num)), [0] * num)
            if first == 5 and seed < 20:
                state = buffer.state_dict()
                other = ClassBuffer(limits=limits)
                other.load_state_dict(state)
        assert not differences(pools(buffer), pools(other))
        found[pools(buffer)[5]] += 1
    expected = 1500 * 4 / 20
    assert ((found - expected) ** 2 / expected).sum() < 20 + 6 * 40**0.5 + 12


def test_an_image_that_was_dropped_is_new_again() -> None:
    buffer = ClassBuffer(limits=Limits(max_datapoints=2))
    feed(buffer, (0, 1), [10, 11, 12], [0, 0, 0], [1, 2, 3])
    assert pools(buffer) == {0: [11, 12]}
    assert buffer.num_new == 2
    current = buffer.current()
    assert current is not None
    assert current.x[:, 0].tolist() == [11, 12]
    feed(buffer, (0, 1), [10, 12], [0, 0], [1, 3])
    assert pools(buffer) == {0: [12, 10]}
    assert sorted(buffer.current().x[:, 0].tolist()) == [10, 12, 12]  # pyright: ignore[reportOptionalMemberAccess]


def test_tasks_with_several_numbers_of_classes() -> None:
    """Meta-training tasks have as many classes as the open task, of all classes seen."""
    buffer = ClassBuffer()
    feed(buffer, (0, 1), [0, 1, 10, 11], [0, 0, 1, 1])
    feed(buffer, (2, 3, 4), [20, 21, 30, 31, 40, 41], [0, 0, 1, 1, 2, 2])
    draw = buffer.draw(0, range(30), 4, 3, 3)
    assert draw is not None
    assert draw.classes is not None
    assert draw.classes.shape == (30, 4, 3)
    assert set(draw.classes.flatten().tolist()) == set(range(5))
    support, _ = buffer.gather(draw)
    assert torch.equal(support.x[..., 0] // 10, draw.classes.take_along_dim(support.y, -1))
    with pytest.raises(ValueError, match="support must be a multiple of the 3 classes of a task, got 4; tasks with"):
        buffer.draw(0, [0], 4, 4, 4)
    feed(buffer, (4, 0), [42, 2], [0, 1])
    draw = buffer.draw(0, range(3), 4, 2, 2)
    assert draw is not None
    assert draw.classes is not None
    assert draw.classes.shape == (3, 4, 2)


@pytest.mark.parametrize(
    "limits", [{"max_datapoints": 4}, {"max_datapoints": 4, "reservoir": True}, {"max_bytes": 40 * ROW}]
)
@given(sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6))
def test_data_that_comes_at_once_is_kept_as_in_reveals(limits: dict[str, Any], sizes: list[list[int]]) -> None:
    """A run that is resumed observes the data of every round at once."""
    pairs = [(TaskBuffer(limits=Limits(**limits)), ClassBuffer(limits=Limits(**limits))) for _ in range(2)]
    for t, reveals in enumerate(sizes):
        for (by_task, by_class), nums in zip(pairs, (reveals, [sum(reveals)]), strict=True):
            by_task.begin(str(t))
            by_class.begin(str(t), [t % 5, (t + 2) % 5])
            first = 100 * t
            for num in nums:
                for buffer in (by_task, by_class):
                    buffer.mark()
                by_task.append(batch(first, num))
                labels = torch.tensor([(n * 7 // 3) % 2 for n in range(first, first + num)])
                by_class.append(Batch(torch.arange(first, first + num)[:, None], labels))
                first += num
    (tasks, classes), (other_tasks, other_classes) = pairs
    assert not differences(tasks.state_dict(), other_tasks.state_dict())
    assert not differences(classes.state_dict(), other_classes.state_dict())


@pytest.mark.parametrize("limits", [Limits(max_tasks=100), Limits(max_datapoints=10**6), Limits(max_bytes=10**9)])
def test_limits_that_are_not_reached_change_nothing(limits):
    """Without limits, their code is not run."""
    draws = []
    for buffer in (TaskBuffer(), TaskBuffer(limits=limits)):
        for step in range(30):
            if step % 5 == 0:
                buffer.begin(f"round {step % 2}")
            x = torch.full((1 + step % 3, 1), float(step))
            buffer.append(Batch(x, x), task=None if step % 3 else f"name {step % 4}")
        draw = buffer.draw(0, range(3), 4, 2, 2)
        assert draw is not None
        draws.append([*buffer.gather(draw), buffer.sizes(), buffer.state_dict()["data"]["x"]])
    assert str(draws[0]) == str(draws[1])
