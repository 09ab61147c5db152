"""One cell of a grid: a run that is begun or continued in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaleader.runner.experiment import resume_experiment, run_experiment
from metaleader.runner.plan import RunOptions
from metaleader.runs.folder import is_finished, read_checkpoints, read_config
from metaleader.system.files import make_folder
from metaleader.system.lock import FolderLock
from metaleader.system.machine import keep_memory, set_threads

# A cell whose process has just died may still be locked: a process ends only when it has noticed.
_PATIENCE = 60.0


@dataclass(frozen=True)
class Cell:
    """A run of a grid.

    Attributes:
        name: the name of its folder.
        folder: its run folder, absolute.
        options: the options of its run.
        threads: the number of threads of torch, unless the experiment has one.
        rounds: the number of rounds of all methods together.
    """

    name: str
    folder: Path
    options: RunOptions
    threads: int
    rounds: int

    @property
    def log(self) -> Path:
        """The file with the output of the run."""
        return self.folder.parent / "logs" / f"{self.name}.txt"

    def is_finished(self) -> bool:
        """Whether the run has played all rounds and written its report."""
        if not (self.folder / "report.html").is_file():
            return False
        methods = read_config(self.folder)["methods"]
        checkpoints = read_checkpoints(self.folder, methods)
        return all(is_finished(checkpoints.get(method)) for method in methods)

    def plain(self) -> dict[str, Any]:
        """The cell as JSON."""
        options = dataclasses.asdict(self.options)
        return {**dataclasses.asdict(self), "folder": str(self.folder), "options": options}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Cell:
        """The cell of `plain`."""
        options = dict(values["options"])
        options |= {name: tuple(options[name]) for name in ("methods", "set") if options[name] is not None}
        return cls(**{**values, "folder": Path(values["folder"]), "options": RunOptions(**options)})


def play_cell(cell: Cell) -> None:
    """Begin the run of a cell, or continue it."""
    set_threads(cell.threads)
    if not (cell.folder / "records.csv").exists():
        if cell.folder.exists():
            _wait_until_free(cell.folder)
        run_experiment(cell.options, cell.folder)
        return
    _wait_until_free(cell.folder)
    file = Path(cell.options.experiment)
    resume_experiment(cell.folder, file if read_config(cell.folder)["file"] is not None else None)


def logged_cell(cell: Cell) -> str | None:
    """Play a cell with its output in its log; returns the message of an error, None without one."""
    if not (grid := cell.folder.parent / "grid.json").is_file():
        return f"{platform.node()} has no {grid}; all nodes must share the file system of --out"
    make_folder(cell.log.parent)
    with open(cell.log, "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            play_cell(cell)
        except (ValueError, OSError, ImportError) as error:
            print(f"metaleader: {error}")
            return str(error)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Play the cell whose JSON is the last argument; end when standard input ends, which is when the parent does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_memory()
    try:
        play_cell(Cell.from_plain(json.loads(sys.argv[-1])))
    except (ValueError, OSError, ImportError) as error:
        print(f"metaleader: {error}", flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _end_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_until_free(folder: Path) -> None:
    started = time.monotonic()
    while time.monotonic() - started < _PATIENCE:
        try:
            FolderLock(folder).close()
        except BlockingIOError:
            time.sleep(0.2)
        else:
            return
