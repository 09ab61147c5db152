"""The report: runs compared in one self-contained HTML page, which loads nothing from the network."""

from __future__ import annotations

import base64
import importlib.resources
import os
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from metaleader.report.claims import check_claims
from metaleader.report.curves import Panel, run_panels
from metaleader.report.loaded import LoadedRun, Shown, load_runs
from metaleader.report.records import num_rounds
from metaleader.report.regret import regret_panels, regret_section
from metaleader.report.sheet import contact_sheet
from metaleader.report.svg import chart, common_axes, legend
from metaleader.report.tables import configuration_table, costs_table, differences_table, readings_table, results_table
from metaleader.streams.base import View
from metaleader.system.builders import call_with
from metaleader.system.files import check_target, write_atomic

READING = """Every value is a mean over seeds ± its standard error. The charts show the standard error as a band (on a
logarithmic axis by an equal factor up and down). Hover over a chart, or focus it and use the arrow keys, to read its
values."""
_SHEET_TASKS, _SHEET_EXAMPLES = 8, 8


def report_runs(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of run folders.

    Args:
        folders: run folders, finished or not; runs of one experiment are shown on common axes.
        out: the page to write; `report.html` in the first folder if None.

    Returns:
        The path of the page.
    """
    groups: dict[str, list[LoadedRun]] = {}
    for run in load_runs(folders):
        groups.setdefault(run.config["experiment"], []).append(run)
    path = Path(out) if out is not None else Path(folders[0]) / "report.html"
    check_target(path)
    write_atomic(path, _page(groups).encode())
    return path


def _page(groups: Mapping[str, Sequence[LoadedRun]]) -> str:
    sections = [_group(f"stream-{i}", stream, runs) for i, (stream, runs) in enumerate(groups.items())]
    links = [f'<li><a href="#stream-{i}">{escape(stream)}</a></li>' for i, stream in enumerate(groups)]
    nav = f'<nav aria-label="Streams"><ul>{"".join(links)}</ul></nav>' if len(groups) > 1 else ""
    num = sum(len(runs) for runs in groups.values())
    text = f"<p>{num} run{'s' if num > 1 else ''}. {READING}</p>{nav}"
    return html_page("metaleader: " + ", ".join(groups), text, "".join(sections))


def html_page(title: str, introduction: str, content: str) -> str:
    """A page that loads nothing.

    Args:
        title: its title as text.
        introduction: HTML below the title.
        content: HTML with the sections.
    """
    # The policy forbids the page to load anything: everything it needs is inline.
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
{introduction}
</header>
<main>
{content}
</main>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _group(anchor: str, stream: str, runs: Sequence[LoadedRun]) -> str:
    summary = next((run.preset.summary for run in runs if run.preset), "")
    blocks = [
        f'<h2 id="{anchor}">{escape(stream)}</h2>',
        f"<p>{escape(summary)}</p>" if summary else "",
        *measured_sections(runs),
        regret_section(runs),
        *(_regret_charts(run) for run in runs),
        *(_checks(run) for run in runs),
        costs_table(runs),
        _sheet(runs[0]),
        configuration_table(runs),
    ]
    return f'<section aria-labelledby="{anchor}">{"".join(blocks)}</section>'


def measured_sections(runs: Sequence[Shown]) -> list[str]:
    """The parts of a report that need records only: tables and charts."""
    return [results_table(runs), _figures(runs), readings_table(runs), differences_table(runs)]


def _figures(runs: Sequence[Shown]) -> str:
    """A row of charts per run; charts with the same label have common axes in all runs."""
    rows: list[list[Panel]] = []
    for run in runs:
        figures = run_panels(run.records, run.sizes, run.gamma, run.error_name, run.given)
        rows.append([panel for panels in figures.values() for panel in panels])
    by_label: dict[str, list[Panel]] = {}
    for panel in (panel for row in rows for panel in row):
        by_label.setdefault(panel.y_label, []).append(panel)
    axes = {label: common_axes(panels) for label, panels in by_label.items()}
    blocks = ["<h3>Figures</h3>"]
    for run, row in zip(runs, rows, strict=True):
        heading = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        charts = "".join(chart(panel, axes[panel.y_label]) for panel in row)
        blocks.append(f'{heading}{legend(run.styles.values())}<div class="charts">{charts}</div>')
    blocks.append(
        "<p>The cumulative loss is the sum over tasks of the mean loss over a task's reveals. It is not the regret: no "
        "comparator is subtracted.</p>"
    )
    return "".join(blocks)


def _regret_charts(run: LoadedRun) -> str:
    panels = regret_panels(run)
    if not panels:
        return ""
    charts = "".join(chart(panel, common_axes([panel])) for panel in panels)
    return f'{legend(run.styles.values())}<div class="charts">{charts}</div>'


def _checks(run: LoadedRun) -> str:
    """The verdicts of `metaleader verify`."""
    heading = f"<h3>Checks of claims: {escape(run.name)}</h3>"
    try:
        claims = check_claims(run.folder)
    except (ValueError, OSError) as error:
        return f"{heading}<p>Not checked: {escape(str(error))}</p>"
    items = [
        f'<li><span class="verdict {claim.verdict}">{claim.verdict}</span>'
        f"<strong>{escape(claim.name)}</strong><br>{escape(claim.text)}</li>"
        for claim in claims
    ]
    return f'{heading}<ul class="checks">{"".join(items)}</ul>' if items else ""


def _sheet(run: LoadedRun) -> str:
    """A contact sheet of the stream of a run; empty if its data is missing."""
    num, seed = num_rounds(run.records), run.config["first_seed"]
    if run.preset is None or num == 0:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sheet.png"
        try:
            stream = View(call_with(run.preset.stream, seed=seed, data=run.config["data"]), range(num))
            title = f"{run.config['experiment']}, seed {seed}, {num} tasks played"
            contact_sheet(stream, path, _SHEET_TASKS, _SHEET_EXAMPLES, title)
        except (ValueError, OSError, ImportError, RuntimeError):
            return ""
        image = base64.b64encode(path.read_bytes()).decode()
    shown = min(_SHEET_TASKS, len(stream))
    alt = (
        f"Contact sheet: {shown} of the {num} tasks played of {run.config['experiment']}, with some of their datapoints"
    )
    picture = f'<img class="sheet" alt="{escape(alt)}" src="data:image/png;base64,{image}">'
    return f'<h3>Tasks</h3><div class="scroll" tabindex="0" role="region" aria-label="Contact sheet">{picture}</div>'


def _asset(name: str) -> str:
    return importlib.resources.files("metaleader.report").joinpath(name).read_text()
