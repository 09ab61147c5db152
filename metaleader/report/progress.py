"""What a run shows: a live display or plain lines while it runs, TensorBoard's files, and the table at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from metaleader.evaluate import Record
from metaleader.report.curves import STYLES, record_error, third


class Display:
    """Shows how far each method is: bars on a terminal, otherwise one line a round.

    Args:
        console: where to.
        error_name: what the error is called.
        rounds: how many each method plays.
        tensorboard: the folder for TensorBoard's event files; None writes none.
    """

    def __init__(self, console: Console, error_name: str, rounds: int, tensorboard: Path | None = None) -> None:
        self._console, self._error_name, self._rounds, self._tensorboard = console, error_name, rounds, tensorboard
        self._writer: Any = None
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
        self._close_writer()

    def begin(self, method: str, played: int, line: str) -> None:
        """Begin a method that has played some rounds already, with a line about it."""
        self._label, self._played, self._seconds = STYLES[method][0], played, []
        self._console.print(f"{self._label}: {line}", highlight=False, markup=False, soft_wrap=True)
        self._bar = self._bars.add_task(self._label, total=self._rounds, completed=played, note="")
        self._close_writer()
        if self._tensorboard is not None:
            self._writer = summary_writer()(str(self._tensorboard / method), purge_step=played)

    def reveal(self, records: Sequence[Record], part: float) -> None:
        """Show the records of a reveal, one for each seed, with which a part of the round is over."""
        self._note = _note(records, self._rounds, self._error_name)
        self._bars.update(self._bar, completed=records[0].round + min(part, 1.0), note=self._note)
        if self._writer is not None:
            tag = f"{self._error_name} after {records[0].datapoints} datapoints"
            self._writer.add_scalar(tag, _error(records), records[0].round)

    def round_saved(self, seconds: float) -> None:
        """Say that a round is saved."""
        self._seconds.append(seconds)
        if self._writer is not None:
            self._writer.flush()
        if not self._console.is_terminal:
            left = float(np.mean(self._seconds)) * (self._rounds - self._played - len(self._seconds))
            line = f"{self._label}: {self._note}, {_duration(left)} left"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def summary_writer() -> Any:
    """TensorBoard's writer, which is an extra.

    Raises:
        ValueError: when it is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]
    except ImportError as error:
        raise ValueError(
            f"--tensorboard needs the package tensorboard ({error}); install metaleader[tensorboard], or leave it out"
        ) from error
    return SummaryWriter


def result_table(
    records: Sequence[dict[str, Any]],
    methods: Sequence[str],
    panels: Sequence[int],
    error_name: str,
    seconds: dict[str, float],
) -> Table:
    """Mean and standard error over seeds, over the last third of the tasks and the first.

    Args:
        records: as `read_records` gives them.
        methods: one a row.
        panels: the sizes of D_t to look at, the few first and the many last.
        error_name: what the error is called.
        seconds: that each method took.
    """
    first, last = third(records, "first"), third(records, "last")
    few, many = panels[0], panels[-1]
    table = Table(title=f"{error_name} by datapoints, mean ± standard error over seeds")
    heads = (f"last third, {few}", f"last third, {many}", f"first third, {few}", "solved late", "seconds")
    table.add_column("method", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right" if head == "seconds" else "left")
    for method in methods:
        early, late = ([r for r in part if r["method"] == method] for part in (first, last))
        solved = [r["needed"] is not None for r in late if r["datapoints"] == many]
        table.add_row(
            STYLES[method][0],
            _mean([r for r in late if r["datapoints"] == few]),
            _mean([r for r in late if r["datapoints"] == many]),
            _mean([r for r in early if r["datapoints"] == few]),
            f"{np.mean(solved):.0%}",
            f"{seconds.get(method, 0.0):.0f}",
        )
    return table


def _mean(records: Sequence[Mapping[str, Any]]) -> str:
    by_seed: dict[int, list[float]] = {}
    for record in records:
        by_seed.setdefault(record["seed"], []).append(record_error(record))
    means = np.array([np.mean(values) for values in by_seed.values()])
    if len(means) < 2:
        return f"{means.mean():.3f}"
    return f"{means.mean():.3f} ± {means.std(ddof=1) / np.sqrt(len(means)):.3f}"


def _note(records: Sequence[Record], rounds: int, error_name: str) -> str:
    first = records[0]
    error = f"{error_name} {_error(records):.3g}"
    return f"round {first.round + 1}/{rounds}, {first.task}, {first.datapoints} datapoints, {error}"


def _error(records: Sequence[Record]) -> float:
    return float(np.mean([record_error(vars(record)) for record in records]))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
