"""A learner that lives in a folder: every call that returned survives the end of its process."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from metaleader.learners.data import checked_batch, inputs_of
from metaleader.learners.learner import Learner
from metaleader.live.calls import Observe, Predict, Readmit, Updates, digest, fingerprint
from metaleader.live.errors import ConflictError, UnknownPredictionError
from metaleader.live.folder import check_folder
from metaleader.live.opening import built, check_numbers, locked
from metaleader.live.recovery import open_folder
from metaleader.live.repair import repair_journal
from metaleader.live.rewriting import copy_to, forget, is_recorded, rewrite
from metaleader.live.runner import Runner
from metaleader.live.together import Together
from metaleader.live.updater import Updater
from metaleader.live.writer import Writer
from metaleader.tasks import Tree, as_name

_log = logging.getLogger("metaleader")
Mode = Literal["background", "process", "thread", "inline"]
_MODES: dict[Mode, Updates] = {"background": "later", "process": "later", "thread": "later", "inline": "now"}


class Session:
    """A learner that lives in a folder. A call that returned is on disk, and is never lost or made twice.

    Opening the folder again continues from the same state, bit for bit, also after a kill at any moment. Methods may be
    called from several threads; their effect is that of calls made one after the other. One process at a time can open
    a folder.

    Args:
        folder: the folder; it is created if there is none. A new session needs an empty one.
        factory: builds the learner, with the same settings each time; data that it has is taken over into a new folder.
        updates: "background": `observe` returns when the data is on disk, and the updates follow; "inline": each
            `observe` makes its updates before it returns. Background updates run in a thread; once they have taken a
            second, they run in a process of their own if another process can import the factory by name. "process"
            requires that from the start, and "thread" excludes it. The state is the same in all three.
        share: the part of the time in which background updates run, above 0 and at most 1.
        keys: the number of keys that are remembered, those of the latest calls.
        predictions: the number of predictions that can be given a label later, the latest.
        repair: if the folder is damaged, continue from everything that is intact. A warning names what is lost.

    Raises:
        ValueError: if the factory builds no learner of many tasks; if another process has opened the folder, its
            settings differ from those of the learner, it is damaged, or it holds other files; for updates="process" if
            that is not possible.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        factory: Callable[[], Learner],
        *,
        updates: Mode = "background",
        share: float = 0.5,
        keys: int = 100_000,
        predictions: int = 100_000,
        repair: bool = False,
    ) -> None:
        if updates not in _MODES:
            raise ValueError(f"updates must be one of {', '.join(_MODES)}; got {updates!r}")
        check_numbers(share, keys=keys, predictions=predictions)
        self.folder = Path(folder)
        self._mode: Updates = _MODES[updates]
        self._process, self._closed = os.getpid(), False
        check_folder(self.folder)
        learner = built(factory)
        self._lock = locked(self.folder)
        try:
            if repair:
                repair_journal(self.folder, built(factory), keys, predictions)
            opened = open_folder(self.folder, learner, keys, predictions, repair)
            try:
                runner = Runner(self.folder, learner, factory, "thread" if updates == "inline" else updates)
            except BaseException:
                opened.journal.close()
                raise
        except BaseException:
            self._lock.close()
            raise
        self._journal, self._ledger = opened.journal, opened.ledger
        self._together = Together(learner)
        self._writer = Writer(opened.journal, opened.codec, opened.ledger, lambda: self._updater.wake())
        self._updater = Updater(self.folder, opened, self._writer, runner, share)
        self._updater.start()
        atexit.register(self._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def learner(self) -> Learner:
        """The learner; change it by the methods of the session only, since other changes are not recorded."""
        return self._ledger.learner

    def observe(self, x: Tree, y: Tree, *, task: str, key: str | None = None, update: bool = True) -> bool:
        """Store datapoints of a task; they are on disk when this returns.

        Args:
            x: inputs, as for `Learner.observe`.
            y: targets.
            task: the name of the task.
            key: a name for this call. Calling again with the same key and data has no effect, so that a call whose
                outcome is unknown can be repeated.
            update: False makes no updates for these datapoints.

        Returns:
            True; False if the key was used before.

        Raises:
            ValueError: for data that the learner refuses, or a key that was used for other data.
            OSError: if the journal cannot be written; on a full disk nothing has changed.
        """
        self._check()
        return self._observe(x, y, as_name(task), None if key is None else digest("key", as_name(key, "a key")), update)

    def label(self, prediction: str, y: Tree) -> bool:
        """Give the targets of a prediction, which is then an observation of its task.

        Args:
            prediction: the name that `predict` was called with.
            y: targets, one row per row of the prediction.

        Returns:
            True; False if the prediction has its targets already.

        Raises:
            ValueError: if there is no such prediction, or the learner refuses the targets.
        """
        self._check()
        key = digest("prediction", as_name(prediction, "the name of a prediction"))
        call = self._writer.run(lambda: self._waiting(key))
        if call is not None:
            return self._observe(call.x, y, call.task, key, True)
        if key in self._ledger.keys:
            return False
        raise UnknownPredictionError(
            f"no prediction {prediction!r} waits for its targets: call predict(..., name={prediction!r}) first"
            f" (the latest {self._ledger.max_waiting} are remembered)"
        )

    def _observe(self, x: Tree, y: Tree, task: str, key: bytes | None, update: bool) -> bool:
        batch = checked_batch(self.learner, x, y, task)
        updates: Updates = self._mode if update else "none"
        return self._writer.submit(Observe(task, batch.x, batch.y, key, updates))

    def predict(self, x: Tree, task: str, *, variance: bool = False, name: str | None = None) -> Any:
        """Predictions of the net adapted to all data of a task, from the newest parameters.

        Calls that several threads make at the same time are computed together, with the same result up to rounding.

        Args:
            x: inputs, one row per datapoint.
            task: the name of the task.
            variance: also return the predictive variance, as `Learner.predict`.
            name: a name for this prediction, to give its targets later by `label`. The inputs are then on disk when
                this returns.

        Returns:
            The predictions, or with `variance` the pair of predictions and variances.

        Raises:
            ValueError: for a task without data, inputs that the model refuses, or a name that was used for others.
        """
        self._check()
        task = as_name(task)
        prediction = self.learner.predict(x, task, variance=True) if variance else self._together.predict(x, task)
        if name is not None:
            self.remember(x, task=task, name=name)
        return prediction

    def remember(self, x: Tree, *, task: str, name: str) -> None:
        """Store inputs whose targets come later by `label`, as `predict` does with a name; the task may have no data.

        Calling again with the same name and inputs has no effect, also when the prediction has its targets.

        Raises:
            ValueError: for a name that was used for other inputs.
        """
        self._check()
        key = digest("prediction", as_name(name, "the name of a prediction"))
        call = Predict(as_name(task), inputs_of(self.learner, x, "remember"), key)
        waiting = self._writer.run(lambda: self._waiting(key))
        before = self._ledger.keys.get(key) if waiting is None else fingerprint(waiting)
        if before is None:
            self._writer.submit(call)
        elif before != fingerprint(call):
            raise ConflictError(f"the name {name!r} was used for another prediction; use one name per prediction")

    def predict_many(self, xs: Mapping[str, Tree]) -> dict[str, Any]:
        """Predictions for several tasks at once, as `Learner.predict_many`."""
        self._check()
        return self.learner.predict_many(xs)

    def _waiting(self, key: bytes) -> Predict | None:
        number = self._ledger.waiting.get(key)
        call = self._writer.codec.decode(self._journal.get(number)) if number is not None else None
        return call if isinstance(call, Predict) else None

    def forget(self, task: str) -> None:
        """Delete all data of a task for good: from memory, and from the files, which are written anew.

        That includes inputs of predictions that wait for their targets, and data that limits of memory have dropped but
        the journal still has. For a task that the learner has no data of, the journal is searched, which reads all of
        it. What updates have learned from the data stays in the parameters. Backups made before keep the data.

        Raises:
            ValueError: for a task that neither the learner nor the files have data of.
            OSError: if the disk has no room for the new files; nothing has changed then.
        """
        self._check()
        name = as_name(task)
        self._rewrite(forget, name, name in self.learner.tasks or is_recorded(self.folder, name))

    def compact(self) -> None:
        """Write the files anew without data that the learner no longer keeps, because of its limits of memory.

        The state stays the same, and so do keys and predictions without targets. Otherwise the journal grows with every
        call, and opening the folder reads all of it.

        Raises:
            OSError: if the disk has no room for the new files; nothing has changed then.
        """
        self._rewrite(rewrite)

    def _rewrite(self, function: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            function(self.folder, self._journal, self._ledger, self._writer, *arguments)
            self._updater.checkpoint = self._ledger.number

        self._check()
        with self._updater.paused():
            self._writer.run(run)

    def readmit(self, task: str) -> None:
        """Draw a task again that was set aside, as `Learner.readmit`."""
        self._check()
        name = as_name(task)
        if name not in self.learner.set_aside:
            self.learner.readmit(name)  # raises the error
        self._writer.submit(Readmit(name))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the updates for all data so far are made; False if `timeout` seconds are not enough."""
        self._check()
        return self._updater.wait(timeout)

    def status(self) -> dict[str, Any]:
        """The state of the session, as plain values.

        Returns:
            `tasks`, `datapoints` and `memory_bytes`, the bytes of these, in memory; `set_aside`, tasks that are not
            drawn, with the reason; `step`, the number of updates made; `updates_due`; `behind`, the number of
            observations since the last update began; `staleness`, the age in seconds of the oldest observation that the
            parameters do not include; `update_process`, the number of the process that makes the updates, or None;
            `update_thread`, why they run in a thread for good, or None; `update_error`, why the last update failed, or
            None; `record`, the number of the last record of the journal; `journal_lag`, the number of calls that are
            not written yet; `checkpoint`, the last record that the newest checkpoint includes; `keys` and `predictions`
            remembered; `bytes` on disk; `stopped`, the error after which the session refuses calls, or None.
        """
        self._check()
        tasks = self.learner.tasks
        return {
            "folder": str(self.folder),
            "tasks": len(tasks),
            "datapoints": sum(tasks.values()),
            "memory_bytes": self.learner.memory.num_bytes,
            "set_aside": self.learner.set_aside,
            "step": self.learner.step,
            "updates_due": self._ledger.due,
            "behind": self._ledger.behind,
            "staleness": self._ledger.staleness,
            "update_process": self._updater.runner.pid,
            "update_thread": self._updater.runner.reason,
            "update_error": self._updater.error,
            "record": self._journal.last,
            "journal_lag": self._writer.num_waiting,
            "checkpoint": self._updater.checkpoint,
            "keys": len(self._ledger.keys),
            "predictions": len(self._ledger.waiting),
            "bytes": sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()),
            "stopped": None if self._writer.failure is None else repr(self._writer.failure),
        }

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Write a copy of the folder, while the session is in use; `Session(path, factory)` opens it.

        Args:
            path: a new or empty folder.

        Raises:
            OSError: if the copy cannot be written. The folder is then deleted.
        """
        self._check()
        with self._updater.paused():
            copy_to(Path(path), self.folder, self._journal)

    def close(self) -> None:
        """Write a checkpoint and close the files; later calls are refused. A second call has no effect.

        Raises:
            OSError: if the checkpoint cannot be written. The files are closed, and the journal has all calls.
        """
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        try:
            self._updater.close()
        finally:
            self._writer.close()
            self._journal.close()
            self._lock.close()

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except OSError as error:
            _log.error("%s was closed without a checkpoint; its journal has all calls: %s", self.folder, error)

    def _check(self) -> None:
        if self._process != os.getpid():
            raise ValueError(f"the session of {self.folder} belongs to process {self._process}, which forked this one")
        if self._closed:
            raise ValueError(f"the session of {self.folder} is closed; open the folder again")
