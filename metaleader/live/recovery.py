"""How a session continues from its folder: the newest checkpoint, then the journal after it.

A journal begins with the settings of the learner, its data task by task, and its state. After these come the calls, in
the order in which they were made.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from metaleader.learners.learner import Learner
from metaleader.live import checkpoints
from metaleader.live.calls import Call, Codec, Observe, Predict, Settings, State
from metaleader.live.journal import REMEDY, Journal
from metaleader.live.ledger import Ledger
from metaleader.live.settings import check_settings, settings_of
from metaleader.tasks import Batch

_log = logging.getLogger("metaleader")


class Opened(NamedTuple):
    """A session as it continues.

    Attributes:
        journal: the journal.
        codec: of the records of the journal.
        ledger: the learner after the last record.
        checkpoint: the last record that needs no replay when the folder is opened again.
    """

    journal: Journal
    codec: Codec
    ledger: Ledger
    checkpoint: int


def open_folder(folder: Path, learner: Learner, keys: int, predictions: int, repair: bool) -> Opened:
    """Continue the session of a folder, or begin one in a folder without a journal.

    Args:
        folder: the folder, which this process has locked.
        learner: a new learner.
        keys: the number of keys remembered.
        predictions: the number of predictions remembered.
        repair: replace damaged checkpoints; a damaged journal is replaced by `repair_journal` before.

    Raises:
        ValueError: if the folder belongs to a learner with other settings, or something is damaged.
    """
    for part in folder.glob(".*.part"):
        part.unlink()
    journal = Journal(folder, repair=repair)
    try:
        ledger, codec = Ledger(learner, keys, predictions), Codec()
        if journal.last < journal.first and not repair and not checkpoints.paths(folder):
            checkpoint = journal.append(first_records(ledger, codec, journal.first))
        else:
            checkpoint = _replay(folder, journal, ledger, codec, repair)
            if repair:
                journal.sync()  # the mark may be the damaged file
        return Opened(journal, codec, ledger, checkpoint)
    except BaseException:
        journal.close()
        raise


def first_records(ledger: Ledger, codec: Codec, first: int, predictions: Iterable[Predict] = ()) -> Iterator[bytes]:
    """The records of a new journal: settings, data, state, and predictions without a label.

    When all are read, the ledger knows the numbers of the predictions' records.

    Args:
        ledger: the session.
        codec: a new codec.
        first: the number of the first record.
        predictions: those to keep.
    """
    number, waiting = first - 1, {}
    for call in _first_calls(ledger, codec, predictions):
        for record in codec.encode(call):
            number += 1
            yield record
        if isinstance(call, Predict):
            waiting[call.key] = number
    ledger.waiting = OrderedDict(waiting)
    ledger.number = number


def _first_calls(ledger: Ledger, codec: Codec, predictions: Iterable[Predict]) -> Iterator[Call]:
    yield Settings(settings_of(ledger.learner))
    yield from ledger.data()
    yield State(checkpoints.encode(state_of(ledger, codec, keys=True)))
    yield from predictions


def predictions_of(ledger: Ledger, journal: Journal, codec: Codec) -> list[Predict]:
    """The predictions without a label."""
    calls = [codec.decode(journal.get(number)) for number in ledger.waiting.values()]
    return [call for call in calls if isinstance(call, Predict)]


def state_of(ledger: Ledger, codec: Codec, keys: bool = False) -> dict[str, Any]:
    """The content of a checkpoint."""
    return ledger.state_dict(keys) | {"schemas": codec.schemas}


def _replay(folder: Path, journal: Journal, ledger: Ledger, codec: Codec, repair: bool) -> int:
    """Bring a ledger to the end of a journal; returns the number of the record from which updates were made again."""
    calls = decoded(journal.read(), codec)
    first = restore_first(folder, journal, calls, ledger)
    checkpoint = _newest_checkpoint(folder, first, journal, repair)
    if checkpoint is not None:
        ledger.refused = list(checkpoint["refused"])
    for number, call in calls:
        if checkpoint is None or number > checkpoint["number"]:
            try:
                ledger.apply(number, call)
            except ValueError:
                continue  # refused, as when the call was made
        else:
            ledger.restore(number, call)
            if number == checkpoint["number"]:
                ledger.load_state_dict(checkpoint)
    return first if checkpoint is None else checkpoint["number"]


def restore_first(folder: Path, journal: Journal, calls: Iterator[tuple[int, Call]], ledger: Ledger) -> int:
    """Restore the state that a journal begins with; returns the number of its record."""
    data = ledger.no_rows()
    for number, call in calls:
        if isinstance(call, Settings):
            check_settings(folder, call.values, settings_of(ledger.learner))
        elif isinstance(call, Observe):
            data.append(Batch(call.x, call.y))
        elif isinstance(call, State):
            ledger.load_state_dict(checkpoints.decode(call.tree, f"record {number} of {journal.path}"), data)
            ledger.number = number
            return number
    raise ValueError(f"{journal.path} does not begin with the state of a session; restore a backup")


def _newest_checkpoint(folder: Path, first: int, journal: Journal, repair: bool) -> dict[str, Any] | None:
    """The newest checkpoint, unless the state in the journal is as new."""
    for path in checkpoints.paths(folder):
        try:
            checkpoint = checkpoints.read(path)
        except ValueError as error:
            if not repair:
                raise ValueError(
                    f"{error}; nothing is lost: with repair=True, the updates since the checkpoint before it are made"
                    " again, to the same state"
                ) from error
            _log.warning("%s; the updates since the checkpoint before it are made again", error)
            path.unlink()
            continue
        if checkpoint["number"] > journal.last:
            raise ValueError(
                f"{journal.path} is damaged: it ends at record {journal.last}, but {path} includes record"
                f" {checkpoint['number']}; {REMEDY}"
            )
        if checkpoint["number"] > first:
            return checkpoint
        path.unlink()  # from before the journal was written anew
    return None


def decoded(records: Iterable[tuple[int, bytes]], codec: Codec) -> Iterator[tuple[int, Call]]:
    """The calls in records, with the numbers of these."""
    for number, content in records:
        call = codec.decode(content)
        if call is not None:
            yield number, call
