"""The files of a session written anew: without a task, without data that the learner no longer keeps, or as a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

from metaleader.live import checkpoints
from metaleader.live.calls import Codec, Observe, Predict
from metaleader.live.errors import UnknownTaskError
from metaleader.live.folder import check_new, check_room
from metaleader.live.journal import Journal
from metaleader.live.ledger import Ledger
from metaleader.live.recovery import decoded, first_records, predictions_of
from metaleader.live.writer import Writer
from metaleader.system.files import make_folder, sync_folder, write_atomic


def rewrite(folder: Path, journal: Journal, ledger: Ledger, writer: Writer) -> None:
    """Write the journal anew with the data that the learner keeps, and delete the checkpoints."""
    _check_room(folder, journal, "compact")
    _replace(folder, journal, ledger, writer, predictions_of(ledger, journal, writer.codec))


def forget(folder: Path, journal: Journal, ledger: Ledger, writer: Writer, task: str, recorded: bool) -> None:
    """Forget a task, and write the journal anew without it.

    Args:
        folder: the folder.
        journal: its journal.
        ledger: the learner.
        writer: of the journal.
        task: the name of the task.
        recorded: whether the journal has data of the task; see `is_recorded`.

    Raises:
        UnknownTaskError: if neither the learner nor the files have data of the task.
    """
    waiting = predictions_of(ledger, journal, writer.codec)
    is_known = task in ledger.learner.tasks
    if not is_known and not recorded:
        try:
            ledger.learner.forget(task)
        except ValueError as error:
            raise UnknownTaskError(str(error)) from error
    _check_room(folder, journal, "forget")
    if is_known:
        ledger.learner.forget(task)
    _replace(folder, journal, ledger, writer, [call for call in waiting if call.task != task])


def is_recorded(folder: Path, task: str) -> bool:
    """Whether the journal of a folder has data of a task, also data that the learner has dropped or refused."""
    journal = Journal(folder, readonly=True)
    try:
        calls = decoded(journal.read(), Codec())
        return any(isinstance(call, Observe | Predict) and call.task == task for _, call in calls)
    finally:
        journal.close()


def copy_to(target: Path, folder: Path, journal: Journal) -> None:
    """Copy the files to a new or empty folder, which is deleted if that fails."""
    check_new(target)
    make_folder(target)
    try:
        # The checkpoint first: the journal then includes all that the checkpoint does.
        for file in checkpoints.paths(folder)[:1]:
            write_atomic(target / file.name, file.read_bytes())
        journal.backup(target)
        sync_folder(target)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _check_room(folder: Path, journal: Journal, call: str) -> None:
    check_room(folder, 3 * journal.bytes, call)


def _replace(folder: Path, journal: Journal, ledger: Ledger, writer: Writer, predictions: list[Predict]) -> None:
    codec = Codec()
    try:
        ledger.refused = []
        journal.replace(first_records(ledger, codec, journal.last + 1, predictions))
        writer.codec = codec
        for path in checkpoints.paths(folder):
            path.unlink()
        sync_folder(folder)
    except BaseException as error:
        # The learner may have forgotten the task, but the files may not have.
        writer.failure = error
        raise
