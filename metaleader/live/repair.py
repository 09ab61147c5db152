"""A new journal of everything that is intact in a damaged one."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metaleader.learners.learner import Learner
from metaleader.live import checkpoints
from metaleader.live.calls import Codec, Observe, Predict, Settings, State
from metaleader.live.journal import NAME, Journal
from metaleader.live.ledger import Ledger
from metaleader.live.mark import MARK
from metaleader.live.recovery import first_records, predictions_of
from metaleader.live.settings import check_settings, settings_of
from metaleader.system.files import sync_folder

_log = logging.getLogger("metaleader")
_NEW = "repaired"


def repair_journal(folder: Path, learner: Learner, keys: int, predictions: int) -> bool:
    """Write the journal of a folder anew if it is damaged; the damaged files are kept in a folder beside it.

    The data and keys of all intact records are kept. Parameters and optimiser state are those of the newest intact
    checkpoint, else those that the journal began with.

    Args:
        folder: the folder, which this process has locked.
        learner: a new learner, which is used up.
        keys: the number of keys remembered.
        predictions: the number of predictions remembered.

    Returns:
        Whether the journal was damaged.

    Raises:
        ValueError: if neither a checkpoint nor the first state is intact.
    """
    shutil.rmtree(folder / _NEW, ignore_errors=True)
    states = list(_intact_checkpoints(folder))
    old = Journal(folder, repair=True)
    try:
        end = max([old.last, *(state["number"] for state in states)])
        lost = [number for number, content in old.salvage() if content is None]
        lost += range(old.last + 1, end + 1)
        if not lost:
            return False
        ledger = Ledger(learner, keys, predictions)
        # Without the description of its tensors a record is unreadable; checkpoints have the descriptions too.
        codec = Codec(max((state["schemas"] for state in states), key=len, default=[]))
        lost += _restore(folder, old, ledger, states, codec)
        ledger.number = end
        (folder / _NEW).mkdir()
        new = Journal(folder / _NEW, first=end + 1)
        try:
            new.append(first_records(ledger, Codec(), end + 1, predictions_of(ledger, old, codec)))
            new.sync()
        finally:
            new.close()
    finally:
        old.close()
    listed = ", ".join(map(str, sorted(lost)[:10])) + (f" and {len(lost) - 10} more" if len(lost) > 10 else "")
    where = _exchange(folder)
    _log.warning(
        "%s: %d of %d records were damaged and are lost: %s; the damaged files are in %s",
        *(folder / NAME, len(lost), end, listed, where),
    )
    return True


def _intact_checkpoints(folder: Path) -> Iterator[dict[str, Any]]:
    for path in checkpoints.paths(folder):
        try:
            yield checkpoints.read(path)
        except ValueError as error:
            _log.warning("%s", error)


def _restore(folder: Path, journal: Journal, ledger: Ledger, states: list[dict[str, Any]], codec: Codec) -> list[int]:
    """Restore a ledger from all intact records; returns the numbers of those that cannot be read without others."""
    learner, unreadable = ledger.learner, []
    for number, content in journal.salvage():
        if content is None:
            continue
        try:
            call = codec.decode(content)
        except ValueError:
            unreadable.append(number)
            continue
        if isinstance(call, Settings):
            check_settings(folder, call.values, settings_of(learner))
        elif isinstance(call, State):
            state = checkpoints.decode(call.tree, f"record {number} of {journal.path}")
            states.append(state)
            ledger.load_keys(state)
        elif isinstance(call, Observe | Predict):
            try:
                ledger.restore(number, call)
            except ValueError:
                unreadable.append(number)
    if not states:
        raise ValueError(f"{journal.path} is damaged: no state of the learner is intact; restore a backup")
    state = max(states, key=lambda state: state["number"])
    # The memory is that of the intact records.
    rest = {"round": learner.round, "task": learner.task, "buffer": learner.memory.state_dict(data=False)}
    learner.load_state_dict({**state["learner"], **rest})
    ledger.due, ledger.refused = learner.options.meta_steps, []
    return unreadable


def _exchange(folder: Path) -> Path:
    """Move the new journal into place; returns the folder of the old files."""
    names = [file.name for file in folder.iterdir() if file.name.startswith((NAME, MARK, "checkpoint-"))]
    kept = next(path for i in itertools.count(1) if not (path := folder / f"damaged-{i}").exists())
    kept.mkdir()
    for name in names:
        os.link(folder / name, kept / name)
    sync_folder(kept)
    # The log must be gone before the new file is there, or SQLite would apply it.
    for name in names:
        if name not in (NAME, MARK):
            (folder / name).unlink()
    os.replace(folder / _NEW / NAME, folder / NAME)
    os.replace(folder / _NEW / MARK, folder / MARK)
    (folder / _NEW).rmdir()
    sync_folder(folder)
    return kept
