"""The results of a grid, runs that differ in some settings: a table for the terminal, a CSV file and a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Column, Table

from metaleader.experiments.experiment import ALL
from metaleader.experiments.settings import SIZES
from metaleader.report.figures import LOOK, plain_label, plain_ticks
from metaleader.report.loaded import LoadedRun
from metaleader.report.records import estimate, record_error, third, where
from metaleader.report.text import duration, with_error
from metaleader.runs.folder import csv_lines, read_costs
from metaleader.system.files import write_atomic, write_drawn

# Markers and line styles of the combinations of all axes but that of the figure; they repeat after these.
_MARKERS, _LINES = "os^Dvph*XP", ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (7, 1.5, 1.5, 1.5)))


@dataclass(frozen=True)
class Cells:
    """The runs of a grid.

    Attributes:
        runs: those that have records; their names are those of their cells.
        axes: the values of each axis, as text.
        settings: by cell, its values as "path=value" for each axis.
    """

    runs: Sequence[LoadedRun]
    axes: Mapping[str, Sequence[str]]
    settings: Mapping[str, Sequence[str]]

    def values(self, run: LoadedRun, method: str) -> dict[str, str]:
        """The value of each axis in a run; empty for an axis that does not concern the method."""
        pairs = zip(self.axes, self.settings[run.folder.name], strict=True)
        return {path: text.partition("=")[2] if _concerns(path, method, run) else "" for path, text in pairs}

    def rows(self) -> Iterator[tuple[LoadedRun, str, dict[str, str]]]:
        """The runs of each method with the values that concern it, each combination of them once."""
        seen = set()
        for method in dict.fromkeys(method for run in self.runs for method in run.config["methods"]):
            for run in (run for run in self.runs if method in run.config["methods"]):
                values = self.values(run, method)
                if (key := (method, *values.values())) not in seen:
                    seen.add(key)
                    yield run, method, values


def _concerns(path: str, method: str, run: LoadedRun) -> bool:
    """Whether a setting changes the run of a method."""
    group, dot, name = path.partition(".") if "." in path else ("", "", path)
    name = name.partition(".")[0]
    if dot and group != ALL:
        return group == method or group not in run.config["methods"]
    settings: Any = run.config["settings"]
    if not dot and (name in SIZES or name in settings["stream"]["options"]):
        return True
    options = {other: learner.get("options", {}) for other, learner in settings["learners"].items()}
    return name in options[method] or not any(name in values for values in options.values())


def grid_table(cells: Cells) -> Table:
    """Means and standard errors over seeds; the smallest error of a method with all data is marked."""
    first = cells.runs[0]
    headers = [f"{which} third, {size}" for which, size in _readings(first)]
    title = f"{first.error_name} by datapoints, mean ± standard error over seeds; * the smallest of a method"
    columns = [Column(escape(path), no_wrap=True) for path in cells.axes]
    table = Table(Column("method", no_wrap=True), *columns, *headers, Column("time", justify="right"), title=title)
    best: dict[str, float] = {}
    errors = {}
    for run, method, _ in cells.rows():
        readings = [_error(run, method, *reading) for reading in _readings(run)]
        errors[run.name, method] = readings
        if not math.isnan(mean := readings[-1][0]):
            best[method] = min(mean, best.get(method, math.inf))
    previous = None
    for run, method, values in cells.rows():
        readings, costs = errors[run.name, method], read_costs(run.folder)
        mark = " *" if readings[-1][0] == best.get(method) and len(cells.runs) > 1 else ""
        texts = [with_error(*reading) for reading in readings]
        texts[-1] += mark
        time = duration(costs[method].seconds) if method in costs else "–"
        if previous not in (None, method):
            table.add_section()
        previous = method
        table.add_row(escape(run.label(method)), *map(escape, values.values()), *texts, time)
    return table


def write_grid_csv(cells: Cells, path: Path) -> None:
    """Write one row per cell, method and size of D_t: errors over the first and the last third of the tasks."""
    rows: list[list[Any]] = [["cell", *cells.axes, "method", "datapoints", "seeds"]]
    rows[0] += [f"{which}_third{suffix}" for which in ("first", "last") for suffix in ("", "_standard_error")]
    for run, method, values in cells.rows():
        for size in run.sizes:
            pairs = [_error(run, method, which, size) for which in ("first", "last")]
            numbers = [None if math.isnan(value) else value for pair in pairs for value in pair]
            start = [run.folder.name, *values.values(), method, size, run.config["seeds"]]
            rows.append([*start, *numbers])
    write_atomic(path, csv_lines(rows))


def draw_grid(cells: Cells, path: Path) -> list[Path]:
    """Draw the errors over the last third of the tasks against the longest axis; `path` has no suffix.

    Returns:
        The PNG and the SVG.
    """
    sizes = list(dict.fromkeys([cells.runs[0].sizes[0], cells.runs[0].sizes[-1]]))
    numeric = [name for name, values in cells.axes.items() if all(_number(value) is not None for value in values)]
    x_name = max(numeric or cells.axes, key=lambda name: len(cells.axes[name]), default="")
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(1.2 + 4.2 * len(sizes), 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
            _draw_size(axes, cells, size, x_name, x_name in numeric)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, handlelength=3.2, fontsize=8)
        paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
        write_drawn(paths[0], lambda file: figure.savefig(file, format="png", dpi=160, metadata={"Software": None}))
        write_drawn(paths[1], lambda file: figure.savefig(file, format="svg", metadata={"Date": None}))
    return paths


def _draw_size(axes: Axes, cells: Cells, size: int, x_name: str, is_numeric: bool) -> None:
    texts = list(cells.axes.get(x_name, [""]))
    places = [float(_number(text) or 0.0) for text in texts] if is_numeric else [float(i) for i in range(len(texts))]
    lines: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    labels: dict[str, LoadedRun] = {}
    others: list[str] = []
    for run, method, values in cells.rows():
        other = ", ".join(f"{name}={value}" for name, value in values.items() if name != x_name and value)
        others += [] if other in others else [other]
        labels.setdefault(method, run)
        error = _error(run, method, "last", size)
        # A method that the axis does not concern is a horizontal line.
        at = [places[texts.index(values[x_name])]] if values.get(x_name) else places
        lines.setdefault((method, other), []).extend((place, *error) for place in at)
    for (method, other), points in lines.items():
        style, number = labels[method].styles[method], others.index(other)
        x, mean, error = np.array(sorted(points)).T
        label = plain_label(style.label) + (f", {plain_label(other)}" if other else "")
        look: Any = {"color": style.colour, "marker": _MARKERS[number % 10], "linestyle": _LINES[number % 4]}
        axes.errorbar(x, mean, np.nan_to_num(error), label=label, capsize=2, markersize=4.5, linewidth=1.3, **look)
    axes.set_ylabel(f"{cells.runs[0].error_name} after {size:,} datapoints, last third")
    axes.set_xlabel(x_name)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if not is_numeric:
        axes.set_xticks(places, [plain_label(text) for text in texts], rotation=20 if len(texts) > 3 else 0)
    elif min(places) > 0 and max(places) >= 8 * min(places):
        axes.set_xscale("log")
        plain_ticks(axes.xaxis)


def _readings(run: LoadedRun) -> list[tuple[Any, int]]:
    few, many = run.sizes[0], run.sizes[-1]
    return [("last", few), *([("last", many)] if many != few else [])]


def _error(run: LoadedRun, method: str, which: Any, size: int) -> tuple[float, float]:
    return estimate(where(third(run.measured, which), method=method, datapoints=size), record_error)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
