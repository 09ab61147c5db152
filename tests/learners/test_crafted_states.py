"""States that no learner has written are refused when they are loaded, not later."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metaleader.learners import FTML, Learner
from metaleader.losses import cross_entropy, squared_error
from metaleader.memory.by_class import ClassBuffer

VALUES: tuple[Any, ...] = (
    -1,
    10**6,
    2**70,
    True,
    0.5,
    float("nan"),
    None,
    "text",
    [],
    [-1],
    {},
    {"x": 1},
    torch.zeros(0),
    torch.tensor([-1]),
    torch.full((7,), 9),
    torch.zeros(3, 3),
    torch.tensor(float("nan")),
)


def named() -> Learner:
    """Rounds, data under names, and a dropped task."""
    learner = FTML(lambda: nn.Linear(2, 1), squared_error, meta_steps=1, inner_steps=1, tasks_per_step=2, max_tasks=4)
    for t in range(4):
        learner.begin(str(t))
        learner.observe(torch.ones(3, 2), torch.zeros(3, 1))
    learner.observe(torch.ones(2, 2), torch.zeros(2, 1), task="later")
    learner.observe(torch.ones(1, 2), torch.zeros(1, 1), task="0")
    return learner


def by_class() -> Learner:
    learner = FTML(
        lambda: nn.Linear(2, 2), cross_entropy, optimizer="sgd", support=2, query=2, meta_steps=1, inner_steps=1,
        tasks_per_step=2,
    )  # fmt: skip
    for t in range(2):
        learner.begin(str(t), classes=[t, t + 1])
        learner.observe(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]), ids=range(4 * t, 4 * t + 4))
    return learner


def use(learner: Learner) -> None:
    """What a caller does next; a ValueError says why it cannot be done."""
    by_classes = isinstance(learner.memory, ClassBuffer)
    y = torch.tensor([0, 1]) if by_classes else torch.zeros(2, 1)
    learner.adapt(task=None)
    learner.observe(torch.ones(2, 2), y)
    learner.begin("next", classes=[1, 2] if by_classes else None)
    learner.observe(torch.ones(2, 2), y)
    if not by_classes:
        for name in list(learner.tasks):
            learner.adapt(task=name)
        learner.observe(torch.ones(2, 2), y, task="later")
        learner.forget("later")
    learner.state_dict()


def paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in a state, the root left out."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key))


def changed(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    place: Any = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return state


@pytest.mark.parametrize("make", [named, by_class])
def test_a_state_with_a_wrong_value_is_refused_at_once_or_can_be_used(make: Any) -> None:
    learner, refused, used = make(), 0, 0
    state = learner.state_dict()
    for path in paths(state):
        for value in VALUES:
            try:
                learner.load_state_dict(changed(state, path, value))
            except ValueError:
                refused += 1
                continue
            used += 1
            try:
                use(learner)
            except ValueError as error:
                assert "observe before begin" in str(error) or "not finite" in str(error)  # noqa: PT017
            learner = make()
        assert same(learner.state_dict(), state), path  # as before the refused calls
    assert refused > 400
    assert used > 10


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other
