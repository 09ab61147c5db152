"""The calls of a service: those of a session or a replica, for an event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from metaleader.live.errors import UnknownTaskError
from metaleader.live.replica import Replica
from metaleader.live.serve.batcher import Batcher, Known, Predicted
from metaleader.live.serve.bodies import rows_of, tree_of
from metaleader.live.serve.history import History
from metaleader.live.serve.metrics import Metrics
from metaleader.live.session import Session
from metaleader.memory.by_task import TaskBuffer
from metaleader.tasks import Tree, as_tensors, num_rows, tensors_of, to_device

_log = logging.getLogger("metaleader")
_T = TypeVar("_T")
# Threads that wait for the disk, errors listed, named predictions whose error is measured when their label comes, and
# the numbers that one of these may have.
_THREADS, _ERRORS, _PREDICTIONS, _NUMBERS = 64, 50, 10_000, 1000
_SAVE_SECONDS, _STATUS_SECONDS = 30.0, 0.5
_READY_SECONDS = 10.0


class RefusedError(Exception):
    """A call that is not made.

    Attributes:
        status: the status of the response.
        message: for its body.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on requests.

    Attributes:
        body: bytes of a body.
        rows: rows of a tensor.
        tasks: tasks with data; observations of further tasks are refused.
        requests: requests at the same time.
        seconds: the time in which a body must arrive.
    """

    body: int = 16 * 2**20
    rows: int = 10_000
    tasks: int = 1_000_000
    requests: int = 256
    seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"the limit {name} must be above 0, got {value}")


class Service:
    """The calls of a service.

    Args:
        source: the session or replica; `close` closes it.
        limits: bounds on requests.
        window: the time that a prediction waits for others, in seconds.
        measure: whether observations are predicted before they are stored, to measure the prequential error.
    """

    def __init__(
        self, source: Session | Replica, limits: Limits, *, window: float = 0.002, measure: bool = True
    ) -> None:
        self.source, self.limits, self._measures = source, limits, measure
        self.is_replica = isinstance(source, Replica)
        self.history = History(None if self.is_replica else Path(source.folder))
        self.metrics = Metrics(self)
        self.errors: deque[dict[str, Any]] = deque(maxlen=_ERRORS)
        self.batcher = Batcher(source, window, limits.requests, self.metrics.batch.observe)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="metaleader requests")
        self._new: set[str] = set()
        self._predictions: OrderedDict[str, tuple[str, Predicted]] = OrderedDict()
        self._status: tuple[float, dict[str, Any]] | None = None
        self._saver: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Save the history now and then."""

        async def save() -> None:
            while True:
                await asyncio.sleep(_SAVE_SECONDS)
                try:
                    await self._run(self.history.save)
                except OSError as error:
                    _log.warning("%s", error)

        self._saver = asyncio.get_running_loop().create_task(save())

    def close(self) -> None:
        """Finish all calls; write a checkpoint and the history."""
        if self._saver is not None:
            self._saver.cancel()
        self._threads.shutdown()
        self.batcher.close()
        try:
            self.history.save()
        except OSError as error:
            _log.warning("%s", error)
        finally:
            self.source.close()

    # Predictions.

    async def infer(self, task: str, tensors: Mapping[str, Any], name: str | None) -> Predicted:
        """Predictions for a task; those with a name can be given targets later."""
        x = self._inputs(tensors)
        session = None if name is None else self._writer()
        predicted = await self.batcher.predict(task, x, has_unadapted=name is not None and self._measures)
        if session is not None and name is not None:
            await self._run(lambda: session.remember(x, task=task, name=name))
            if self._measures and sum(leaf.numel() for leaf in tensors_of(predicted.y)) <= _NUMBERS:
                self._predictions.setdefault(name, (task, predicted))  # of a repeated call, the first
                while len(self._predictions) > _PREDICTIONS:
                    self._predictions.popitem(last=False)
        return predicted

    async def infer_variance(self, task: str, tensors: Mapping[str, Any]) -> tuple[Tree, Tree, Known]:
        """Predictions and their variances, for learners that have one."""
        x, found = self._inputs(tensors), self.known(task)
        if not found.datapoints:
            raise RefusedError(400, f"there is no variance for task {task!r}, which has no data")
        return *(await self._run(lambda: self.source.predict(x, task, variance=True))), found

    # Changes.

    async def observe(self, task: str, tensors: Mapping[str, Any], key: str | None) -> bool:
        """Store datapoints of a task; False if the key was used before."""
        session, x, y = self._writer(), self._inputs(tensors), tree_of(tensors, "y")
        is_new = not self.known(task).datapoints and task not in self._new
        if is_new:
            if len(self.memory) + len(self._new) >= self.limits.tasks:
                raise RefusedError(429, f"there are {self.limits.tasks} tasks, the limit; delete some, or raise it")
            self._new.add(task)
        try:
            predicted = await self._predicted(task, x) if self._measures else None
            return await self._run(lambda: self._observe(session, task, x, y, key, predicted))
        finally:
            if is_new:
                self._new.discard(task)

    async def label(self, name: str, tensors: Mapping[str, Any]) -> bool:
        """Give the targets of a named prediction; False if it has them."""
        session, y = self._writer(), tree_of(tensors, "y")

        def label() -> bool:
            labelled = session.label(name, y)
            task, predicted = self._predictions.pop(name, (None, None))
            if labelled and task is not None and predicted is not None:
                self._count(task, y, predicted)
            return labelled

        return await self._run(label)

    async def forget(self, task: str) -> None:
        """Delete all data of a task."""
        session = self._writer()

        def forget() -> None:
            try:
                session.forget(task)
            except UnknownTaskError as error:
                raise RefusedError(404, f"no data of task {task!r}") from error
            self.history.forget(task)
            for name in [name for name, (other, _) in list(self._predictions.items()) if other == task]:
                self._predictions.pop(name, None)

        await self._run(forget)

    async def readmit(self, task: str) -> None:
        """Draw a task again that was set aside."""
        session = self._writer()
        if not self.known(task).datapoints:
            raise RefusedError(404, f"no data of task {task!r}")
        if task not in self.source.learner.set_aside:
            raise RefusedError(409, f"task {task!r} is not set aside")
        await self._run(lambda: session.readmit(task))

    # Facts.

    @property
    def memory(self) -> TaskBuffer:
        """The data of the learner."""
        memory = self.source.learner.memory
        assert isinstance(memory, TaskBuffer)
        return memory

    def known(self, task: str) -> Known:
        """What the learner knows of a task, read without a lock."""
        return Known(self.memory.size(task), self.memory.number(task))

    async def tasks(self) -> dict[str, int]:
        """The number of datapoints by task."""
        return await self._run(lambda: self.source.learner.tasks)

    async def status(self) -> dict[str, Any]:
        """The state of the session or replica."""
        return await self._run(self.read_status)

    def read_status(self) -> dict[str, Any]:
        """The state of the session or replica, which may be half a second old."""
        now = time.monotonic()
        if self._status is None or now - self._status[0] > _STATUS_SECONDS:
            self._status = now, self.source.status()
        return self._status[1]

    async def not_ready(self) -> str | None:
        """Why calls cannot be made at present, or None."""
        status = await self.status()
        if self.is_replica:
            is_late = status["error"] is not None and status["age"] > _READY_SECONDS
            return f"the replica cannot follow: {status['error']}" if is_late else None
        return status["stopped"]

    # Parts.

    def _writer(self) -> Session:
        if isinstance(self.source, Replica):
            raise RefusedError(403, "this server is a replica, which only predicts; send the request to the writer")
        return self.source

    def _inputs(self, tensors: Mapping[str, Any]) -> Tree:
        if (rows := rows_of(tensors)) > self.limits.rows:
            raise RefusedError(413, f"a tensor has {rows} rows, the limit is {self.limits.rows}")
        if any(tensor.ndim == 0 or len(tensor) != rows for tensor in tensors.values()) or rows == 0:
            sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise ValueError(f"all tensors must have the same number of rows, at least one; got {sizes or 'none'}")
        return tree_of(tensors, "x")

    async def _predicted(self, task: str, x: Tree) -> Predicted | None:
        try:
            return await self.batcher.predict(task, x, has_unadapted=True)
        except ValueError:  # the observation is valid or not, whatever the net predicts
            return None

    def _observe(
        self, session: Session, task: str, x: Tree, y: Tree, key: str | None, predicted: Predicted | None
    ) -> bool:
        stored = session.observe(x, y, task=task, key=key)
        if stored and predicted is not None:
            self._count(task, y, predicted)
        return stored

    def _count(self, task: str, y: Tree, predicted: Predicted) -> None:
        """Measure the error of predictions made before their targets were stored, as they are now."""
        learner = self.source.learner
        try:
            target = to_device(as_tensors(y, "y", learner.state.flat.dtype), learner.device)
            stored = learner.memory.store.data
            if isinstance(target, Tensor) and stored is not None and target.ndim < stored.y.ndim:
                target = target[:, None]  # as the learner stores it
            adapted, unadapted = (
                float(learner.network.mean_loss(y, target)) for y in (predicted.y, predicted.unadapted)
            )
        except (ValueError, RuntimeError) as error:
            _log.warning("the prequential error of task %r is not measured: %s", task, error)
            return
        rows, known = num_rows(target), predicted.known
        self.history.add(task, rows, adapted, unadapted, known.datapoints, known.number)
        self.metrics.count_losses(rows, adapted, unadapted)

    async def _run(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)
