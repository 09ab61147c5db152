"""The other end of the process that makes the updates of a session; see `worker`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

from metaleader.learners.learner import Learner
from metaleader.learners.optimizer import State
from metaleader.learners.together import FailedUpdate
from metaleader.live import worker
from metaleader.live.update import PreparedUpdate

_END_SECONDS = 1.0
_CODE = (
    "import sys, json; number, parent, sys.path[:] = json.loads(sys.argv[1]);"
    " from metaleader.live.worker import main; main(number, parent)"
)


class EndedError(Exception):
    """The process has ended."""


class RefusedError(Exception):
    """The process cannot make updates."""


class UpdateProcess:
    """A process that makes updates.

    Args:
        request: the function that builds the learner, and the number of threads.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            argument = json.dumps([theirs.fileno(), os.getpid(), sys.path])
            try:
                # A process group of its own: Ctrl-C does not reach it.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, argument],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    process_group=0,
                )
            except BaseException:
                self._channel.close()
                raise
        self._state: State | None = None  # the last one that it has computed
        with contextlib.suppress(OSError):
            worker.send(self._channel, request)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def has_answer(self) -> bool:
        """Whether it has sent something, or has ended."""
        return bool(select.select([self._channel], [], [], 0)[0])

    def answer(self, timeout: float | None = None) -> dict[str, Any]:
        """Its answer.

        Raises:
            EndedError: if it has ended.
            RefusedError: if it failed, or does not answer in time.
        """
        self._channel.settimeout(timeout)
        try:
            found = worker.receive(self._channel)
        except TimeoutError:
            raise RefusedError(f"did not answer within {timeout:g} s") from None
        except (EOFError, OSError, ValueError):
            raise EndedError(self._end()) from None
        if "error" in found:
            raise RefusedError(f"failed: {found['error']}")
        return found

    def run(self, learner: Learner, prepared: PreparedUpdate) -> State:
        """Take updates; returns the state after them.

        Raises:
            FailedUpdate: if an update fails.
            EndedError: if the process has ended.
            RefusedError: if it failed.
        """
        state = None if prepared.state is self._state else prepared.state
        assert prepared.batches is not None
        self._state = None
        try:
            worker.send(self._channel, worker.request_of(learner, state, prepared.steps, prepared.batches))
        except OSError:
            raise EndedError(self._end()) from None
        except ValueError as error:  # data of a kind that no file of safetensors holds
            raise RefusedError(f"cannot be sent the data: {error}") from error
        found = self.answer()
        if "failed" in found:
            raise FailedUpdate
        self._state = worker.state_of_tree(learner, found["state"])
        return self._state

    def close(self) -> None:
        """End the process, and wait for its end."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _end(self) -> str:
        """How the process has ended."""
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if status >= 0:
            return f"ended with status {status}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
        return f"was ended by signal {-status}"
