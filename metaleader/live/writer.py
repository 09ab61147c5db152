"""The thread that writes a session's journal: calls that wait at the same time share one transaction."""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

from metaleader.live.calls import Call, Codec, Observe
from metaleader.live.journal import Journal
from metaleader.live.ledger import Ledger


class _Item:
    """A call or a function that waits for the thread."""

    def __init__(self, call: Call | None, run: Callable[[], Any] | None) -> None:
        self.call, self.run = call, run
        self.result: Any = None
        self.error: BaseException | None = None
        self.records: list[bytes] = []
        self.done = threading.Event()


class Writer:
    """Writes calls to a journal and makes them, one after the other, in a thread of its own.

    A thread of its own is never interrupted by Ctrl-C between the write and its effect.

    Args:
        journal: where calls are written.
        codec: of the journal's records so far.
        ledger: what the calls change.
        after: called when calls were made.
    """

    def __init__(self, journal: Journal, codec: Codec, ledger: Ledger, after: Callable[[], object]) -> None:
        self._journal, self._ledger, self._after = journal, ledger, after
        self.codec = codec
        self.failure: BaseException | None = None
        self._items: list[_Item] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="metaleader journal", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """The number of calls that are not written yet."""
        return len(self._items)

    def submit(self, call: Call, apply: Callable[[], Any] | None = None) -> Any:
        """Write a call and make it; it is on disk and has its effect when this returns.

        Args:
            call: the call.
            apply: makes the call in place of `Ledger.apply`.

        Returns:
            The result of `apply`; without it, True, or False if the call was made before.
        """
        return self._wait(_Item(call, apply))

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a function between two calls."""
        return self._wait(_Item(None, function))

    def close(self) -> None:
        """Finish all calls that wait, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _wait(self, item: _Item) -> Any:
        with self._changed:
            if self._closing:
                raise ValueError("the session is closed; open the folder again")
            self._items.append(item)
            self._changed.notify()
        item.done.wait()
        if isinstance(item.error, sqlite3.Error):  # of a read, or of a checkpoint of the write-ahead log
            raise OSError(errno.EIO, f"the journal cannot be read or written ({item.error}); open the folder again")
        if item.error is not None:
            # One error may belong to several calls, which are raised in several threads.
            raise item.error.with_traceback(None)
        return item.result

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._items and not self._closing:
                    self._changed.wait()
                items, self._items = self._items, []
            if not items:
                return
            self._process(items)
            for item in items:
                item.done.set()
            self._after()

    def _process(self, items: list[_Item]) -> None:
        calls: list[_Item] = []
        for item in items:
            if item.call is not None:
                calls.append(item)
                continue
            self._write(calls)
            calls = []
            self._make(item)
        self._write(calls)

    def _write(self, items: list[_Item]) -> None:
        """Write some calls in one transaction, then make them."""
        # A key that occurs twice: the second call is looked up when the first has had its effect.
        keys = [item.call.key if isinstance(item.call, Observe) else None for item in items]
        again = [item for i, item in enumerate(items) if keys[i] is not None and keys[i] in keys[:i]]
        schemas = self.codec.schemas
        items = [item for item in items if item not in again and self._is_encoded(item)]
        if items:
            try:
                number = self._journal.append(record for item in items for record in item.records)
            except OSError as error:
                self.codec = Codec(schemas)
                for item in items:
                    item.error = error
                items = []
            else:
                number -= sum(len(item.records) for item in items)
                for item in items:
                    number += len(item.records)
                    self._make(item, number)
        if again:
            self._write(again)

    def _is_encoded(self, item: _Item) -> bool:
        """Encode a call; False if it cannot be made, or was made before."""
        assert item.call is not None
        if self.failure is not None:
            item.error = self._stopped()
            return False
        try:
            if self._ledger.is_known(item.call):
                item.result = False
                return False
            item.records = self.codec.encode(item.call)
        except ValueError as error:
            item.error = error
        return item.error is None

    def _make(self, item: _Item, number: int | None = None) -> None:
        if self.failure is not None:
            item.error = self._stopped()
            return
        try:
            if item.run is not None:
                if number is not None:
                    self._ledger.number = number
                item.result = item.run()
            else:
                assert item.call is not None
                assert number is not None
                self._ledger.apply(number, item.call)
                item.result = True
        except (ValueError, OSError) as error:
            item.error = error
        except BaseException as error:
            # The learner may differ from the journal.
            item.error = self.failure = error

    def _stopped(self) -> OSError:
        return OSError(f"the session stopped after an error ({self.failure!r}); close it, and open the folder again")
