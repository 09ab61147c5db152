"""The tables of the report, for runs of one stream: results, other readings, costs and configurations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from metaleader.report.loaded import LoadedRun, Shown
from metaleader.report.pairs import paired_differences
from metaleader.report.records import estimate, finished, methods_of, step_suffixes, third, where
from metaleader.report.svg import html_table
from metaleader.report.text import duration, with_error
from metaleader.runs.folder import read_costs

# With more methods, each is compared with the first only.
_ALL_PAIRS = 5


def results_table(runs: Sequence[Shown]) -> str:
    """Means over the first and the last third of the tasks, one row per method and run."""
    first = runs[0]
    headers = [*_row_headers(runs), "tasks"]
    if first.gamma is not None:
        headers += ["solved, all tasks", "needed, first third", "needed, last third"]
    for size in first.sizes:
        headers += [f"{first.measure} after {size:,}, {which} third" for which in ("first", "last")]
    rows = []
    for method, run in _methods(runs):
        selected = where(run.measured, method=method)
        row = [*_row_start(method, run, runs), str(len({r["round"] for r in selected}))]
        # The thirds are those of the run, so that all methods are compared on the same tasks.
        thirds = [where(third(run.measured, which), method=method) for which in ("first", "last")]
        if first.gamma is not None:
            limit = max(r["datapoints"] for r in run.measured)
            solved = [r["needed"] is not None for r in where(finished(run.measured), method=method)]
            row.append(f"{sum(solved) / len(solved):.0%}" if solved else "–")
            for records in thirds:
                needed = estimate(where(records, datapoints=limit), lambda r, limit=limit: r["needed"] or limit)
                row.append(with_error(*needed))
        for size in first.sizes:
            row += [with_error(*estimate(where(records, datapoints=size), run.value)) for records in thirds]
        rows.append(row)
    note = "Over the first and the last third of the tasks."
    if first.gamma is not None:
        kind = "an accuracy" if first.has_accuracy else f"a {first.error_name}"
        note += (
            f" Needed are the datapoints to {kind} of {first.gamma:g}; a task that never reaches it counts with all its"
            " data. The fraction of tasks solved is in the same row."
        )
    table = html_table("Mean ± standard error over seeds", headers, rows, kind=_kind(runs))
    return f"<h3>Results</h3><p>{escape(note)}</p>{table}"


def readings_table(runs: Sequence[Shown]) -> str:
    """Other numbers of steps, statistics of D_t, w_t before training, and numbers of new datapoints, if recorded."""
    columns = {name for run in runs for name in (run.records[0] if run.records else {})}
    found = dict.fromkeys(suffix for run in runs for suffix in step_suffixes(run.records))
    suffixes = {suffix: f"{suffix[1:]} step{'' if suffix == '_1' else 's'}" for suffix in found}
    if "loss_task" in columns:
        suffixes["_task"] = "batch norm by D_t"
    if "loss_before" in columns:
        suffixes["_before"] = "before training on the task"
    has_new = "new_datapoints" in columns
    if not suffixes and not has_new:
        return ""
    steps = runs[0].steps
    default = "default" if steps is None else f"{steps} steps (the default)"
    headers = [*_row_headers(runs), "datapoints", default, *suffixes.values()]
    headers += ["new datapoints"] if has_new else []
    rows = []
    for method, run in _methods(runs):
        late = where(third(run.measured, "last"), method=method)
        for size in run.sizes:
            records = where(late, datapoints=size)
            cells = [
                estimate(records, lambda r, run=run, suffix=suffix: run.value(r, suffix)) for suffix in ("", *suffixes)
            ]
            if has_new:
                cells.append(estimate(records, lambda r: r.get("new_datapoints")))
            rows.append([*_row_start(method, run, runs), f"{size:,}", *(with_error(*cell) for cell in cells)])
    caption = f"{runs[0].measure}, last third of the tasks: adaptation steps and batch-norm statistics"
    return "<h3>Other readings</h3>" + html_table(caption, headers, rows, kind=_kind(runs))


def differences_table(runs: Sequence[Shown]) -> str:
    """Paired differences of errors: all pairs of up to five methods, otherwise all with the first method."""
    rows = []
    for run in runs:
        for size in run.sizes:
            seeds: dict[str, set[int]] = {}
            for record in where(third(run.measured, "last"), datapoints=size):
                seeds.setdefault(record["method"], set()).add(record["seed"])
            names = [name for name in methods_of(run.measured) if len(seeds.get(name, ())) > 1]
            pairs = list(itertools.combinations(names, 2))
            pairs = pairs if len(names) <= _ALL_PAIRS else [pair for pair in pairs if names[0] in pair]
            try:
                differences = paired_differences(run.measured, size, pairs=pairs)
            except ValueError:  # a run that was stopped: methods have different rounds
                continue
            for found in differences:
                if found.interval is not None:
                    low, high = found.interval
                    names_shown = f"{run.label(found.second)} − {run.label(found.first)}"
                    row = [names_shown, *([run.name] if len(runs) > 1 else [])]
                    row += [f"{size:,}", str(found.seeds), f"{found.mean:.3g}", f"{low:.3g} to {high:.3g}"]
                    rows.append([*row, f"{found.p:.2g}"])
    if not rows:
        return ""
    headers = ["errors", *(["run"] if len(runs) > 1 else []), "datapoints", "seeds", "difference", "95 % interval", "p"]
    note = (
        "Differences of errors within a seed, over the last third of the tasks: positive if the method named second is"
        " better. Intervals and p-values are those of a paired t test, not adjusted for the number of pairs."
    )
    table = html_table("Mean difference over seeds", headers, rows, kind=_kind(runs))
    return f"<h3>Paired differences</h3><p>{escape(note)}</p>{table}"


def costs_table(runs: Sequence[LoadedRun]) -> str:
    """Time and memory of the runs that have a `times.csv`."""
    rows = [
        [
            run.label(method),
            run.name,
            duration(cost.seconds),
            "–" if cost.peak_mb is None else f"{cost.peak_mb:,.0f} MB",
        ]
        for run in runs
        for method, cost in read_costs(run.folder).items()
    ]
    headers = ["method", "run", "time", "peak memory of the process so far"]
    table = html_table("Total of all seeds", headers, rows, kind="runs")
    return f"<h3>Time and memory</h3>{table}" if rows else ""


def configuration_table(runs: Sequence[LoadedRun]) -> str:
    """Everything in `config.json`, one column per run; rows that differ are highlighted."""
    flat = [_flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [[key, *(config.get(key, "–") for config in flat)] for key in keys]
    rows.append(["records", *(f"{len(run.records):,}" for run in runs)])
    table = html_table("config.json", ["setting", *(run.name for run in runs)], rows, kind="words")
    for key, *values in rows:
        if len(set(values)) > 1:
            heading = f'<tr><th scope="row">{escape(key)}</th>'
            table = table.replace(heading, heading.replace("<tr>", '<tr class="differs">'), 1)
    return "<h3>Configuration, versions and hardware</h3>" + table


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}: ")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            flat[f"{prefix}{key}"] = text if isinstance(text, str) else json.dumps(text)
    return flat


def _row_headers(runs: Sequence[Shown]) -> list[str]:
    return ["method", "run"] if len(runs) > 1 else ["method"]


def _row_start(method: str, run: Shown, runs: Sequence[Shown]) -> list[str]:
    return [run.label(method), run.name] if len(runs) > 1 else [run.label(method)]


def _kind(runs: Sequence[Shown]) -> str:
    """The CSS class of a table: with several runs, the second column is text."""
    return "runs" if len(runs) > 1 else ""


def _methods(runs: Sequence[Shown]) -> list[tuple[str, Shown]]:
    """The rows of a table: all runs of a method are adjacent."""
    methods = methods_of([r for run in runs for r in run.measured])
    return [(method, run) for method in methods for run in runs if where(run.measured, method=method)]
