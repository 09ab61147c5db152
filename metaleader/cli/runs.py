"""The commands for run folders: `run`, `grid`, `resume`, `join`, `report`, `regret` and `verify`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from metaleader.distributed.group import is_launched, launched_group
from metaleader.report.claims import check_claims, counted
from metaleader.report.page import report_runs
from metaleader.runner import RunOptions, join_experiments, resume_experiment, run_experiment
from metaleader.runner.grid import Workers, cell_folders, is_grid, resume_grid, run_grid
from metaleader.runner.regret import regret_of_run
from metaleader.runner.tune import is_tune, resume_tune

Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]

_COLOURS = {"agrees": "green", "disagrees": "bold red", "below margin": "magenta", "undecided": "yellow"}


def run(
    options: Annotated[RunOptions, tyro.conf.arg(name="")] = RunOptions(),  # noqa: B008
    *,
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None,
) -> None:
    """Run all methods of an experiment over the same streams; write records, figures and a report into a folder.

    Args:
        options: the experiment and how it is run.
        out: The run folder; runs/NAME if not given, NAME being that of the preset or of the file.
    """
    with launched_group():
        run_experiment(options, out or _folder_of(options))


def grid(
    options: Annotated[RunOptions, tyro.conf.arg(name="")] = RunOptions(),  # noqa: B008
    workers: Annotated[Workers, tyro.conf.arg(name="")] = Workers(),  # noqa: B008
    *,
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None,
) -> int:
    """Run an experiment once per combination of settings: --set ftml.inner_lr=0.01,0.03,0.1 --set order=random,similar.

    Each combination is a cell, a run folder in DIR. Commas separate values; values that are lists are in brackets:
    --set steps=[5,1],[10,1]. `metaleader resume DIR` continues a grid.

    Args:
        options: the experiment and how its runs are made.
        workers: where the cells run.
        out: The folder of the grid; runs/NAME-grid if not given.

    Returns:
        The exit status: 1 if a cell failed.
    """
    folder = _folder_of(options)
    return 1 if run_grid(options, workers, out or folder.with_name(f"{folder.name}-grid")) else 0


def _folder_of(options: RunOptions) -> Path:
    return Path("runs") / Path(options.experiment).name.removesuffix(".py")


def resume(
    folder: Folder,
    *,
    experiment: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
) -> int:
    """Continue a run that was stopped by Ctrl-C, a kill or a power failure; the result is the same as without the stop.

    Args:
        folder: the folder of a run, of a grid or of `metaleader tune`.
        experiment: the experiment file of the run, if it has moved; it must be unchanged.

    Returns:
        The exit status: 1 if a cell of a grid failed.
    """
    if is_launched():
        with launched_group():
            resume_experiment(folder, experiment)
        return 0
    if is_grid(folder):
        return 1 if resume_grid(folder, experiment) else 0
    if is_tune(folder):
        resume_tune(folder, experiment)
    else:
        resume_experiment(folder, experiment)
    return 0


def join(folders: Folders, *, out: Annotated[Path, tyro.conf.arg(metavar="NEW")]) -> None:
    """Join finished runs of one experiment, each of different methods, into one run.

    Methods can then run as separate processes or on separate machines. Experiment, schedule, seeds, tasks and settings
    must be equal.

    Args:
        folders: run folders, all finished; they are not changed.
        out: the new run folder.
    """
    join_experiments(folders, out)


def report(
    folders: Folders, *, out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
) -> None:
    """Compare runs in one self-contained HTML page: figures, tables, checks of claims, configuration.

    Args:
        folders: folders of runs and grids, finished or not.
        out: the page to write; report.html in the first folder if not given.
    """
    out = folders[0] / "report.html" if out is None and folders and is_grid(folders[0]) else out
    folders = tuple(cell for folder in folders for cell in (cell_folders(folder) if is_grid(folder) else [folder]))
    # `runs/*` may match folders without a run: they are skipped, unless there is no run at all.
    runs = [folder for folder in folders if (folder / "records.csv").is_file()] or list(folders)
    for folder in folders:
        if folder not in runs:
            print(f"note: {folder} holds no records and is left out", file=sys.stderr)
    print(report_runs(runs, out).resolve())


def regret(
    folder: Folder,
    *,
    at: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    dynamic: bool = False,
    tolerance: float = 0.01,
    max_evaluations: int = 20_000,
    experiment: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
) -> None:
    """Estimate the regret of the methods of a finished run, from the losses before training on each task.

    Args:
        folder: the run folder; regret.csv is written into it, and its report is written again.
        at: the size of D_t; the largest if not given.
        dynamic: also compare with the best initialisation of every round; takes one optimisation per round.
        tolerance: a comparator has converged when a pass lowers the loss by this fraction at most.
        max_evaluations: meta-gradients per optimisation, after which it stops without convergence.
        experiment: the experiment file of the run, if it has moved; it must be unchanged.
    """
    regret_of_run(folder, experiment, at=at, dynamic=dynamic, tolerance=tolerance, max_evaluations=max_evaluations)


def verify(folder: Folder) -> int:
    """Test the claims of the paper and of the experiment on a run: each agrees, disagrees or is undecided.

    Args:
        folder: the run folder.

    Returns:
        The exit status: 1 if a claim disagrees.
    """
    claims = check_claims(folder)
    title = "claims, with the 90 % interval over paired seeds"
    table = Table(Column("claim", ratio=1), "effect", "interval", "claimed", "verdict", title=title, show_lines=True)
    for claim in claims:
        table.add_row(escape(claim.text), *claim.cells(), f"[{_COLOURS[claim.verdict]}]{claim.verdict}[/]")
    Console().print(table)
    print(counted(claims))
    return 1 if any(claim.verdict == "disagrees" for claim in claims) else 0
