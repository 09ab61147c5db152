"""Trials: learners observe and update, and are as before afterwards; measurements between reveals are made in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from metaleader.learners.changes import Change

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
