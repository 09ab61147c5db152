"""Predictions for requests that arrive together, as few batched programs.

The first request waits for a moment; others that arrive meanwhile, or while a batch is computed, are computed with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from metaleader.learners.data import inputs_of
from metaleader.learners.learner import Learner
from metaleader.learners.prediction import run_model
from metaleader.live.together import Question, Source, answer, apart, has_rows_of, joined, split
from metaleader.memory.by_task import TaskBuffer
from metaleader.tasks import Tree, row_signature


class Server(Source, Protocol):
    """A session or a replica."""

    @property
    def learner(self) -> Learner:
        """The learner."""
        ...


class Known(NamedTuple):
    """What a learner knows of a task.

    Attributes:
        datapoints: in memory; 0 for a task without data.
        number: the number of tasks seen before it.
    """

    datapoints: int = 0
    number: int = 0


def known(learner: Learner, task: str) -> Known:
    """What a learner knows of a task; does not depend on the number of tasks."""
    with learner.locks.reading:
        assert isinstance(learner.memory, TaskBuffer)
        return Known(learner.memory.size(task), learner.memory.number(task))


class Predicted(NamedTuple):
    """Predictions for the rows of one request.

    Attributes:
        y: of the net adapted to the task, or of the initialisation if the task has no data.
        unadapted: of the initialisation, or None if it was not asked for.
        known: what the learner knew of the task.
    """

    y: Tree
    unadapted: Tree
    known: Known


@dataclass(kw_only=True, eq=False)
class _Item(Question):
    """A request that waits.

    Attributes:
        done: the outcome.
        has_unadapted: whether the predictions of the initialisation are wanted too.
    """

    has_unadapted: bool
    done: asyncio.Future[Predicted]
    known: Known = field(default_factory=Known)
    unadapted: Tree = None


class Batcher:
    """Predicts for several requests at once, in a thread of its own.

    Args:
        source: the session or replica.
        window: the time that the first request waits for others, in seconds.
        most: the largest number of requests in a batch.
        counted: called with the number of requests of each batch.
    """

    def __init__(self, source: Server, window: float, most: int, counted: Callable[[int], object]) -> None:
        self._source, self._window, self._most, self._counted = source, window, most, counted
        self._items: list[_Item] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metaleader predictions")

    async def predict(self, task: str, x: Tree, has_unadapted: bool = False) -> Predicted:
        """Predictions for the rows of x.

        Args:
            task: the name of the task; without data of it, the initialisation predicts.
            x: inputs.
            has_unadapted: also predict by the initialisation.

        Raises:
            ValueError: if the model refuses the rows, or the adapted net is not finite.
        """
        loop = asyncio.get_running_loop()
        item = _Item(task, x, has_unadapted=has_unadapted, done=loop.create_future())
        self._items.append(item)
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        return await item.done

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(self._window)
            while self._items:
                items, self._items = self._items[: self._most], self._items[self._most :]
                self._counted(len(items))
                try:
                    await loop.run_in_executor(self._thread, self._compute, items)
                except Exception as error:
                    for item in items:
                        item.error = item.error or error
                for item in items:
                    if item.done.cancelled():
                        continue
                    if item.error is None:
                        item.done.set_result(Predicted(item.y, item.unadapted, item.known))
                    else:
                        item.done.set_exception(item.error)
        finally:
            self._worker = None

    def _compute(self, items: list[_Item]) -> None:
        learner = self._source.learner
        for item in items:
            try:
                item.x = inputs_of(learner, item.x, "predict")
                _check_rows(learner, item.x)
                item.known = known(learner, item.task)
            except Exception as error:
                item.error = error
        items = [item for item in items if item.error is None]
        answer(self._source, [item for item in items if item.known.datapoints])
        plain = [item for item in items if item.has_unadapted or not item.known.datapoints]
        apart(plain, self._unadapted, "unadapted")
        for item in items:
            if not item.known.datapoints:
                item.y = item.unadapted

    def _unadapted(self, items: list[_Item]) -> list[Tree]:
        learner = self._source.learner
        if learner.network.has_batch_norm and len(items) > 1:
            raise ValueError("with batch norm, the rows of each request have statistics of their own")
        x = joined(items)
        with torch.no_grad():
            params = learner.layout.named(learner.state.flat)
            return split(run_model(learner.network.predict, "predict", params, x, x=x), items)


def _check_rows(learner: Learner, x: Tree) -> None:
    """Reject rows of another kind than those stored."""
    if not has_rows_of(learner, x):
        stored = learner.memory.store.data
        known = "" if stored is None else row_signature(stored.x)
        raise ValueError(f"x has rows of {row_signature(x)}, the data so far has {known}")
