"""The thread that sees to the updates of a session, and writes its checkpoints."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from metaleader.learners.together import FailedUpdate
from metaleader.live import checkpoints
from metaleader.live.calls import Update
from metaleader.live.recovery import Opened, state_of
from metaleader.live.runner import Runner
from metaleader.live.update import PreparedUpdate
from metaleader.live.writer import Writer

_log = logging.getLogger("metaleader")
# Updates in one record, whose datapoints are gathered at once
_CHUNK = 10
# A checkpoint is written after this time of updates, or this number of records.
_SECONDS, _RECORDS = 10.0, 100_000


class Updater:
    """Makes the updates that are due.

    An update is written to the journal before it begins. Its place there says which data it uses; data that arrives
    while it runs is used by the next one. Its parameters replace the old ones all at once.

    Args:
        folder: the folder of the checkpoints.
        opened: the session.
        writer: the thread that writes its journal.
        runner: takes the updates.
        share: the part of the time in which updates run, above 0 and at most 1.

    Attributes:
        error: why the last update failed, or None.
        checkpoint: the number of the last record that a checkpoint includes.
        duration: of the last chunk of updates, in seconds.
    """

    def __init__(self, folder: Path, opened: Opened, writer: Writer, runner: Runner, share: float) -> None:
        self._folder, self._writer, self.runner, self._share = folder, writer, runner, share
        self._journal, self._ledger = opened.journal, opened.ledger
        self.error: str | None = None
        self.checkpoint, self.duration = opened.checkpoint, 0.0
        self._running = threading.Lock()  # held during an update, and while files other than the journal are written
        self._changed = threading.Condition()
        self._busy = self._closing = False
        self._thread = threading.Thread(target=self._loop, name="metaleader updates", daemon=True)

    def start(self) -> None:
        """Begin with the updates that are due."""
        self._thread.start()

    def wake(self) -> None:
        """Look again whether something is due."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait until no update is due; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or not self._is_working(), timeout)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context no update and no checkpoint is under way."""
        with self._running:
            yield

    def close(self) -> None:
        """Finish the update under way, and write a checkpoint if anything has changed since the last."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.runner.close()
        if self._writer.failure is None and self._ledger.number > self.checkpoint:
            self.write_checkpoint()

    def update(self, steps: int) -> None:
        """Make updates.

        Raises:
            ValueError: if they fail, and it is not the fault of one task.
        """
        with self._running:
            start = time.perf_counter()
            try:
                self._update(steps)
                self.error = None
            except ValueError as error:
                self.error = str(error)
                raise
            except OSError:
                raise
            except BaseException as error:
                # The update is recorded, but was not made.
                self._writer.failure = error
                raise
            finally:
                self.duration = time.perf_counter() - start

    def _update(self, steps: int) -> None:
        ledger, learner = self._ledger, self._ledger.learner
        call = Update(learner.step, steps, ledger.next_update_is_exclusive)
        if call.exclusive:
            self._writer.submit(call)
            return

        def begin() -> PreparedUpdate:
            ledger.begin_update(call)
            return PreparedUpdate(learner, steps)

        prepared = self._writer.submit(call, begin)
        try:
            with ledger.timed():
                learner.state = self.runner.run(prepared)
            ledger.used = None
        except FailedUpdate:
            self._writer.run(lambda: ledger.fail_update(call))

    def write_checkpoint(self) -> None:
        """Write a checkpoint of all calls so far."""
        with self._running:
            state = self._writer.run(lambda: state_of(self._ledger, self._writer.codec))
            self._ledger.seconds = 0.0
            checkpoints.write(self._folder, state)
            self._journal.sync()
            self.checkpoint = state["number"]

    def _is_working(self) -> bool:
        return self._busy or (self._ledger.due > 0 and self._writer.failure is None)

    def _checkpoint_is_due(self) -> bool:
        behind = self._ledger.number - self.checkpoint
        return behind > 0 and (self._ledger.seconds >= _SECONDS or behind >= _RECORDS)

    def _loop(self) -> None:
        chunk = max(1, _CHUNK // self._ledger.learner.definition.updates_per_step)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._is_working() or self._checkpoint_is_due())
                if self._closing:
                    return
                self._busy = True
            pause = self._step(chunk)
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing, pause)

    def _step(self, chunk: int) -> float:
        """Do what is due; returns the time to pause."""
        try:
            if self._ledger.due > 0:
                self.update(min(self._ledger.due, chunk))
            if self._checkpoint_is_due():
                self.write_checkpoint()
            return self.duration * (1 / self._share - 1)
        except ValueError as error:
            _log.warning("the updates of %s failed and were not made: %s", self._folder, error)
        except OSError as error:
            _log.warning("%s", error)
            self.error = str(error)
        except BaseException:
            _log.exception("the session stopped")
        return 1.0
