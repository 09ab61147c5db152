"""Inputs for the learner checks: the calls of a short play, invalid data, and altered test data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.checks.streams import Stream
from metaleader.checks.trees import require
from metaleader.learners import Learner
from metaleader.tasks import Batch, Task, num_rows, rows

Call = Callable[[Learner], None]
# Datapoints that are revealed together, and their ids for n-way tasks.
Reveal = tuple[Batch, Tensor | None]

# Two rounds of two reveals: enough for earlier tasks, and for an interruption within a round.
_ROUNDS, REVEALS, REVEAL = 2, 2, 10


def play_calls(stream: Stream) -> Iterator[Call]:
    """Yield the calls of a short play: begin, observe, observe, begin, ..."""
    for t in range(num_rounds(stream)):
        yield from round_calls(stream[t])


def round_calls(task: Task) -> Iterator[Call]:
    """Yield the calls of a round: begin, observe, observe."""
    yield lambda learner: _begin(learner, task)
    for reveal in reveals(task):
        yield lambda learner, reveal=reveal: observe(learner, reveal)


def _begin(learner: Learner, task: Task) -> None:
    # A user's learner need not accept `classes` and `ids`.
    learner.begin(task.name, **({} if task.classes is None else {"classes": task.classes}))


def observe(learner: Learner, reveal: Reveal, update: bool = True) -> None:
    """Let the learner observe a reveal."""
    batch, ids = reveal
    names: dict[str, Any] = {} if ids is None else {"ids": ids}
    learner.observe(batch.x, batch.y, update=update, **names)


def num_rounds(stream: Stream) -> int:
    """Return the number of rounds to play."""
    require(len(stream) >= _ROUNDS, f"the checks need a stream of at least {_ROUNDS} tasks, got {len(stream)}")
    return _ROUNDS


def reveals(task: Task) -> Iterator[Reveal]:
    """Yield the reveals of a task."""
    total = num_rows(task.train)
    size = max(1, min(REVEAL, total // REVEALS))
    for first in range(0, min(total, REVEALS * size), size):
        index = slice(first, first + size)
        yield rows(task.train, index), None if task.ids is None else task.ids[index]


def apply_calls(learner: Learner, calls: Iterable[Call]) -> Learner:
    """Make the calls on a learner, and return it."""
    for call in calls:
        call(learner)
    return learner


def bad_reveals(task: Task) -> Iterator[tuple[Reveal, str]]:
    """Yield reveals that a learner must refuse in this task, with a description of the error."""
    good, ids = next(reveals(task))
    for bad, description in _bad_batches(good):
        yield (bad, None if ids is None else ids[: num_rows(bad.x)]), description
    if task.classes is not None:
        yield (good._replace(y=torch.full_like(good.y, len(task.classes))), ids), "a label beyond the classes"
    if ids is not None:
        yield (good, ids[1:]), "fewer ids than datapoints"
        yield (good, -1 - ids), "negative ids"


def _bad_batches(good: Batch) -> Iterator[tuple[Batch, str]]:
    yield rows(good, slice(0, 0)), "an empty batch"
    yield Batch(good.x, rows(good.y, slice(0, num_rows(good) - 1))), "fewer targets than inputs"
    # The extra dimension has size two: size one may be valid, as for a network that begins with nn.Flatten.
    doubled = tree_map(lambda leaf: torch.stack([leaf, leaf], -1), good.x)
    yield Batch(doubled, good.y), "inputs with an extra dimension"
    for name in ("x", "y"):
        if all(leaf.is_floating_point() for leaf in tree_leaves(getattr(good, name))):
            for value in (float("nan"), float("inf")):
                bad = tree_map(lambda leaf, value=value: torch.full_like(leaf, value), getattr(good, name))
                yield good._replace(**{name: bad}), f"{value} in {name}"


def garbage(batch: Batch) -> Batch:
    """Return a batch of the same shapes, with noise as inputs and the targets in random order."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        order = torch.randperm(num_rows(batch))
        x = tree_map(_noise_like, batch.x)
    return Batch(x, rows(batch.y, order))


def _noise_like(leaf: Tensor) -> Tensor:
    if leaf.is_floating_point():
        return 100 * torch.randn(leaf.shape).to(leaf)
    low, high = int(leaf.min()), int(leaf.max())
    return torch.randint(low, high + 1, leaf.shape).to(leaf)
