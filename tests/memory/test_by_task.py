from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from metaleader.memory.by_task import TaskBuffer
from metaleader.memory.limits import Limits
from metaleader.memory.pools import distinct
from metaleader.memory.rows import Weights, recency
from metaleader.tasks import Batch


def filled(sizes: Sequence[int], weights: Weights | None = None, max_tasks: int | None = None) -> TaskBuffer:
    """A buffer whose x is the row's number, among all that came, and whose y is its task."""
    buffer, row = TaskBuffer(weights=weights, limits=Limits(max_tasks=max_tasks)), 0
    for task, size in enumerate(sizes):
        buffer.begin(f"task {task}")
        for start in range(0, size, 4):  # in several reveals
            num = min(4, size - start)
            buffer.append(Batch(torch.arange(row, row + num), torch.full((num,), task)))
            row += num
    return buffer


def floyd(uniform: list[float], count: int, width: int) -> list[int]:
    """One row of `distinct`, number by number."""
    take = min(count, width)
    chosen: list[int] = []
    for j in range(take):
        top = count - take + j
        candidate = min(int(uniform[j] * (top + 1)), top)
        chosen.append(top if candidate in chosen else candidate)
    shuffled = [chosen[j] for j in sorted(range(take), key=lambda j: uniform[width + j])]
    return [shuffled[j % take] for j in range(width)]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 12), st.integers(0, 2**32))
def test_distinct_numbers_are_floyds(counts: list[int], width: int, seed: int):
    uniform = np.random.default_rng(seed).random((len(counts), 2 * width))
    found = distinct(uniform, np.array(counts), width)
    assert found.tolist() == [floyd(row, n, width) for row, n in zip(uniform.tolist(), counts, strict=True)]


def draw(buffer: TaskBuffer, *args: Any, **options: Any) -> Any:
    drawn = buffer.draw(*args, **options)
    assert drawn is not None
    return drawn


