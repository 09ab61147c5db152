"""The output of a run: progress bars or lines, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from metaleader.evaluate import Record
from metaleader.report.loaded import LoadedRun
from metaleader.report.records import estimate, over_seeds, record_error, third, where
from metaleader.report.text import duration, with_error
from metaleader.runs.folder import read_costs


class Display:
    """Shows the progress of each method: bars on a terminal, otherwise one line per round.

    Each method has `rounds` rounds, and one of the `labels`.
    """

    def __init__(self, console: Console, error_name: str, rounds: int, labels: Mapping[str, str]) -> None:
        self._console, self._error_name, self._rounds, self._labels = console, error_name, rounds, labels
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(compact=True),
        )
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, method: str, played: int, line: str) -> None:
        """Begin a method that has already played some rounds; prints the line after its label."""
        self._label, self._played, self._seconds = self._labels[method], played, []
        self._console.print(f"{self._label}: {line}", highlight=False, markup=False, soft_wrap=True)
        self._bar = self._bars.add_task(escape(self._label), total=self._rounds, completed=played, note="")

    def reveal(self, records: Sequence[Record], fraction: float) -> None:
        """Show the records of a reveal, one per seed, after which this fraction of the round is done."""
        first, name = records[0], self._error_name
        error = float(over_seeds(np.array([record_error(vars(record)) for record in records]))[0])
        progress = f"round {first.round + 1}/{self._rounds}, {first.task}, {first.datapoints} datapoints"
        self._note = f"{progress}, {name} {error:.3g}"
        self._bars.update(self._bar, completed=first.round + min(fraction, 1.0), note=self._note)

    def round_saved(self, seconds: float) -> None:
        """Report that a round has been saved after this time."""
        self._seconds.append(seconds)
        if not self._console.is_terminal:
            left = float(np.mean(self._seconds)) * (self._rounds - self._played - len(self._seconds))
            line = f"{self._label}: {self._note}, {duration(left)} left"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class CellsDisplay:
    """Shows the progress of the cells of a grid: bars on a terminal, otherwise a line when a cell begins and ends.

    Args:
        console: where it is shown.
        rounds: the number of rounds of each cell.
    """

    def __init__(self, console: Console, rounds: Mapping[str, int]) -> None:
        self._console, self._rounds, self._played = console, dict(rounds), dict.fromkeys(rounds, 0)
        self._ended: set[str] = set()
        self._cells: dict[str, TaskID] = {}
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(compact=True),
        )
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)

    @property
    def running(self) -> set[str]:
        """The cells that have begun and not ended."""
        return set(self._cells)

    def __enter__(self) -> Self:
        self._bars.start()
        total = max(1, sum(self._rounds.values()))
        self._all = self._bars.add_task("all cells", total=total, note=f"0/{len(self._rounds)} cells")
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def event(self, cell: str, kind: str, text: str) -> None:
        """Show that a cell began, began again, ended or failed."""
        if kind in ("began", "again"):
            if cell not in self._cells:
                self._cells[cell] = self._bars.add_task(escape(cell), total=max(1, self._rounds[cell]), note="")
        else:
            self._ended.add(cell)
            if cell in self._cells:
                self._bars.remove_task(self._cells.pop(cell))
            if kind == "ended":
                self.progress({cell: self._rounds[cell]})
        words = {"began": "began", "again": "continues after its process was killed", "ended": "finished"}
        line = f"{cell}: {words.get(kind, 'failed')}{f': {text}' if text else ''}"
        if kind != "began" or not self._console.is_terminal:
            count = f" ({len(self._ended)}/{len(self._rounds)})" if kind in ("ended", "failed") else ""
            self._console.print(line + count, highlight=False, markup=False, soft_wrap=True)
        self._bars.update(self._all, note=f"{len(self._ended)}/{len(self._rounds)} cells")

    def progress(self, played: Mapping[str, int]) -> None:
        """Show the numbers of rounds played by some cells."""
        for cell, number in played.items():
            self._played[cell] = number
            if cell in self._cells:
                note = f"round {number}/{self._rounds[cell]}"
                self._bars.update(self._cells[cell], completed=number, note=note)
        self._bars.update(self._all, completed=sum(self._played.values()))


def result_table(run: LoadedRun) -> Table:
    """Mean and standard error over seeds for the smallest and largest D_t, over the last and the first third."""
    few, many = run.sizes[0], run.sizes[-1]
    costs = read_costs(run.folder)
    headers = (f"last third, {few}", f"last third, {many}", f"first third, {few}", "solved late")
    title = f"{run.error_name} by datapoints, mean ± standard error over seeds"
    table = Table(Column("method", no_wrap=True), *headers, Column("seconds", justify="right"), title=title)
    for method in run.config["methods"]:
        early, late = (where(third(run.records, which), method=method) for which in ("first", "last"))
        groups = [where(records, datapoints=size) for records, size in ((late, few), (late, many), (early, few))]
        cells = [with_error(*estimate(records, record_error)) for records in groups]
        solved = [r["needed"] is not None for r in groups[1]]
        seconds = f"{costs[method].seconds:.0f}" if method in costs else "–"
        share = f"{np.mean(solved):.0%}" if solved else "–"
        table.add_row(escape(run.label(method)), *cells, share, seconds)
    return table
