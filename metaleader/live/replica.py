"""A copy of a session's learner in another process, which predicts and never writes.

Data is read from the journal a moment after it was written. Parameters are those of the newest checkpoint: a replica
makes no updates.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from metaleader.learners.learner import Learner
from metaleader.learners.optimizer import state_from_tree
from metaleader.live import checkpoints
from metaleader.live.calls import Call, Codec, Observe
from metaleader.live.journal import NAME, Journal
from metaleader.live.ledger import Ledger
from metaleader.live.opening import built
from metaleader.live.recovery import decoded, restore_first
from metaleader.tasks import Tree, as_name

_log = logging.getLogger("metaleader")
# Records read at once: a longer read would make a `forget` of the writer wait.
_CHUNK = 1000
_ATTEMPTS = 5


class Replica:
    """Predicts from the folder of a session that another process writes, and follows it.

    Methods may be called from several threads. The writer may stop and start again.

    Args:
        folder: the folder of a session.
        factory: builds the learner, with the settings of the session's.
        poll: the time between two looks at the folder, in seconds.

    Attributes:
        learner: the learner; do not change it.
        error: why the folder could not be read at the last look, or None.

    Raises:
        FileNotFoundError: if the folder holds no session.
        ValueError: if its settings differ from those of the learner, or it is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str], factory: Callable[[], Learner], *, poll: float = 0.1) -> None:
        if not poll > 0:
            raise ValueError(f"poll must be above 0, got {poll}")
        self.folder, self._factory, self._poll_seconds = Path(folder), factory, poll
        if not (self.folder / NAME).is_file():
            raise FileNotFoundError(f"no session in {folder}: {NAME} is missing; start the writer first")
        self.error: str | None = None
        self._copy = self._loaded()
        self._looked = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="metaleader replica", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def learner(self) -> Learner:
        """The learner."""
        return self._copy.ledger.learner

    def predict(self, x: Tree, task: str, *, variance: bool = False) -> Any:
        """Predictions of the net adapted to all data of a task, as `Learner.predict`."""
        return self.learner.predict(x, task=as_name(task), variance=variance)

    def predict_many(self, xs: Mapping[str, Tree]) -> dict[str, Any]:
        """Predictions for several tasks at once, as `Learner.predict_many`."""
        return self.learner.predict_many(xs)

    def status(self) -> dict[str, Any]:
        """The state of the replica, as plain values.

        Returns:
            `tasks`, `datapoints` and `memory_bytes` in memory; `set_aside`, as in the newest checkpoint when the folder
            was opened; `step`, the number of updates in the parameters; `behind`, the number of observations that these
            do not include; `record`, the last record of the journal read; `checkpoint`, the record of the parameters;
            `age`, the seconds since the journal was last looked at with success; `error`; `bytes` on disk.
        """
        copy, tasks = self._copy, self.learner.tasks
        return {
            "folder": str(self.folder),
            "tasks": len(tasks),
            "datapoints": sum(tasks.values()),
            "memory_bytes": self.learner.memory.num_bytes,
            "set_aside": self.learner.set_aside,
            "step": self.learner.step,
            "behind": copy.behind,
            "record": copy.restored,
            "checkpoint": copy.checkpoint,
            "age": time.monotonic() - self._looked,
            "error": self.error,
            "bytes": sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()),
        }

    def close(self) -> None:
        """Stop following, and close the files."""
        self._closing.set()
        self._thread.join()
        self._copy.journal.close()

    def _loaded(self) -> _Copy:
        for attempts_left in reversed(range(_ATTEMPTS)):
            copy = _Copy(self.folder, built(self._factory))
            try:
                copy.load()
                return copy
            except BaseException as error:
                replaced = isinstance(error, ValueError) and copy.is_replaced()
                copy.journal.close()
                if attempts_left == 0 or not replaced:
                    raise
        raise AssertionError("unreachable")

    def _loop(self) -> None:
        while not self._closing.wait(self._poll_seconds):
            try:
                if not self._copy.follow():
                    before, self._copy = self._copy, self._loaded()
                    before.journal.close()
                self.error, self._looked = None, time.monotonic()
            except (OSError, ValueError) as error:
                if self.error is None:
                    _log.warning("the replica of %s cannot follow: %s", self.folder, error)
                self.error = str(error)


