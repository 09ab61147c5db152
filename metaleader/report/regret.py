"""The regret of a run, as `metaleader regret` has written it: reading it, a table and a figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from metaleader.report.curves import Curve, Panel
from metaleader.report.loaded import LoadedRun
from metaleader.report.records import over_seeds, where
from metaleader.report.svg import html_table
from metaleader.report.text import with_error

COLUMNS = ("method", "seed", "round", "datapoints", "loss", "static_loss", "static_regret", "static_converged")
COLUMNS += ("dynamic_loss", "dynamic_regret", "dynamic_converged")
_NAMES = {"static": "static regret", "dynamic": "dynamic regret"}


def read_regret(folder: Path) -> list[dict[str, Any]]:
    """Read `regret.csv`; empty without it.

    Raises:
        ValueError: if the file is not a table of regrets.
    """
    path = folder / "regret.csv"
    if not path.is_file():
        return []
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))
        if any(set(row) != set(COLUMNS) for row in rows):
            raise ValueError(f"its columns must be {', '.join(COLUMNS)}")
        text, integers = ("method",), ("seed", "round", "datapoints", "static_converged", "dynamic_converged")
        return [
            {n: v if n in text else None if v == "" else int(v) if n in integers else float(v) for n, v in row.items()}
            for row in rows
        ]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and run `metaleader regret` again") from error


def _cells(run: LoadedRun) -> tuple[list[str], list[list[str]]]:
    """The headers and rows of the table: the regret after the last round."""
    rows = read_regret(run.folder)
    kinds = [kind for kind in _NAMES if any(row[f"{kind}_regret"] is not None for row in rows)]
    last = max((row["round"] for row in rows), default=0)
    headers = [f"{name}{suffix}" for name in (_NAMES[k] for k in kinds) for suffix in ("", ", per task", ", converged")]
    cells = []
    for method in run.config["methods"]:
        final = where(rows, method=method, round=last)
        if not final:
            continue
        line = [run.label(method)]
        for kind in kinds:
            values = np.array([row[f"{kind}_regret"] for row in final])
            flags = [row[f"{kind}_converged"] for row in where(rows, method=method)]
            for scaled in (values, values / (last + 1)):
                mean, error = over_seeds(scaled)
                line.append(with_error(float(mean), float(error)))
            line.append(f"{np.mean(flags):.0%}")
        cells.append(line)
    return headers, cells


def regret_table(run: LoadedRun) -> Table:
    """The regret of each method after the last round, for a terminal."""
    headers, cells = _cells(run)
    title = "regret after the last round, mean ± standard error over seeds; an underestimate where not converged"
    table = Table(Column("method", no_wrap=True), *headers, title=title)
    for line in cells:
        table.add_row(*line)
    return table


def regret_section(runs: Sequence[LoadedRun]) -> str:
    """The tables of the report; empty if no run has a `regret.csv`."""
    blocks = []
    for run in runs:
        headers, cells = _cells(run)
        if cells:
            blocks.append(html_table(f"Regret after the last round: {run.name}", ["method", *headers], cells))
    note = (
        "The sum over rounds of the loss before training on a task, minus that of the best initialisation in hindsight"
        " (static), or of the best one of every round (dynamic). The comparators are found by optimisation; those that"
        " have not converged make the regret too small."
    )
    return f"<h3>Regret</h3><p>{escape(note)}</p>{''.join(blocks)}" if blocks else ""


def regret_panels(run: LoadedRun) -> list[Panel]:
    """The regret against the number of tasks; one panel per kind of regret that was computed."""
    rows, panels = read_regret(run.folder), []
    for kind, name in _NAMES.items():
        curves = []
        for method, style in run.styles.items():
            selected = [row for row in where(rows, method=method) if row[f"{kind}_regret"] is not None]
            if not selected:
                continue
            seeds = dict.fromkeys(row["seed"] for row in selected)
            values = np.array([[row[f"{kind}_regret"] for row in where(selected, seed=seed)] for seed in seeds])
            mean, error = over_seeds(values)
            x = np.arange(1, len(mean) + 1)
            curves.append(Curve(method, style, x, mean, error, np.zeros(len(mean))))
        if curves:
            size = rows[0]["datapoints"]
            panels.append(Panel(tuple(curves), "task", f"{name} after {size:,} datapoints"))
    return panels
