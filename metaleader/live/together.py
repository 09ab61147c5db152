"""Predictions for calls that several threads make at the same time, as one batched program.

A call that finds no other under way is computed at once, alone. Calls that arrive meanwhile wait, and are then computed
together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._pytree import tree_map

from metaleader.learners.data import inputs_of
from metaleader.learners.learner import Learner
from metaleader.memory.by_task import TaskBuffer
from metaleader.tasks import Tree, num_rows, row_signature, rows, tensors_of

# The largest number of calls that are computed together
_MOST = 256


class Source(Protocol):
    """What predicts: a learner, a session or a replica."""

    def predict(self, x: Tree, task: str) -> Any:
        """Predictions of the net adapted to all data of a task."""
        ...

    def predict_many(self, xs: Mapping[str, Tree]) -> dict[str, Any]:
        """Predictions for several tasks at once."""
        ...


@dataclass(eq=False)
class Question:
    """A call that asks for predictions.

    Attributes:
        task: the name of the task.
        x: inputs, as tensors.
        y: the predictions.
        error: why there are none.
    """

    task: str
    x: Tree
    y: Tree = None
    error: BaseException | None = None


@dataclass(eq=False)
class _Waiting(Question):
    """A call of a thread that waits.

    Attributes:
        called: set when the call is answered, or leads the next ones.
        leads: whether the thread of this call computes the next ones.
    """

    called: threading.Event = field(default_factory=threading.Event)
    leads: bool = False


Q = TypeVar("Q", bound=Question)


class Together:
    """Predictions for threads that ask at the same time.

    Args:
        learner: predicts.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._is_busy = False

    def predict(self, x: Tree, task: str) -> Any:
        """Predictions, as `Learner.predict`."""
        call = _Waiting(task, inputs_of(self._learner, x, "predict"))
        with self._lock:
            self._waiting.append(call)
            call.leads = not self._is_busy
            self._is_busy = True
        try:
            if not call.leads:
                call.called.wait()
        except BaseException:
            self._leave(call)
            raise
        if call.leads:
            self._lead(call)
        if call.error is not None:
            raise call.error.with_traceback(None)
        return call.y

    def _lead(self, call: _Waiting) -> None:
        """Answer calls that wait, this one among them; another thread answers those that arrive meanwhile."""
        calls = [call]
        try:
            with self._lock:
                self._waiting.remove(call)
                calls += self._waiting[: _MOST - 1]
                del self._waiting[: _MOST - 1]
            self._answer(calls)
        except BaseException as error:  # also an interrupt of this thread, which must not leave the others waiting
            for one in calls[1:]:
                one.error = RuntimeError(f"the thread that computed this prediction was interrupted ({error!r})")
            raise
        finally:
            with self._lock:
                self._pass_on()
            for one in calls[1:]:
                one.called.set()

    def _leave(self, call: _Waiting) -> None:
        """Take back a call whose thread was interrupted while it waited."""
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
                if call.leads:
                    self._pass_on()

    def _pass_on(self) -> None:
        """Let another call lead, if any waits."""
        following = next(iter(self._waiting), None)
        self._is_busy = following is not None
        if following is not None:
            following.leads = True
            following.called.set()

    def _answer(self, calls: list[_Waiting]) -> None:
        if len(calls) > 1:
            fit = [call for call in calls if _fits(self._learner, call)]
            answer(self._learner, fit)
            calls = [call for call in calls if call not in fit]
        for call in calls:
            answer(self._learner, [call])


def _fits(learner: Learner, call: Question) -> bool:
    """Whether a call can be computed with others: its task has data, and its rows are like these."""
    with learner.locks.reading:
        memory = learner.memory
        return isinstance(memory, TaskBuffer) and memory.size(call.task) > 0 and has_rows_of(learner, call.x)


def has_rows_of(learner: Learner, x: Tree) -> bool:
    """Whether inputs have rows of the kind of those stored; True if none are."""
    stored = learner.memory.store.data
    return stored is None or _kinds(x) == _kinds(stored.x)


def _kinds(tree: Tree) -> list[tuple[torch.dtype, torch.Size]]:
    return [(leaf.dtype, leaf.shape[1:]) for leaf in tensors_of(tree)]


def answer(source: Source, questions: list[Q]) -> None:
    """Answer some calls by adapted nets; a call that fails does not affect the others."""
    apart(questions, lambda some: _adapted(source, some), "y")


def _adapted(source: Source, questions: Sequence[Question]) -> list[Tree]:
    if len(questions) == 1:
        return [source.predict(questions[0].x, questions[0].task)]
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, []).append(question)
    found = source.predict_many({name: joined(some) for name, some in by_task.items()})
    pieces = {name: iter(split(found[name], some)) for name, some in by_task.items()}
    return [next(pieces[question.task]) for question in questions]


def apart(questions: list[Q], call: Callable[[list[Q]], list[Tree]], name: str) -> None:
    """Predict for some calls at once; if that fails, for each alone, so that one cannot make others fail."""
    if not questions:
        return
    try:
        found = call(questions)
    except Exception as error:
        if len(questions) == 1:
            questions[0].error = error
            return
        for question in questions:
            apart([question], call, name)
        return
    for question, value in zip(questions, found, strict=True):
        setattr(question, name, value)


def joined(questions: Iterable[Question]) -> Tree:
    """The rows of several calls in one tree."""
    trees = [question.x for question in questions]
    if len({row_signature(tree) for tree in trees}) > 1:
        raise ValueError("the rows of the requests differ")
    return trees[0] if len(trees) == 1 else tree_map(lambda *leaves: torch.cat(leaves), *trees)


def split(tree: Tree, questions: Iterable[Question]) -> list[Tree]:
    """The inverse of `joined`, for predictions."""
    found, start = [], 0
    for question in questions:
        stop = start + num_rows(question.x)
        found.append(rows(tree, slice(start, stop)))
        start = stop
    return found
