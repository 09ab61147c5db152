"""A run of several processes: one of them writes the run folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from metaleader.distributed.group import Group
from metaleader.evaluate import Record
from metaleader.runs.folder import Config
from metaleader.runs.run import Run
from metaleader.system.trees import tree_from_bytes, tree_to_bytes

# Of a checkpoint that is sent to another process
_KIND, _VERSION = "metaleader-sent-checkpoint", 1


class SharedRun:
    """A run folder that rank 0 reads and writes for all processes; they make the same calls as of a `Run`.

    An error of rank 0 is raised on all processes.

    Args:
        folder: the run folder, as rank 0 finds it.
        config: as for `Run`.
        group: the processes.
    """

    def __init__(self, folder: str | os.PathLike[str], config: dict[str, Any] | None, group: Group) -> None:
        self.folder, self._group = Path(folder), group
        self._run: Run | None = None
        self._run = self._group.on_first(lambda: Run(folder, config), "the run folder")
        text = None if self._run is None else json.dumps(self._run.config).encode()
        self.config: Config = json.loads(group.first(text, "the configuration") or b"{}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        if self._run is not None:
            self._run.__exit__(*details)

    def checkpoint(self, method: str) -> dict[str, Any] | None:
        """The last checkpoint of a method; None before the first."""
        tree = self._group.on_first(lambda: self._first.checkpoint(method), "a checkpoint")
        content = None if tree is None else tree_to_bytes(tree, _KIND, _VERSION)
        content = self._group.first(content, "a checkpoint")
        return None if content is None else tree_from_bytes(content, "the checkpoint of rank 0", _KIND, _VERSION)

    def finished(self) -> bool:
        """Whether every method has played all its rounds."""
        finished = self._group.on_first(lambda: self._first.finished(), "the end of the run")
        return self._group.exchange(finished, "the end of the run")[0]

    def rewind(self, rounds: int, more: Iterable[str] = ()) -> None:
        """Truncate the records to the last checkpoint."""
        self._group.on_first(lambda: self._first.rewind(rounds, more), "the records")

    def check_records(self) -> None:
        """Raise ValueError if the records are not those that the last checkpoint states."""
        self._group.on_first(lambda: self._first.check_records(), "the records")

    def save(
        self,
        method: str,
        played: int,
        records: Iterable[Sequence[Record]],
        state: dict[str, Any],
        seconds: float,
        peak_mb: float,
    ) -> None:
        """Save a finished round."""
        arguments = method, played, records, state, seconds, peak_mb
        self._group.on_first(lambda: self._first.save(*arguments), f"the end of round {played - 1}")

    @property
    def _first(self) -> Run:
        assert self._run is not None
        return self._run


def open_run(folder: Path, config: dict[str, Any] | None, group: Group) -> Run | SharedRun:
    """The run folder of this program, or of all its processes."""
    return Run(folder, config) if group.size == 1 else SharedRun(folder, config, group)
