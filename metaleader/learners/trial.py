"""Trials: learners observe and update, and are as before afterwards; measurements between reveals are made in them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from metaleader.learners.changes import Change
from metaleader.learners.data import checked_batch
from metaleader.learners.sharded import agree_on_batch
from metaleader.tasks import Tree

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner


@contextlib.contextmanager
def trial(learners: Sequence[Learner]) -> Iterator[None]:
    """A context at whose end memory, parameters, optimiser state and number of updates are those of its beginning.

    In it, data is stored by `store`, and updates are made by `update_together`.
    """
    with contextlib.ExitStack() as locks:
        for learner in learners:
            locks.enter_context(learner.locks.changing)
        skipped, change = [learner.skipped for learner in learners], Change(learners)
        change.__enter__()
        try:
            yield
        finally:
            change.undo()
            for learner, number in zip(learners, skipped, strict=True):
                learner.skipped = number


def store(
    learner: Learner,
    x: Tree,
    y: Tree,
    task: str | None = None,
    ids: Sequence[int] | Tensor | None = None,
    update: bool = False,
) -> None:
    """Check and store datapoints within a change of the learner; `update` says whether an update follows."""
    check = functools.partial(checked_batch, learner, x, y, task)
    batch = check() if learner.sharding.group.size == 1 else agree_on_batch(learner, check, task, update)
    with learner.locks.reading:
        learner.memory.append(batch, ids, task)
