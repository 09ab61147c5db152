"""The state of a folder, read without its learner and without its lock, also while a session is using it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from metaleader.live import checkpoints
from metaleader.live.calls import Codec, Observe, Predict, Settings, State, Update
from metaleader.live.journal import Journal


def read_status(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The state of a folder, as plain values.

    Returns:
        `learner`, its kind; `in_use`, whether a session has opened the folder; `records` in the journal and the number
        of the `first` and `last`; `tasks` and `datapoints` that the journal holds; `observations` and `updates` since
        its beginning; `behind`, observations after the last update; `checkpoint`, the last record that the newest one
        includes, or None; `bytes` on disk.

    Raises:
        FileNotFoundError: if the folder holds no session.
        ValueError: if the journal is damaged.
    """
    folder = Path(folder)
    if not (folder / "journal.sqlite").is_file():
        raise FileNotFoundError(f"no session in {folder}: journal.sqlite is missing; name a folder of ml.Session")
    journal, codec = Journal(folder, readonly=True), Codec()
    tasks: dict[str, int] = {}
    counts = {"observations": 0, "updates": 0, "behind": 0, "predictions": 0}
    learner = None
    try:
        for _, content in journal.read():
            call = codec.decode(content)
            if isinstance(call, Settings):
                learner = call.values["learner"]
            elif isinstance(call, State):
                counts["behind"] = 0
            elif isinstance(call, Observe):
                tasks[call.task] = tasks.get(call.task, 0) + call.num_rows
                counts["observations"] += 1
                counts["behind"] += call.updates == "later"
            elif isinstance(call, Predict):
                counts["predictions"] += 1
            elif isinstance(call, Update):
                counts["updates"] += call.steps
                counts["behind"] = 0
        first, last = journal.first, journal.last
    finally:
        journal.close()
    newest = checkpoints.paths(folder)[:1]
    return {
        "folder": str(folder),
        "learner": learner,
        "in_use": _is_in_use(folder),
        "records": last - first + 1,
        "first": first,
        "last": last,
        "tasks": len(tasks),
        "datapoints": sum(tasks.values()),
        **counts,
        "checkpoint": int(newest[0].stem.partition("-")[2]) if newest else None,
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    }


def _is_in_use(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