def chi_square(counts: Tensor, expected: Tensor | float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def bound(degrees: int) -> float:
    """Six standard deviations above the mean of chi-square: chance exceeds it less than once in a million."""
    return degrees + 6 * (2 * degrees) ** 0.5 + 12


# What a draw is made of.

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@given(SIZES, st.integers(0, 5), st.integers(1, 5), st.integers(0, 2**31), st.integers(0, 1000))
def test_rows_of_one_task_disjoint_and_divided_as_documented(
    sizes: list[int], support: int, query: int, seed: int, step: int
):
    buffer = filled(sizes)
    drawn = draw(buffer, seed, [step], 7, support, query).at(0)
    assert drawn.support.shape == (7, support)
    assert drawn.query.shape == (7, query)
    owners = buffer.gather(drawn)
    for s, q, s_owner, q_owner in zip(drawn.support, drawn.query, owners[0].y, owners[1].y, strict=True):
        assert len(set(s_owner.tolist()) | set(q_owner.tolist())) == 1
        have, width = sizes[int(q_owner[0])], support + query
        own_support, own_query = set(s.tolist()), set(q.tolist())
        if have >= width:  # nothing twice
            assert len(own_support) == support
            assert len(own_query) == query
            assert own_support.isdisjoint(own_query)
        elif support == 0:
            assert len(own_query) == min(have, query)
        elif have == 1:
            assert own_support == own_query
        else:  # all of the task, divided, each as often as any other, or once more
            assert own_support.isdisjoint(own_query)
            assert len(own_support | own_query) == have
            half = min(support, have // 2)
            assert abs(len(own_support) - max(half, have * support / width)) < 1 or len(own_query) == 1
            for part in (s, q):
                repeats = part.unique(return_counts=True)[1]
                assert repeats.max() - repeats.min() <= 1


@pytest.mark.parametrize(("support", "query"), [(10, 10), (1, 1), (0, 10), (3, 1)])
def test_a_task_of_one_datapoint(support: int, query: int):
    drawn = draw(filled([1]), 0, [0], 5, support, query)
    assert not drawn.support.any()
    assert not drawn.query.any()


@pytest.mark.parametrize(
    ("have", "support", "query", "parts"),
    [(2, 10, 10, (1, 1)), (3, 10, 10, (1, 2)), (8, 10, 10, (4, 4)), (8, 15, 5, (6, 2)), (2, 19, 1, (1, 1)),
     (5, 1, 19, (1, 4)), (20, 10, 10, (10, 10)), (19, 10, 10, (9, 10)),
     (20, 10, 60, (10, 10)), (12, 10, 60, (6, 6)), (30, 10, 60, (10, 20)), (3, 2, 9, (1, 2))],
)  # fmt: skip
def test_how_short_tasks_are_divided(have: int, support: int, query: int, parts: tuple[int, int]):
    drawn = draw(filled([have]), 0, [0], 3, support, query).at(0)
    assert [(len(s.unique()), len(q.unique())) for s, q in zip(drawn.support, drawn.query, strict=True)] == [parts] * 3


# The distribution.


@pytest.mark.parametrize("which", ["all", "past"])
def test_tasks_are_drawn_uniformly_whatever_their_size(which: Any):
    buffer = filled([20, 3, 50, 1, 7])
    drawn = draw(buffer, 1, range(400), 25, 2, 2, which)
    chosen = buffer.gather(drawn)[1].y[..., 0].flatten()
    num = 5 if which == "all" else 4
    counts = torch.bincount(chosen, minlength=5)
    assert chi_square(counts[:num], 10_000 / num) < bound(num - 1)
    assert counts[num:].sum() == 0


@pytest.mark.parametrize(("have", "support", "query"), [(12, 3, 2), (5, 3, 2), (9, 0, 4), (4, 3, 3), (40, 10, 10)])
def test_datapoints_are_drawn_uniformly_for_every_place(have: int, support: int, query: int):
    drawn = draw(filled([have]), 2, range(300), 20, support, query)
    for part in (drawn.support, drawn.query):
        for place in range(part.shape[-1]):
            counts = torch.bincount(part[..., place].flatten(), minlength=have)
            assert chi_square(counts, 6000 / have) < bound(have - 1)


def test_every_pair_of_support_and_query_is_as_likely():
    drawn = draw(filled([5]), 3, range(500), 20, 1, 1)
    pairs = torch.bincount((5 * drawn.support + drawn.query).flatten(), minlength=25).view(5, 5)
    assert pairs.diagonal().sum() == 0
    assert chi_square(pairs[~torch.eye(5, dtype=torch.bool)], 10_000 / 20) < bound(19)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (recency(1.0), [1 / 15, 2 / 15, 4 / 15, 8 / 15]),
        (recency(1e9), [0.25] * 4),
        (lambda num: np.array([0.0, 3.0, 0.0, 1.0])[:num], [0.0, 0.75, 0.0, 0.25]),
        (lambda num: [1, 0, 0, 0][:num], [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_weights_of_tasks(weights: Any, expected: list[float]):
    buffer = filled([3, 9, 1, 5], weights)
    counts = torch.bincount(buffer.gather(draw(buffer, 4, range(400), 25, 1, 1))[1].y[..., 0].flatten(), minlength=4)
    probable = torch.tensor(expected)
    assert counts[probable == 0].sum() == 0
    assert chi_square(counts[probable > 0], 10_000 * probable[probable > 0]) < bound(int((probable > 0).sum()) - 1)


def test_weights_of_past_tasks_and_none_for_the_current():
    asked = []
    buffer = filled([2, 2, 2], lambda num: asked.append(num) or np.ones(num))
    for which in ("all", "past", "current"):
        buffer.draw(0, [0], 2, 1, 1, which)
    assert asked == [3, 2]


@pytest.mark.parametrize(
    "bad", [[1.0, 2.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 1.0], [1.0, float("inf"), 1.0], 1.0]
)
def test_bad_weights(bad: Any):
    buffer = filled([2, 2, 2], lambda num: bad)
    with pytest.raises(ValueError, match="task weights must be 3 numbers"):
        buffer.draw(0, [0], 2, 1, 1)


@pytest.mark.parametrize("half_life", [0.0, -1.0, float("nan")])
def test_bad_half_life(half_life: float):
    with pytest.raises(ValueError, match="half_life must be positive, got"):
        recency(half_life)


# Which tasks.


def test_past_current_and_nothing_to_draw_from():
    buffer = TaskBuffer()
    assert all(buffer.draw(0, [0], 2, 1, 1, which) is None for which in ("all", "past", "current"))
    buffer = filled([5])
    assert buffer.draw(0, [0], 2, 1, 1, "past") is None
    assert draw(buffer, 0, [0], 2, 1, 1, "current").query.max() < 5
    buffer = filled([5, 6])
    assert draw(buffer, 0, range(20), 9, 1, 1, "past").query.max() < 5
    assert draw(buffer, 0, range(20), 9, 1, 1, "current").query.min() >= 5
    buffer.begin("empty so far")  # every task with data is past now
    assert buffer.draw(0, [0], 2, 1, 1, "current") is None
    assert buffer.current() is None
    assert draw(buffer, 0, range(20), 9, 1, 1, "past").query.max() > 5
    assert len(buffer) == 2


def test_current_is_all_of_the_open_task():
    buffer = filled([5, 6])
    current = buffer.current()
    assert current is not None
    assert current.x.tolist() == list(range(5, 11))
    assert buffer.counts().tolist() == [5, 6]
    assert buffer.num_datapoints == 11


# Determinism.


@given(SIZES, st.integers(0, 2**31), st.lists(st.integers(0, 10_000), min_size=1, max_size=5))
def test_a_step_is_drawn_the_same_alone_or_in_a_group(sizes: list[int], seed: int, steps: list[int]):
    buffer = filled(sizes)
    together = draw(buffer, seed, steps, 4, 3, 2)
    for i, step in enumerate(steps):
        alone = draw(buffer, seed, [step], 4, 3, 2).at(0)
        assert torch.equal(alone.support, together.at(i).support)
        assert torch.equal(alone.query, together.at(i).query)


def test_seed_and_step_matter():
    buffer = filled([30, 30])
    drawn = [draw(buffer, seed, [step], 5, 5, 5).query for seed, step in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


# Storage.


def test_what_is_gathered_is_what_came_in():
    buffer, xs = TaskBuffer(), torch.rand(30, 2, 3)
    tree = [Batch({"a": x, "b": (x[:, 0] * 2,)}, x.sum((1, 2))) for x in xs.split([7, 1, 12, 10])]
    for task, batch in enumerate(tree):
        buffer.begin(str(task))
        buffer.append(batch)
    support, query = buffer.gather(draw(buffer, 0, [0], 6, 3, 2).at(0))
    assert support.x["a"].shape == (6, 3, 2, 3)
    assert query.x["b"][0].shape == (6, 2, 3)
    for part in (support, query):
        assert torch.equal(part.x["b"][0], part.x["a"][..., 0, :] * 2)
        assert torch.equal(part.y, part.x["a"].sum((-1, -2)))


@pytest.mark.parametrize("reveals", [[20] * 60, [1] * 300, [900, 1, 1], [3, 500, 7, 11]])
def test_memory_is_close_to_the_bytes_of_the_data(reveals: list[int]):
    buffer = TaskBuffer()
    given = 0
    for i, num in enumerate(reveals):
        if i % 5 == 0:
            buffer.begin(str(i))
        batch = Batch(torch.zeros(num, 3, 8, 8, dtype=torch.uint8), torch.zeros(num, dtype=torch.int64))
        given += sum(leaf.nbytes for leaf in batch)
        buffer.append(batch)
    assert buffer.store.data is not None
    assert buffer.store.data.x.dtype == torch.uint8
    kept = sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(buffer.store.data))
    assert given <= kept <= 1.3 * given


def test_the_buffer_keeps_a_copy():
    buffer, x = TaskBuffer(), torch.zeros(4)
    buffer.begin("a")
    for _ in range(2):
        buffer.append(Batch(x, x))
    x.fill_(1.0)
    current = buffer.current()
    assert current is not None
    assert not current.x.any()


def test_other_shapes_are_refused_and_nothing_is_kept():
    buffer = filled([3])
    buffer.begin("b")
    before = facts(buffer)
    with pytest.raises(ValueError, match=r"x has rows of int64\[2\], but earlier datapoints have int64\[\]"):
        buffer.append(Batch(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)))
    assert facts(buffer) == before


def test_after_a_rollback_to_nothing_any_shape_may_come():
    buffer = TaskBuffer()
    buffer.begin("a")
    mark = buffer.mark()
    buffer.append(Batch(torch.zeros(2), torch.zeros(2)))
    buffer.rollback(mark)
    buffer.append(Batch(torch.zeros(2, 3), torch.zeros(2)))
    assert buffer.counts().tolist() == [2]


@given(SIZES, st.integers(0, 9), st.booleans())
def test_rollback(sizes: list[int], more: int, new_task: bool):
    buffer, twin = filled(sizes), filled(sizes)
    mark = buffer.mark()
    if new_task:
        buffer.begin("new")
    for _ in range(more):
        buffer.append(Batch(torch.full((3,), -1), torch.full((3,), -1)))
    buffer.rollback(mark)
    assert facts(buffer) == facts(twin)
    assert buffer.names == twin.names
    for one in (buffer, twin):
        one.append(Batch(torch.full((2,), 77), torch.full((2,), 78)))
    assert_same(buffer, twin)


def facts(buffer: TaskBuffer) -> tuple[int, int, int, str | None]:
    return buffer.num_datapoints, len(buffer), buffer.seen, buffer.state_dict()["open"]


def assert_same(one: TaskBuffer, other: TaskBuffer) -> None:
    assert one.names == other.names
    assert one.counts().tolist() == other.counts().tolist()
    drawn = [b.gather(draw(b, 5, [1], 6, 2, 2).at(0)) for b in (one, other)]
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(drawn[0]), tree_leaves(drawn[1]), strict=True))


@given(SIZES, st.booleans())
def test_state_round_trip(sizes: list[int], opened: bool):
    buffer, other = filled(sizes), TaskBuffer()
    if opened:
        buffer.begin("open")
    other.load_state_dict(buffer.state_dict())
    assert facts(other) == facts(buffer)
    for one in (buffer, other):  # and both go on alike, on their own
        one.append(Batch(torch.full((2,), 77), torch.full((2,), 78)))
    assert_same(buffer, other)
    buffer.store.take(slice(0, 1)).x.fill_(-9)
    assert (other.store.take(slice(0, 1)).x >= 0).all()


def test_state_without_data():
    buffer, other = filled([3, 4]), filled([3, 4])
    state = buffer.state_dict(data=False)
    assert not any(isinstance(leaf, Tensor) for leaf in tree_leaves(state))
    other.load_state_dict(state)
    assert_same(buffer, other)
    with pytest.raises(ValueError, match=r"without its data of 7 datapoints, but 3 are present; observe the same data"):
        filled([3]).load_state_dict(state)


def test_state_of_an_empty_buffer():
    buffer = filled([3])
    buffer.load_state_dict(TaskBuffer().state_dict())
    assert len(buffer) == 0
    assert buffer.draw(0, [0], 1, 1, 1) is None
    assert buffer.current() is None


# A bounded memory.


def late_ones_count_less(num: int) -> np.ndarray:
    return 1.0 / np.arange(1, num + 1)


@given(SIZES, st.integers(2, 5), st.sampled_from([None, np.ones, recency(2.0), late_ones_count_less]))
def test_what_is_kept_of_so_many_tasks(sizes: list[int], most: int, weights: Weights | None):
    """The newest, or those with the largest weights; the open one always."""
    buffer = filled(sizes, weights, most)
    assert buffer.seen == len(sizes)
    numbers = list(range(len(sizes)))
    first = numbers[: min(most, len(sizes)) - 1] + numbers[-1:]
    assert buffer.numbers == (first if weights is late_ones_count_less else numbers[-most:])
    firsts = np.cumsum([0, *sizes])
    assert len(buffer) == len(buffer.numbers)
    for number, count in zip(buffer.numbers, buffer.counts(), strict=True):
        assert count == sizes[number]
        kept = buffer.named(f"task {number}")
        assert kept is not None
        assert kept.x.tolist() == list(range(firsts[number], firsts[number + 1]))
        assert set(kept.y.tolist()) == {number}
    assert buffer.num_datapoints == sum(sizes[number] for number in buffer.numbers)


@pytest.mark.parametrize("which", ["all", "past"])
def test_weights_are_those_of_a_tasks_age_however_many_are_kept(which: Any):
    """Of six tasks 0, 1, 2 and 5 are kept; the open one is 5."""
    buffer = filled([2] * 6, late_ones_count_less, 4)
    buffer.weights = lambda num: np.arange(1.0, num + 1)
    labels = buffer.gather(draw(buffer, 0, range(400), 25, 0, 1, which))[1].y
    shares = np.bincount(labels.flatten().numpy(), minlength=6) / labels.numel()
    expected = np.array([1, 2, 3, 0, 0, 6 if which == "all" else 0])
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.02)


