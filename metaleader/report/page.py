"""The report: any number of runs compared in one HTML page that needs nothing else, no network above all."""

from __future__ import annotations

import base64
import importlib.resources
import os
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from metaleader.report.claims import check_claims
from metaleader.report.curves import Panel, cumulative_panels, learning_panel, methods_of, stream_panels
from metaleader.report.loaded import Exhibit, read_exhibits
from metaleader.report.sheet import contact_sheet
from metaleader.report.svg import chart, common_axes, legend
from metaleader.report.tables import configuration_table, costs_table, readings_table, results_table
from metaleader.system.files import check_target, write_atomic
from metaleader.tasks import Task, TaskStream

_SHEET_TASKS, _SHEET_EXAMPLES = 8, 8


def write_report(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of some run folders.

    Args:
        folders: of runs, finished or not; runs of one preset are shown on common axes.
        out: the page to write; `report.html` in the first folder if None.

    Returns:
        The page.

    Raises:
        ValueError: for no folder, or files that are not those of a run.
        OSError: when a file cannot be read or written.
    """
    groups: dict[str, list[Exhibit]] = {}
    for run in read_exhibits(folders):
        groups.setdefault(run.stream, []).append(run)
    path = Path(out) if out is not None else Path(folders[0]) / "report.html"
    check_target(path)
    write_atomic(path, _page(groups).encode())
    return path


def _page(groups: Mapping[str, Sequence[Exhibit]]) -> str:
    title = "metaleader: " + ", ".join(groups)
    sections = [_group(f"stream-{i}", stream, runs) for i, (stream, runs) in enumerate(groups.items())]
    links = [f'<li><a href="#stream-{i}">{escape(stream)}</a></li>' for i, stream in enumerate(groups)]
    nav = f'<nav aria-label="Streams"><ul>{"".join(links)}</ul></nav>' if len(groups) > 1 else ""
    num = sum(len(runs) for runs in groups.values())
    # The policy lets the page load nothing: all it needs is in it.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{_asset("page.css")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{num} run{"s" if num > 1 else ""}. Every value is a mean over seeds, ± its standard error, shaded in the charts
(on a logarithmic axis by an equal factor up and down). Hover over a chart, or focus it and use the arrow keys, to read
its values.</p>
{nav}
</header>
<main>
{"".join(sections)}
</main>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _group(anchor: str, stream: str, runs: Sequence[Exhibit]) -> str:
    summary = next((run.preset.summary for run in runs if run.preset), "")
    parts = [
        f'<h2 id="{anchor}">{escape(stream)}</h2>',
        f"<p>{escape(summary)}</p>" if summary else "",
        results_table(runs),
        _figures(runs),
        readings_table(runs),
        *(_checks(run) for run in runs),
        costs_table(runs),
        _sheet(runs[0]),
        configuration_table(runs),
    ]
    return f'<section aria-labelledby="{anchor}">{"".join(parts)}</section>'


def _figures(runs: Sequence[Exhibit]) -> str:
    """A row of charts for each run; charts of one kind have common axes in all runs."""
    rows: list[list[Panel]] = []
    for run in runs:
        panels = stream_panels(run.records, run.sizes, run.gamma, run.error_name)
        rows.append([*panels, learning_panel(run.records, run.error_name), *cumulative_panels(run.records)])
    by_label: dict[str, list[Panel]] = {}
    for panel in (panel for row in rows for panel in row):
        by_label.setdefault(panel.y_label, []).append(panel)
    axes = {label: common_axes(panels) for label, panels in by_label.items()}
    parts = ["<h3>Figures</h3>"]
    for run, row in zip(runs, rows, strict=True):
        heading = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        charts = "".join(chart(panel, axes[panel.y_label]) for panel in row)
        parts.append(f'{heading}{legend(methods_of(run.records))}<div class="charts">{charts}</div>')
    parts.append(
        "<p>The cumulative loss adds up, task by task, the mean loss over the task's reveals. It is not the regret: no "
        "comparator is subtracted.</p>"
    )
    return "".join(parts)


def _checks(run: Exhibit) -> str:
    """What `metaleader verify` says of the run."""
    heading = f"<h3>Checks of the paper's claims: {escape(run.name)}</h3>"
    try:
        claims = check_claims(run.folder)
    except (ValueError, OSError) as error:
        return f"{heading}<p>Not checked: {escape(str(error))}</p>"
    items = [
        f'<li><span class="verdict {escape(str(claim.verdict))}">{escape(str(claim.verdict))}</span>'
        f"<strong>{escape(str(claim.name))}</strong><br>{escape(str(claim.text))}</li>"
        for claim in claims
    ]
    return f'{heading}<ul class="checks">{"".join(items)}</ul>' if items else ""


def _sheet(run: Exhibit) -> str:
    """A contact sheet of the run's stream; nothing where its data is not at hand."""
    num = 1 + max((r["round"] for r in run.records), default=-1)
    if run.preset is None or num == 0:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sheet.png"
        try:
            stream = _Played(run.preset.stream(0, run.config.get("data")), num)
            contact_sheet(stream, path, _SHEET_TASKS, _SHEET_EXAMPLES, f"{run.stream}, seed 0, {num} tasks played")
        except (ValueError, OSError, ImportError, RuntimeError):
            return ""
        image = base64.b64encode(path.read_bytes()).decode()
    shown = min(_SHEET_TASKS, len(stream))
    alt = f"Contact sheet: {shown} of the {len(stream)} tasks played of {run.stream}, with some of their datapoints"
    picture = f'<img class="sheet" alt="{escape(alt)}" src="data:image/png;base64,{image}">'
    return f'<h3>Tasks</h3><div class="scroll" tabindex="0" role="region" aria-label="Contact sheet">{picture}</div>'


class _Played:
    """The tasks of a stream that were played."""

    def __init__(self, stream: TaskStream, num: int) -> None:
        self._stream, self._num = stream, min(num, len(stream))
        self.names = getattr(stream, "names", {})

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, t: int) -> Task:
        return self._stream[t]


def _asset(name: str) -> str:
    return importlib.resources.files("metaleader.report").joinpath(name).read_text()
