"""What a session begins with: its folder, its learner, and the modules that the first calls load."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch

from metaleader.learners.learner import Learner
from metaleader.system.files import make_folder
from metaleader.system.lock import FolderLock
from metaleader.tasks import rows

_ATTEMPTS = 3
_REMEDY = "pass a function that builds a learner, as in Session(folder, lambda: FTML(...))"


def check_numbers(share: float, **counts: object) -> None:
    """Reject a share or a count that a session cannot have."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")


def locked(folder: Path) -> FolderLock:
    """Create a folder if there is none, and lock it.

    Raises:
        ValueError: if another process has locked it.
        OSError: if it cannot be written.
    """
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            make_folder(folder)
            return FolderLock(folder)
        except BlockingIOError as error:
            if attempts_left == 0:
                raise ValueError(f"{folder} is in use by another session; close it, or stop its process") from error
            time.sleep(0.02)  # `metaleader status` holds the lock for a moment
        except OSError as error:
            raise OSError(
                error.errno, f"cannot write the folder {folder} ({error.strerror}); choose another"
            ) from error
    raise AssertionError("unreachable")


def built(factory: Callable[[], Learner]) -> Learner:
    """The learner of a factory; rejects other objects, and learners that a session cannot keep."""
    if not callable(factory):
        raise ValueError(f"{_REMEDY}; got {type(factory).__name__}")
    learner = factory()
    if not isinstance(learner, Learner):
        raise ValueError(f"{_REMEDY}; this one returned {type(learner).__name__}")
    if learner.restarts:
        raise ValueError(
            f"{type(learner).__name__} trains on one task at a time, and a session keeps many: use FTML, FTL or TOE"
        )
    if learner.sharding.group.size > 1:
        raise ValueError("a session is one process: open it outside of a process group, or use shards=1")
    return learner


def warm_up(learner: Learner) -> None:
    """Load the modules of torch that the first calls would load, which takes seconds."""
    torch.func.vmap(torch.func.grad(torch.square))(torch.ones(1))
    tasks = itertools.islice(learner.tasks, 2)
    inputs = {name: learner.memory.named(name) for name in tasks}
    with contextlib.suppress(ValueError):  # the net of a task may not be finite
        learner.predict_many({name: rows(batch.x, slice(0, 1)) for name, batch in inputs.items() if batch is not None})
