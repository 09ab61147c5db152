"""A change of learners that happens as a whole: after an exception at any point, they are as before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner

_FIELDS = ("memory", "state", "round", "task")


class Change:
    """A context in which memory, state, round and task of learners change; an exception restores them.

    Args:
        learners: the learners; the caller holds their locks `changing`.
        nested: whether it may lie within another change of the same learners.
    """

    def __init__(self, learners: Sequence[Learner], nested: bool = False) -> None:
        self._learners, self._nested = learners, nested
        self._before: list[tuple[Any, ...]] = []

    def __enter__(self) -> None:
        for learner in self._learners:
            with learner.locks.reading:
                memory = learner.memory
                mark = memory.point() if self._nested else memory.mark()
                self._before.append((mark, *(getattr(learner, name) for name in _FIELDS)))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.undo()

    def undo(self) -> None:
        """Restore memory, state, round and task."""
        for learner, (mark, *values) in zip(self._learners, self._before, strict=True):
            with learner.locks.reading:
                values[0].rollback(mark)
                vars(learner).update(zip(_FIELDS, values, strict=True))
