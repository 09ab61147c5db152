"""Predictions for requests that arrive together, as few batched programs.

The first request waits for a moment; others that arrive meanwhile, or while a batch is computed, are computed with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_map

from metaleader.learners.data import inputs_of
from metaleader.learners.learner import Learner
from metaleader.learners.prediction import run_model
from metaleader.memory.by_task import TaskBuffer
from metaleader.tasks import Tree, num_rows, row_signature, rows, tensors_of


class Source(Protocol):
    """What predicts: a session or a replica."""

    @property
    def learner(self) -> Learner:
        """The learner."""
        ...

    def predict(self, x: Tree, task: str, *, variance: bool = False) -> Any:
        """Predictions of the net adapted to all data of a task."""
        ...

    def predict_many(self, xs: dict[str, Tree]) -> dict[str, Any]:
        """Predictions for several tasks at once."""
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


@dataclass
class _Item:
    """A request that waits.

    Attributes:
        done: the outcome.
        has_unadapted: whether the predictions of the initialisation are wanted too.
    """

    task: str
    x: Tree
    has_unadapted: bool
    done: asyncio.Future[Predicted]
    known: Known = field(default_factory=Known)
    y: Tree = None
    unadapted: Tree = None
    error: Exception | None = None


class Batcher:
    """Predicts for several requests at once, in a thread of its own.

    Args:
        source: the session or replica.
        window: the time that the first request waits for others, in seconds.
        most: the largest number of requests in a batch.
        counted: called with the number of requests of each batch.
    """

    def __init__(self, source: Source, window: float, most: int, counted: Callable[[int], object]) -> None:
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
        item = _Item(task, x, has_unadapted, loop.create_future())
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
        _together([item for item in items if item.known.datapoints], self._adapted, "y")
        plain = [item for item in items if item.has_unadapted or not item.known.datapoints]
        _together(plain, self._unadapted, "unadapted")
        for item in items:
            if not item.known.datapoints:
                item.y = item.unadapted

    def _adapted(self, items: list[_Item]) -> list[Tree]:
        if len(items) == 1:
            return [self._source.predict(items[0].x, items[0].task)]
        by_task: dict[str, list[_Item]] = {}
        for item in items:
            by_task.setdefault(item.task, []).append(item)
        found = self._source.predict_many({name: _joined(some) for name, some in by_task.items()})
        pieces = {name: iter(_split(found[name], some)) for name, some in by_task.items()}
        return [next(pieces[item.task]) for item in items]

    def _unadapted(self, items: list[_Item]) -> list[Tree]:
        learner = self._source.learner
        if learner.network.has_batch_norm and len(items) > 1:
            raise ValueError("with batch norm, the rows of each request have statistics of their own")
        x = _joined(items)
        with torch.no_grad():
            params = learner.layout.named(learner.state.flat)
            return _split(run_model(learner.network.predict, "predict", params, x, x=x), items)


def _check_rows(learner: Learner, x: Tree) -> None:
    """Reject rows of another kind than those stored."""
    stored = learner.memory.store.data
    if stored is not None and _kinds(x) != _kinds(stored.x):
        raise ValueError(f"x has rows of {row_signature(x)}, the data so far has {row_signature(stored.x)}")


def _kinds(tree: Tree) -> list[tuple[torch.dtype, torch.Size]]:
    return [(leaf.dtype, leaf.shape[1:]) for leaf in tensors_of(tree)]


def _together(items: list[_Item], call: Callable[[list[_Item]], list[Tree]], name: str) -> None:
    """Predict for some requests at once; if that fails, for each alone, so that one cannot make others fail."""
    if not items:
        return
    try:
        found = call(items)
    except Exception as error:
        if len(items) == 1:
            items[0].error = error
            return
        for item in items:
            _together([item], call, name)
        return
    for item, value in zip(items, found, strict=True):
        setattr(item, name, value)


def _joined(items: Iterable[_Item]) -> Tree:
    """The rows of several requests in one tree."""
    trees = [item.x for item in items]
    if len({row_signature(tree) for tree in trees}) > 1:
        raise ValueError("the rows of the requests differ")
    return trees[0] if len(trees) == 1 else tree_map(lambda *leaves: torch.cat(leaves), *trees)


def _split(tree: Tree, items: list[_Item]) -> list[Tree]:
    """The inverse of `_joined`, for predictions."""
    found, start = [], 0
    for item in items:
        stop = start + num_rows(item.x)
        found.append(rows(tree, slice(start, stop)))
        start = stop
    return found
