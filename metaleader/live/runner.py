"""Where the updates of a session run: in a thread or, so that calls do not wait for them, in a process of their own."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from metaleader.engine.hook import OwnGradient
from metaleader.learners.learner import Learner
from metaleader.learners.optimizer import State
from metaleader.live import factories, worker
from metaleader.live.process import EndedError, RefusedError, UpdateProcess
from metaleader.live.update import PreparedUpdate

_log = logging.getLogger("metaleader")
# Updates move to a process once they have taken this time. If it ends this often during the same updates, a thread
# makes them.
_SECONDS, _ATTEMPTS = 1.0, 3
_START_SECONDS = 120.0
# Methods that may make updates depend on more than the state.
_METHODS = ("update", "observe", "state_dict", "load_state_dict")


class Runner:
    """Runs the updates of a session.

    Args:
        folder: of the session, for messages.
        learner: of the session.
        factory: built it.
        mode: "thread"; "process"; or "background", a process once updates have taken a second and if that is possible.

    Attributes:
        reason: why updates run in a thread for good, or None.

    Raises:
        ValueError: if the mode is "process", and that is not possible.
    """

    def __init__(
        self,
        folder: Path,
        learner: Learner,
        factory: Callable[[], Learner],
        mode: Literal["background", "process", "thread"],
    ) -> None:
        self._folder, self._learner, self._seconds = folder, learner, 0.0
        self._process: UpdateProcess | None = None
        self._is_new = False  # whether the process is being started
        self.reason = 'updates="thread"' if mode == "thread" else _obstacle(learner)
        self._request: dict[str, Any] = {}
        self._expected: dict[str, Any] = {}
        if self.reason is None:
            try:
                self._request = {"factory": factories.described(factory), "threads": torch.get_num_threads()}
                self._expected = worker.facts_of(learner)
            except (ValueError, OSError) as error:
                self.reason = f"the function that builds the learner cannot be called by another process: {error}"
        if mode == "process":
            if self.reason is None:
                self._start()
                self._wait_for_start()
            if self.reason is not None:
                raise ValueError(f'updates="process" is not possible: {self.reason}; use updates="background"')

    @property
    def pid(self) -> int | None:
        """The number of the process, or None."""
        return None if self._process is None or self._is_new else self._process.pid

    def run(self, prepared: PreparedUpdate) -> State:
        """Take updates; returns the state after them.

        Raises:
            FailedUpdate: if an update fails.
        """
        if prepared.batches is None or not self._is_ready():
            return self._in_thread(prepared)
        for _ in range(_ATTEMPTS):
            assert self._process is not None
            try:
                return self._process.run(self._learner, prepared)
            except EndedError as error:
                _log.warning("%s: the process of the updates %s; it is started again", self._folder, error)
            except RefusedError as error:
                self._give_up(f"the process {error}")
                return self._in_thread(prepared)
            # The thread does not take over: these updates may be what ended the process, for want of memory.
            self._start()
            self._wait_for_start()
            if self.reason is not None:
                return self._in_thread(prepared)
        self._give_up(f"the process ended {_ATTEMPTS} times during the same updates")
        return self._in_thread(prepared)

    def close(self) -> None:
        """End the process, which has nothing that could be lost."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _in_thread(self, prepared: PreparedUpdate) -> State:
        start = time.perf_counter()
        try:
            return prepared.run()
        finally:
            self._seconds += time.perf_counter() - start

    def _is_ready(self) -> bool:
        """Whether the process can be used; starts it when it is due."""
        if self._process is None:
            if self._seconds < _SECONDS:
                return False
            self.reason = self.reason or _obstacle(self._learner)
            if self.reason is not None:
                if self._seconds < float("inf"):  # once
                    self._seconds = float("inf")
                    _log.info("%s: updates run in a thread, since %s", self._folder, self.reason)
                return False
            self._start()
        if self._is_new and self._process is not None and self._process.has_answer():
            self._wait_for_start()
        return self._process is not None and not self._is_new

    def _start(self) -> None:
        self.close()
        self._is_new = True
        try:
            self._process = UpdateProcess(self._request)
        except OSError as error:
            self._give_up(f"no process can be started ({error})")

    def _wait_for_start(self) -> None:
        """Wait until the process has built the learner."""
        found = {}
        for attempts_left in reversed(range(_ATTEMPTS)):
            if self._process is None:
                return
            try:
                found = self._process.answer(_START_SECONDS)
                break
            except (EndedError, RefusedError) as error:
                if attempts_left == 0 or isinstance(error, RefusedError):
                    self._give_up(f"the process {error}")
                    return
            self._start()
        if found != self._expected:
            names = [name for name in self._expected if found.get(name) != self._expected[name]]
            self._give_up(f"the process has another learner; these differ: {', '.join(names)}")
            return
        self._is_new = False

    def _give_up(self, reason: str) -> None:
        self.close()
        self.reason, self._seconds = reason, float("inf")
        _log.warning("%s: from now on updates run in a thread: %s", self._folder, reason)


def _obstacle(learner: Learner) -> str | None:
    """Why the updates of a learner cannot run in another process, or None."""
    own = learner.definition.objective.own_gradient
    names = [name for name in _METHODS if getattr(type(learner), name) is not getattr(Learner, name)]
    if worker.is_worker:
        return "this is such a process"
    if learner.device.type != "cpu":
        return f"the learner is on {learner.device}, whose memory another process would take a part of"
    if names:
        return f"{type(learner).__name__} overrides {', '.join(names)}"
    if learner.options.shards > 1:
        return "the learner has shards"
    if isinstance(own, OwnGradient) and not own.shared:
        return f"{own.name} uses attributes that may change"
    if not sys.executable:
        return "the path of the Python interpreter is unknown"
    return None
