"""The tables of the report: results, other readings, costs and configurations, for runs of one stream."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from metaleader.report.curves import Records, estimate, finished, methods_of, style, third
from metaleader.report.loaded import Exhibit
from metaleader.report.svg import html_table, with_error


def results_table(runs: Sequence[Exhibit]) -> str:
    """Means over the first and the last third of the tasks, for each method, run by run."""
    first = runs[0]
    headers = ["method", *(["run"] if len(runs) > 1 else []), "tasks"]
    if first.gamma is not None:
        headers += ["solved, all tasks", "needed, first third", "needed, last third"]
    for size in first.sizes:
        headers += [f"{first.measure} after {size:,}, {part} third" for part in ("first", "last")]
    rows = []
    for method, run, own in _methods(runs):
        row = [style(method)[0], *([run.name] if len(runs) > 1 else []), str(len({r["round"] for r in own}))]
        # The thirds are those of the run, so that every method is looked at over the same tasks.
        early, late = ([r for r in third(run.measured, part) if r["method"] == method] for part in ("first", "last"))
        if first.gamma is not None:
            limit = max(r["datapoints"] for r in run.measured)
            done = [r for r in finished(run.measured) if r["method"] == method]
            solved = [r["needed"] is not None for r in done]
            row.append(f"{sum(solved) / len(solved):.0%}" if solved else "–")
            row += [
                _estimate([r for r in part if r["datapoints"] == limit], lambda r, limit=limit: r["needed"] or limit)
                for part in (early, late)
            ]
        for size in first.sizes:
            row += [_estimate([r for r in part if r["datapoints"] == size], run.value) for part in (early, late)]
        rows.append(row)
    note = "Over the first and the last third of the tasks."
    if first.gamma is not None:
        kind = "an accuracy" if first.has_accuracy else f"a {first.error_name}"
        note += (
            f" Needed are the datapoints to {kind} of {first.gamma:g}; a task that never gets there counts with all its"
            " data, and the fraction solved stands beside."
        )
    return f"<h3>Results</h3><p>{escape(note)}</p>" + html_table(
        "Mean ± standard error over seeds", headers, rows, kind=_kind(runs)
    )


def readings_table(runs: Sequence[Exhibit]) -> str:
    """Other numbers of steps, batch norm with the statistics of D_t, and how much data was new, where recorded."""
    found = {key for run in runs for key in (run.records[0] if run.records else {})}
    steps = sorted(int(match[1]) for key in found if (match := re.fullmatch(r"loss_(\d+)", key)))
    suffixes = [(f"_{number}", f"{number} step{'s' if number > 1 else ''}") for number in steps]
    if "loss_task" in found:
        suffixes.append(("_task", "batch norm by D_t"))
    new = "new_datapoints" in found
    if not suffixes and not new:
        return ""
    own_steps = runs[0].preset.steps[0] if runs[0].preset else 5
    headers = ["method", *(["run"] if len(runs) > 1 else []), "datapoints", f"{own_steps} steps (the records' own)"]
    headers += [name for _, name in suffixes] + (["new datapoints"] if new else [])
    rows = []
    for method, run, _ in _methods(runs):
        late = [r for r in third(run.measured, "last") if r["method"] == method]
        for size in run.sizes:
            part = [r for r in late if r["datapoints"] == size]
            values = [
                _estimate(part, lambda r, run=run, suffix=suffix: run.value(r, suffix))
                for suffix in ("", *(suffix for suffix, _ in suffixes))
            ]
            if new:
                values.append(_estimate(part, lambda r: r.get("new_datapoints")))
            rows.append([style(method)[0], *([run.name] if len(runs) > 1 else []), f"{size:,}", *values])
    caption = f"{runs[0].measure}, last third of the tasks: adaptation steps and batch-norm statistics"
    return "<h3>Other readings</h3>" + html_table(caption, headers, rows, kind=_kind(runs))


def costs_table(runs: Sequence[Exhibit]) -> str:
    """Time and memory from `times.csv`, where a run has one: method, seconds and peak_mb, many rows a method."""
    rows = []
    for run in runs:
        path = run.folder / "times.csv"
        if not path.is_file():
            continue
        seconds: dict[str, float] = {}
        memory: dict[str, float] = {}
        with open(path, newline="", errors="replace") as file:
            for line in csv.DictReader(file):
                method, spent = str(line.get("method")), _number(line.get("seconds"))
                if math.isnan(spent):
                    continue
                seconds[method] = seconds.get(method, 0.0) + spent
                if not math.isnan(held := _number(line.get("peak_mb"))):
                    memory[method] = max(memory.get(method, 0.0), held)
        for method, spent in seconds.items():
            held_text = f"{memory[method]:,.0f} MB" if method in memory else "–"
            rows.append([style(method)[0], run.name, _duration(spent), held_text])
    if not rows:
        return ""
    return "<h3>Time and memory</h3>" + html_table(
        "Spent, all seeds together", ["method", "run", "time", "peak memory of the process so far"], rows, kind="runs"
    )


def configuration_table(runs: Sequence[Exhibit]) -> str:
    """Everything in `config.json`, a column a run; rows that differ are marked."""
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
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}: ")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            found[f"{prefix}{key}"] = text if isinstance(text, str) else json.dumps(text)
    return found


def _kind(runs: Sequence[Exhibit]) -> str:
    """The second column is of words where it names the run."""
    return "runs" if len(runs) > 1 else ""


def _methods(runs: Sequence[Exhibit]) -> list[tuple[str, Exhibit, Records]]:
    """Each method's records, run by run, so that the runs of a method stand below each other."""
    methods = methods_of([r for run in runs for r in run.measured])
    found = ((m, run, [r for r in run.measured if r["method"] == m]) for m in methods for run in runs)
    return [(method, run, own) for method, run, own in found if own]


def _estimate(records: Records, value: Any) -> str:
    result = estimate(records, value)
    return with_error(result.mean, result.error)


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
