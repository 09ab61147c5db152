"""What the calls of a journal have made of a learner: the same when they are made and when they are replayed."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from metaleader.learners.learner import Learner
from metaleader.learners.together import FailedUpdate
from metaleader.live.calls import Call, Observe, Predict, Readmit, Update, fingerprint
from metaleader.live.errors import ConflictError
from metaleader.live.update import PreparedUpdate
from metaleader.memory.rows import Rows
from metaleader.tasks import Batch, rows

_KEY, _FINGERPRINT = 16, 8


class Ledger:
    """A learner, and what a session remembers beside it.

    Args:
        learner: the learner.
        keys: the number of keys remembered.
        predictions: the number of predictions remembered whose labels have not come.

    Attributes:
        learner: the learner.
        number: of the last record.
        keys: digests of keys, with a fingerprint of the call; of a prediction with a label, with that of its inputs.
        waiting: digests of predictions without a label, with the number of their record.
        due: the number of meta-updates to be made.
        behind: the number of observations since the last update began.
        refused: the records that the learner did not accept.
        exclusive: whether the last update failed.
        seconds: the time taken by updates since the last checkpoint.
        unused: the time of the first observation since the last update began, or None.
        used: that of the first observation that the update under way uses, or None.
    """

    def __init__(self, learner: Learner, keys: int, predictions: int) -> None:
        self.learner, self.number = learner, 0
        self.keys: OrderedDict[bytes, bytes] = OrderedDict()
        self.waiting: OrderedDict[bytes, int] = OrderedDict()
        self.due = self.behind = 0
        self.refused: list[int] = []
        self.seconds = 0.0
        self.unused: float | None = None
        self.used: float | None = None
        self._max_keys, self.max_waiting = keys, predictions
        self.exclusive = False
        self._has_own_observe = type(learner).observe is not Learner.observe
        self._has_own_update = type(learner).update is not Learner.update

    def is_known(self, call: Call) -> bool:
        """Whether the same call was made before, by its key.

        Raises:
            ValueError: if the key was used for another call.
        """
        known = self.keys.get(call.key) if isinstance(call, Observe) and call.key is not None else None
        if known is None:
            return False
        assert isinstance(call, Observe)
        if known not in (fingerprint(call), fingerprint(call.as_prediction())):
            raise ConflictError(
                f"the key of this call for task {call.task!r} was used before, for other data; use one key per call"
            )
        return True

    def apply(self, number: int, call: Call) -> None:
        """Make a call.

        Raises:
            ValueError: if the learner refuses it; the learner is then as before the call.
        """
        self.number = number
        if isinstance(call, Observe):
            try:
                self._observe(call)
            except ValueError:
                self.refused.append(number)
                raise
            self._remember(call)
        elif isinstance(call, Predict):
            self._wait(number, call)
        elif isinstance(call, Update):
            self._update(call)
        elif isinstance(call, Readmit):
            self.learner.readmit(call.task)

    def _update(self, call: Update) -> None:
        self.begin_update(call)
        with self.timed():
            if call.exclusive:
                self.learner.update(call.steps)
                self.used = None
                return
            try:
                self.learner.state = PreparedUpdate(self.learner, call.steps).run()
                self.used = None
            except FailedUpdate:
                self.fail_update(call)

    def _observe(self, call: Observe) -> None:
        if call.updates == "now":
            with self.timed():
                self.learner.observe(call.x, call.y, task=call.task)
            return
        self._store(call)
        if call.updates == "later":
            self.due, self.behind = self.learner.options.meta_steps, self.behind + 1
            self.unused = self.unused or time.monotonic()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time within this context as time of updates."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def begin_update(self, call: Update) -> None:
        """Count an update as made on all data so far."""
        if call.step != self.learner.step:
            raise RuntimeError(
                f"record {self.number} begins at update {call.step}, but the learner has made {self.learner.step}: this"
                " code, or this version of torch, does not repeat what was recorded"
            )
        self.due, self.behind, self.exclusive = max(0, self.due - call.steps), 0, False
        self.used, self.unused = self.used or self.unused, None

    def fail_update(self, call: Update) -> None:
        """Count an update as failed. It will be made exclusively, which finds the task that is at fault."""
        self.due, self.exclusive = max(self.due, call.steps), True

    @property
    def staleness(self) -> float:
        """The age of the oldest observation that the parameters do not include, in seconds; 0 if there is none."""
        first = self.used or self.unused
        return 0.0 if first is None else time.monotonic() - first

    @property
    def next_update_is_exclusive(self) -> bool:
        """Whether no call may be made during the next update: after a failure, of a user's own `update`, of shards."""
        return self.exclusive or self._has_own_update or self.learner.options.shards > 1

    def restore(self, number: int, call: Call) -> None:
        """Make a call without its updates, whose result a later checkpoint holds."""
        self.number = number
        if isinstance(call, Observe) and number not in self.refused:
            self._store(call)
            self._remember(call)
        elif isinstance(call, Predict):
            self._wait(number, call)

    def _store(self, call: Observe) -> None:
        learner = self.learner
        if self._has_own_observe:
            learner.observe(call.x, call.y, task=call.task, update=False)
            return
        # As `observe` does, without the checks that were made before the call was recorded.
        batch = Batch(call.x, call.y)
        if learner.device.type != "cpu":
            batch = tree_map(lambda leaf: leaf.to(learner.device), batch)
        with learner.locks.changing, learner.locks.reading:
            mark = learner.memory.mark()
            try:
                learner.memory.append(batch, None, call.task)
            except BaseException:
                learner.memory.rollback(mark)
                raise

    def _remember(self, call: Observe) -> None:
        if call.key is None:
            return
        is_label = self.waiting.pop(call.key, None) is not None
        self.keys[call.key] = fingerprint(call.as_prediction() if is_label else call)
        while len(self.keys) > self._max_keys:
            self.keys.popitem(last=False)

    def _wait(self, number: int, call: Predict) -> None:
        self.waiting[call.key] = number
        while len(self.waiting) > self.max_waiting:
            self.waiting.popitem(last=False)

    # State.

    def state_dict(self, keys: bool = False) -> dict[str, Any]:
        """Everything but the data and, unless `keys`, the keys, which the journal has."""
        state: dict[str, Any] = {
            "number": self.number,
            "due": self.due,
            "behind": self.behind,
            "exclusive": self.exclusive,
        }
        state["refused"] = list(self.refused)
        if keys:
            joined = b"".join(key + value for key, value in self.keys.items())
            state["keys"] = torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else None
        return state | {"learner": self.learner.state_dict(data=False)}

    def load_state_dict(self, state: dict[str, Any], data: Rows | None = None) -> None:
        """Continue from a state; `data` is what its memory held, task by task, or None if it is stored already."""
        learner_state = state["learner"]
        if data is not None:
            held = data.take(slice(0, data.length)) if data.length else None
            stored = None if held is None else {"x": held.x, "y": held.y}
            learner_state = {**learner_state, "buffer": {**learner_state["buffer"], "data": stored}}
        self.learner.load_state_dict(learner_state)
        self.due, self.behind, self.exclusive = state["due"], state["behind"], state["exclusive"]
        self.refused = list(state["refused"])
        self.load_keys(state)

    def load_keys(self, state: dict[str, Any]) -> None:
        """Continue with the keys of a state, if it has them."""
        if state.get("keys") is not None:
            joined, width = state["keys"].numpy().tobytes(), _KEY + _FINGERPRINT
            pairs = (joined[i : i + width] for i in range(0, len(joined), width))
            self.keys = OrderedDict((pair[:_KEY], pair[_KEY:]) for pair in pairs)

    def no_rows(self) -> Rows:
        """An empty storage like that of the learner, in memory or on the disk."""
        return self.learner.memory.store.own.copy_of(slice(0, 0))

    def data(self) -> list[Observe]:
        """All data in memory, task by task in the order of the state, as calls."""
        memory = self.learner.memory.state_dict(data=True)
        if memory.get("data") is None:
            return []
        x, y, starts = memory["data"]["x"], memory["data"]["y"], [*memory["starts"], memory["length"]]
        spans = [slice(*ends) for ends in itertools.pairwise(starts)]
        return [
            Observe(name, rows(x, span), rows(y, span), None, "none")
            for name, span in zip(memory["names"], spans, strict=True)
        ]