class _Copy:
    """What a replica has read of one journal.

    Attributes:
        ledger: the learner.
        journal: the journal.
        read: the number of the last record read.
        restored: the number of the last record that the learner has.
        checkpoint: the number of the record whose parameters the learner has.
    """

    def __init__(self, folder: Path, learner: Learner) -> None:
        self._folder, self.ledger, self._codec = folder, Ledger(learner, 0, 0), Codec()
        self._inode = os.stat(folder / NAME).st_ino
        self.journal, self.read, self.restored, self.checkpoint = Journal(folder, readonly=True), 0, 0, 0
        self._first = self.journal.first
        # The observations after the checkpoint, and whether updates follow them; the number of those before it.
        self._observed: dict[int, bool] = {}
        self._behind = 0

    @property
    def behind(self) -> int:
        """The number of observations that the parameters do not include."""
        return self._behind + sum(self._observed.values())

    def load(self) -> None:
        """Read everything."""
        ledger, calls = self.ledger, decoded(self._records(), self._codec)
        self.checkpoint = restore_first(self._folder, self.journal, calls, ledger)
        state = self._newest()
        ledger.refused = [] if state is None else list(state["refused"])
        for number, call in calls:
            self._restore(number, call)
            if state is not None and number == state["number"]:
                ledger.load_state_dict(state)
                self._take(state)
        self.restored = self.read

    def follow(self) -> bool:
        """Read what is new; False if the journal was replaced, or must be loaded again for another reason."""
        try:
            if self.is_replaced():
                return False
            for number, call in decoded(self._records(), self._codec):
                self._restore(number, call)
            self.restored = self.read
        except ValueError:
            if self.is_replaced():
                return False
            raise
        state = self._newest()
        if state is None:
            return True
        learner = self.ledger.learner
        # Observations that were refused only by their updates, or a learner whose state is more than its parameters.
        if (
            self._observed.keys() & set(state["refused"])
            or type(learner).load_state_dict is not Learner.load_state_dict
        ):
            return False
        learner.state = state_from_tree(state["learner"], learner.definition.objective, learner.state, learner.rule)
        self._take(state)
        return True

    def is_replaced(self) -> bool:
        """Whether the journal was written anew, by `forget` or a repair."""
        if os.stat(self._folder / NAME).st_ino != self._inode:
            return True
        self.journal.refresh()
        return self.journal.first != self._first

    def _take(self, state: dict[str, Any]) -> None:
        """Count a checkpoint as the one whose parameters the learner has."""
        self.checkpoint, self._behind = state["number"], state["behind"]
        self._observed = {number: value for number, value in self._observed.items() if number > self.checkpoint}

    def _restore(self, number: int, call: Call) -> None:
        if isinstance(call, Observe):
            call = call._replace(key=None)  # only a writer needs it
        try:
            self.ledger.restore(number, call)
        except ValueError:
            return  # refused, as when the call was made
        if isinstance(call, Observe) and number not in self.ledger.refused:
            self._observed[number] = call.updates != "none"

    def _newest(self) -> dict[str, Any] | None:
        """The newest checkpoint of what the journal has, if it is newer than the one in use."""
        for path in checkpoints.paths(self._folder):
            number = int(path.stem.partition("-")[2])
            if number <= self.checkpoint:
                return None
            if number > self.journal.last:
                continue
            try:
                return checkpoints.read(path)
            except FileNotFoundError:
                continue  # the writer has deleted it
            except ValueError as error:
                _log.warning("%s; an older one is used", error)
        return None

    def _records(self) -> Iterator[tuple[int, bytes]]:
        """The records that were not read yet."""
        while True:
            chunk = list(itertools.islice(self.journal.read(self.read + 1), _CHUNK))
            if not chunk:
                return
            for number, content in chunk:
                self.read = number
                yield number, content
