"""Grids: one run per combination of settings, each in a folder of its own, with one table, figure and report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console

from metaleader.experiments.axes import combinations, split_settings
from metaleader.report.grid import Cells, draw_grid, grid_table, write_grid_csv
from metaleader.report.loaded import load_runs
from metaleader.report.page import report_runs
from metaleader.report.progress import CellsDisplay
from metaleader.runner.cell import Cell
from metaleader.runner.experiment import check_code, experiment_file
from metaleader.runner.plan import Plan, RunOptions, find_experiment, planned
from metaleader.runner.workers import Event, import_ray, play_local, play_on_ray
from metaleader.runs.folder import read_times
from metaleader.system.files import make_folder, write_atomic
from metaleader.system.lock import FolderLock

_FORMAT = 1
_KEYS = {"options": dict, "axes": dict, "cells": dict, "workers": dict, "threads": int, "imports": dict}


@dataclass(frozen=True)
class Workers:
    """Where the cells of a grid run."""

    on: Literal["local", "ray"] = "local"
    """local runs cells as processes of this machine; ray uses the cluster of RAY_ADDRESS, or else starts one here, and
    needs the extra ray."""
    jobs: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """With --on local, the number of cells at once; by default as many as there are cores for their threads."""
    gpus: Annotated[float | None, tyro.conf.arg(metavar="X", help_behavior_hint="")] = None
    """With --on ray, the GPUs per cell, such as 1 or 0.25; by default 1 if the device is cuda, or auto and a node has a
    GPU."""
    retries: int = 2
    """How often a cell is continued after its process or its node was killed."""

    def __post_init__(self) -> None:
        if self.on not in ("local", "ray"):
            raise ValueError(f"cells run on local or ray, got {self.on!r}")
        if self.jobs is not None and self.on == "ray":
            raise ValueError("--jobs is for --on local; Ray runs as many cells as its CPUs and GPUs allow")
        if self.gpus is not None and self.on == "local":
            raise ValueError("--gpus is for --on ray; cells on this machine share its GPU")
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {self.jobs}")
        if self.gpus is not None and not 0 <= self.gpus < float("inf"):
            raise ValueError(f"--gpus must be at least 0, got {self.gpus}")
        if self.retries < 0:
            raise ValueError(f"--retries must be at least 0, got {self.retries}")


def run_grid(options: RunOptions, workers: Workers, folder: Path) -> int:
    """Run an experiment once per combination of the listed settings; then print, draw and report the results.

    Args:
        options: the options of all runs; lists in `set`, such as "ftml.inner_lr=0.01,0.1", are the axes of the grid.
        workers: where the cells run.
        folder: the folder of the grid, in which each cell is a run folder.

    Returns:
        The number of cells that failed.

    Raises:
        ValueError: for an unknown experiment, method or setting, or a value that any cell refuses; nothing is written.
    """
    if workers.on == "ray":
        import_ray()
    source = find_experiment(options.experiment, options.schedule)
    methods = tuple(source.experiment.methods) if options.methods is None else options.methods
    fixed, axes = split_settings(source.experiment, options.set, methods)
    options = dataclasses.replace(options, set=tuple(fixed))
    if source.file is not None:
        options = dataclasses.replace(options, experiment=str(source.file))
    cells = combinations(axes)
    plans = {name: _planned(options, workers, settings) for name, settings in cells.items()}
    if any((folder / name).exists() for name in ("grid.json", "config.json")):
        raise ValueError(
            f"{folder} already holds a grid or a run: continue it with `metaleader resume {folder}`, or choose another"
            " folder with --out"
        )
    first = next(iter(plans.values()))
    config = {
        "format": _FORMAT,
        "experiment": source.name,
        "file": None if source.file is None else str(source.file),
        "sha256": source.sha256,
        "imports": source.imports,
        "options": dataclasses.asdict(dataclasses.replace(options, data=first.options.data)),
        "axes": axes,
        "cells": cells,
        "workers": dataclasses.asdict(workers),
        "threads": torch.get_num_threads(),
    }
    try:
        make_folder(folder)
    except OSError as error:
        raise OSError(f"cannot write the folder {folder}: {error.strerror}; choose another") from error
    with locked(folder):
        write_atomic(folder / "grid.json", json.dumps(config, indent=2).encode() + b"\n")
        return _play(folder, config, plans)


def resume_grid(folder: Path, file: Path | None = None) -> int:
    """Continue the cells of a grid that were stopped, failed or not begun; then report the results.

    Args:
        folder: the folder of the grid.
        file: the experiment file, if it has moved; it must be unchanged.

    Returns:
        The number of cells that failed.
    """
    config = read_grid(folder)
    with locked(folder):
        finished = all(cell.is_finished() for cell in _cells(folder, config, {}) if cell.folder.exists())
        finished = finished and all((folder / name).exists() for name in config["cells"])
        if finished:
            print(f"{folder} is finished: there is nothing to resume")
            _finish(folder, config)
            return 0
        found = experiment_file(folder, config, file)
        if found is not None:
            config["options"]["experiment"] = str(found.absolute())
        options, workers = _options(config), Workers(**config["workers"])
        check_code(config["experiment"], config, find_experiment(options.experiment, options.schedule))
        plans = {name: _planned(options, workers, settings) for name, settings in config["cells"].items()}
        return _play(folder, config, plans)


def is_grid(folder: Path) -> bool:
    """Whether a folder is that of a grid."""
    return (folder / "grid.json").is_file()


def read_grid(folder: Path) -> dict[str, Any]:
    """The configuration of a grid.

    Raises:
        ValueError: if it is damaged, or was written by a newer release.
    """
    path = folder / "grid.json"
    try:
        config = json.loads(path.read_bytes())
        if config["format"] != _FORMAT:
            raise ValueError(f"its format is {config['format']!r}, this release reads {_FORMAT}")
        for name, kind in _KEYS.items():
            if not isinstance(config[name], kind):
                raise ValueError(f"its {name} is {config[name]!r}")
        for name, settings in config["cells"].items():
            if Path(name).name != name or name.startswith(".") or not all(isinstance(text, str) for text in settings):
                raise ValueError(f"it has a cell {name!r}")
        _options(config)
        Workers(**config["workers"])
        if not {"file", "sha256", "experiment"} <= config.keys():
            raise ValueError("a key is missing")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a grid ({error!r}); use an intact copy") from error
    return config


def cell_folders(folder: Path) -> list[Path]:
    """The run folders of a grid that have records, in its order."""
    folders = [folder / name for name in read_grid(folder)["cells"]]
    return [cell for cell in folders if (cell / "records.csv").is_file()]


def _planned(options: RunOptions, workers: Workers, settings: Sequence[str]) -> Plan:
    # A cluster may have a GPU where this machine has none.
    device = "cpu" if workers.on == "ray" else options.device
    return planned(dataclasses.replace(options, set=(*options.set, *settings), device=device))


def _options(config: Mapping[str, Any]) -> RunOptions:
    given = dict(config["options"])
    given |= {name: tuple(given[name]) for name in ("methods", "set") if given[name] is not None}
    return RunOptions(**given)


def _cells(folder: Path, config: Mapping[str, Any], plans: Mapping[str, Plan]) -> list[Cell]:
    options, cells = _options(config), []
    for name, settings in config["cells"].items():
        cell_options = dataclasses.replace(options, set=(*options.set, *settings))
        threads, rounds = config["threads"], 0
        if plan := plans.get(name):
            threads = plan.experiment.threads or threads
            rounds = len(plan.methods) * plan.tasks
        cells.append(Cell(name, folder.absolute() / name, cell_options, threads, rounds))
    return cells


def _play(folder: Path, config: Mapping[str, Any], plans: Mapping[str, Plan]) -> int:
    """Play the cells that are not finished; returns the number of those that failed."""
    cells, failed = _cells(folder, config, plans), {}
    workers = Workers(**config["workers"])
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with CellsDisplay(Console(), {cell.name: cell.rounds for cell in cells}) as display:
            waiting = []
            for cell in cells:
                if cell.folder.exists() and (cell.folder / "config.json").exists() and cell.is_finished():
                    display.event(cell.name, "ended", "")
                else:
                    waiting.append(cell)
            events = _events(waiting, workers)
            try:
                for event in events:
                    if event is None:
                        display.progress({cell.name: _played(cell) for cell in cells if cell.name in display.running})
                        continue
                    cell, kind, text = event
                    display.event(cell.name, kind, f"{text}; see {cell.log}" if text else "")
                    if kind == "failed":
                        failed[cell.name] = text
            finally:
                events.close()  # ends the processes
    except KeyboardInterrupt:
        print(f"stopped; every finished round is saved. Continue with: metaleader resume {folder}", flush=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    if len(failed) < len(cells):
        _finish(folder, config)
    if failed:
        print(f"{len(failed)} of {len(cells)} cells failed; `metaleader resume {folder}` tries them again")
    return len(failed)


def _events(cells: Sequence[Cell], workers: Workers) -> Generator[Event]:
    if workers.on == "ray":
        return play_on_ray(cells, workers.gpus, workers.retries)
    threads = max((cell.threads for cell in cells), default=1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return play_local(cells, workers.jobs or max(1, cores // threads), workers.retries)


def _played(cell: Cell) -> int:
    """The number of rounds that a cell has played."""
    try:
        return len(read_times(cell.folder))
    except (ValueError, OSError):
        return 0


def _finish(folder: Path, config: Mapping[str, Any]) -> None:
    """Print the table, draw the figure, and print the path of the report of all cells as the last line."""
    folders = cell_folders(folder)
    cells = Cells(load_runs(folders), config["axes"], config["cells"])
    write_grid_csv(cells, folder / "grid.csv")
    draw_grid(cells, folder / "grid")
    # Rich assumes 80 columns for a file, which would wrap numbers.
    Console(width=None if Console().is_terminal else 140).print(grid_table(cells))
    print(f"table: {folder / 'grid.csv'}")
    print(f"figure: {folder / 'grid.png'}")
    print(report_runs(folders, folder / "report.html").resolve())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder; raises ValueError if another process has locked it."""
    try:
        lock = FolderLock(folder)
    except BlockingIOError as error:
        raise ValueError(f"{folder} is in use by another process; wait for it, or stop it first") from error
    with contextlib.closing(lock):
        yield
