"""The state of a folder, read without its learner and without its lock, also while a session is using it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from metaleader.live import checkpoints
from metaleader.live.calls import Call, Codec, Observe, Predict, Readmit, Settings, State, Update
from metaleader.live.journal import NAME, Journal
from metaleader.live.recovery import decoded


def read_status(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The state of a folder, as plain values.

    Returns:
        `learner`, its kind; `in_use`, whether a session has opened the folder; `records` in the journal and the number
        of the `first` and `last`; `tasks` and `datapoints` that the journal holds; `behind`, the number of observations
        after the last update; `updates` recorded by the journal; `predictions` that wait for targets; `checkpoint`, the
        last record that the newest checkpoint includes, or None; `step`, the number of updates made until then, and
        `set_aside`, the tasks that are not drawn, with the reason; `bytes` on disk.

    Raises:
        FileNotFoundError: if the folder holds no session.
        ValueError: if the journal or the newest checkpoint is damaged.
    """
    folder = Path(folder)
    if not (folder / NAME).is_file():
        raise FileNotFoundError(f"no session in {folder}: {NAME} is missing; name a folder of ml.Session")
    seen = _Seen()
    journal = Journal(folder, readonly=True)
    try:
        for number, call in decoded(journal.read(), Codec()):
            seen.add(number, call, journal)
        first, last = journal.first, journal.last
    finally:
        journal.close()
    checkpoint = None
    for path in checkpoints.paths(folder):
        try:
            checkpoint = checkpoints.read(path)
        except FileNotFoundError:
            continue  # a session has just replaced it
        seen.take(checkpoint)
        break
    return {
        "folder": str(folder),
        "learner": seen.learner,
        "in_use": _is_in_use(folder),
        "records": last - first + 1,
        "first": first,
        "last": last,
        "tasks": len(seen.tasks),
        "datapoints": sum(seen.tasks.values()),
        "behind": seen.behind,
        "updates": seen.updates,
        "predictions": len(seen.waiting),
        "checkpoint": None if checkpoint is None else checkpoint["number"],
        "step": seen.step,
        "set_aside": seen.aside,
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    }


class _Seen:
    """What the calls of a journal say."""

    def __init__(self) -> None:
        self.learner: str | None = None
        self.tasks: dict[str, int] = {}
        self.waiting: set[bytes] = set()
        self.aside: dict[str, str] = {}
        self.readmitted: dict[str, int] = {}
        self.updates = self.behind = self.step = 0

    def add(self, number: int, call: Call, journal: Journal) -> None:
        """Add a call."""
        if isinstance(call, Settings):
            self.learner = call.values["learner"]
        elif isinstance(call, State):
            state = checkpoints.decode(call.tree, f"record {number} of {journal.path}")
            self.behind = state["behind"]
            self.take(state)
        elif isinstance(call, Observe):
            self.tasks[call.task] = self.tasks.get(call.task, 0) + call.num_rows
            self.behind += call.updates == "later"
            self.waiting.discard(call.key or b"")
        elif isinstance(call, Predict):
            self.waiting.add(call.key)
        elif isinstance(call, Update):
            self.updates, self.behind = self.updates + call.steps, 0
        elif isinstance(call, Readmit):
            self.readmitted[call.task] = number

    def take(self, state: dict[str, Any]) -> None:
        """Use the state of a checkpoint."""
        learner = state["learner"]
        aside = dict(learner["buffer"].get("by_name", {}).get("aside", []))
        self.step = learner["step"]
        self.aside = {name: why for name, why in aside.items() if self.readmitted.get(name, 0) <= state["number"]}


def _is_in_use(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