def test_where_none_that_is_kept_counts_all_do():
    buffer = filled([2] * 4, max_tasks=3)
    past = buffer.numbers[:-1]
    buffer.weights = lambda num: (~np.isin(np.arange(num), past)).astype(float)
    labels = buffer.gather(draw(buffer, 0, range(10), 5, 0, 1, "past"))[1].y
    assert set(labels.flatten().tolist()) == set(past)


def test_what_was_taken_before_stays():
    buffer = filled([3, 4], max_tasks=2)
    taken = buffer.current()
    assert taken is not None
    for name in ("one", "two", "three"):
        buffer.begin(name)
        buffer.append(Batch(torch.full((5,), -1), torch.full((5,), -1)))
    assert taken.x.tolist() == [3, 4, 5, 6]


def test_a_task_without_data_makes_nothing_be_forgotten_twice():
    buffer = filled([2, 2, 2], max_tasks=3)
    for name in ("a", "b", "c"):
        buffer.begin(name)
    assert len(buffer) == 2
    buffer.append(Batch(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)))
    assert buffer.names[-1] == "c"
    assert len(buffer) == 3


@given(SIZES, st.integers(2, 4), st.booleans(), st.booleans())
def test_state_of_a_bounded_memory(sizes: list[int], most: int, opened: bool, data: bool):
    """And a rollback before it, which leaves no trace."""
    buffer = filled(sizes, max_tasks=most)
    other = TaskBuffer(limits=Limits(max_tasks=most)) if data else filled(sizes, max_tasks=most)
    mark = buffer.mark()
    buffer.append(Batch(torch.full((3,), -1), torch.full((3,), -1)))
    buffer.rollback(mark)
    if opened:
        for one in (buffer, *([] if data else [other])):
            one.begin("open")
    other.load_state_dict(buffer.state_dict(data=data))
    assert facts(other) == facts(buffer)
    for one in (buffer, other):
        for name in ("next", "and next"):
            one.begin(name)
            one.append(Batch(torch.full((2,), 77), torch.full((2,), 78)))
    assert other.numbers == buffer.numbers
    assert_same(buffer, other)


def test_several_are_forgotten_at_once_where_a_larger_memory_is_taken_over():
    buffer = TaskBuffer(limits=Limits(max_tasks=3))
    buffer.load_state_dict(filled([2, 3, 4, 5, 6]).state_dict())
    buffer.begin("next")
    assert buffer.numbers == [3, 4]
    assert buffer.counts().tolist() == [5, 6]
    assert buffer.store.take(slice(0, 11)).y.tolist() == [3] * 5 + [4] * 6


def test_a_state_without_data_needs_the_same_tasks():
    state = filled([2] * 6, max_tasks=3).state_dict(data=False)
    for other in (filled([2] * 5, max_tasks=3), filled([2] * 6, late_ones_count_less, 3), filled([2] * 3)):
        with pytest.raises(ValueError, match=r"without its data, of tasks \[3, 4, 5\], but tasks \[.*\] are present"):
            other.load_state_dict(state)


def test_the_memory_shrinks_with_its_tasks():
    buffer = filled([1000, 1, 1], max_tasks=2)
    assert buffer.store.data is not None
    assert len(buffer.store.data.x) < 10
