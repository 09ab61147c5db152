"""The paper's figures, drawn from records for print."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from metaleader.methods import Style
from metaleader.report.curves import Curve, Given, Panel, band, marked, run_panels
from metaleader.report.records import Records
from metaleader.system.files import write_drawn

# The salt replaces random ids in SVG files, so that the same records give the same bytes.
LOOK: Any = {"svg.hashsalt": "metaleader", "font.size": 10, "axes.labelsize": 10, "axes.linewidth": 0.8}


def draw_figures(
    records: Records,
    sizes: Iterable[int],
    folder: str | os.PathLike[str],
    error_name: str = "error",
    gamma: float | None = None,
    given: Given = None,
) -> list[Path]:
    """Draw the figures of a run, each as PNG and SVG: the panels of the paper, learning within a task, cumulative loss.

    Args:
        records: from `read_records`.
        sizes: the sizes of D_t shown, such as `Experiment.panels`.
        folder: where to write `figure`, `learning` and `cumulative`.
        error_name: the name of the error.
        gamma: the threshold of proficiency; None shows accuracies.
        given: labels and colours of methods, as `{"mine": {"label": "my method", "colour": "#D55E00"}}`.

    Returns:
        The files, `figure.png` first.
    """
    figures = run_panels(records, sizes, gamma, error_name, given)
    return [path for name, panels in figures.items() for path in draw_panels(panels, Path(folder) / name)]


def draw_panels(panels: Sequence[Panel], path: Path) -> list[Path]:
    """Draw panels in a row; `path` has no suffix. Returns the PNG and the SVG."""
    with matplotlib.rc_context(LOOK):
        single = len(panels) < 2
        figure = Figure(figsize=(5.6, 4.4) if single else (1.0 + 3.7 * len(panels), 3.9), layout="constrained")
        figure.set_layout_engine("constrained", w_pad=0.08, wspace=0.03)
        FigureCanvasAgg(figure)
        for axes, panel in zip(figure.subplots(1, max(1, len(panels)), squeeze=False)[0], panels, strict=False):
            _draw_panel(axes, panel)
        curves = {curve.method: curve for panel in panels for curve in panel.curves}
        if curves:
            handles: list[Any] = [
                Line2D([], [], label=plain_label(curve.style.label), **_line(curve.style), markersize=5.5)
                for curve in curves.values()
            ]
            if any(np.isfinite(curve.error).any() for curve in curves.values()):
                handles.append(Patch(color="#999999", alpha=0.4, linewidth=0, label="standard error over seeds"))
            _draw_legend(figure, handles, 2 if single else len(handles))
        paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
        write_drawn(paths[0], lambda file: figure.savefig(file, format="png", dpi=160, metadata={"Software": None}))
        write_drawn(paths[1], lambda file: figure.savefig(file, format="svg", metadata={"Date": None}))
    return paths


def _draw_legend(figure: Figure, handles: list[Any], columns: int) -> None:
    """Draw the legend above the panels, in as few rows as fit the width."""
    for rows in range(math.ceil(len(handles) / columns), len(handles) + 1):
        columns = math.ceil(len(handles) / rows)
        legend = figure.legend(
            handles=handles, loc="outside upper left", ncols=columns, frameon=False, handlelength=3.2
        )
        if legend.get_window_extent().width <= figure.bbox.width or columns == 1:
            return
        legend.remove()


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if not panel.curves:
        axes.text(0.5, 0.5, "no records", transform=axes.transAxes, ha="center", va="center", color="#777777")
        axes.set(xticks=[], yticks=[])
        return
    for order, curve in enumerate(panel.curves):
        _draw_curve(axes, curve, len(panel.curves) - order, panel)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    if panel.x_log:
        axes.set_xscale("log")
        plain_ticks(axes.xaxis)
    if panel.y_log:
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
    if panel.zero:
        axes.set_ylim(bottom=0)
    if panel.limit is not None:
        _show_censoring(axes, panel)


def _draw_curve(axes: Axes, curve: Curve, order: int, panel: Panel) -> None:
    line = _line(curve.style)
    marks = marked(curve, order, panel.x_log)
    axes.plot(curve.x, curve.mean, **{**line, "marker": ""}, zorder=2 + order / 10)
    for hollow in (False, True):
        here = marks & ((curve.censored > 0) == hollow)
        face = {"markerfacecolor": "white"} if hollow else {}
        axes.plot(
            curve.x[here],
            curve.mean[here],
            **{**line, "linestyle": "", **face},
            markersize=4.5,
            zorder=2.05 + order / 10,
        )
    axes.fill_between(curve.x, *band(curve, panel.y_log), color=line["color"], alpha=0.18, linewidth=0, zorder=1)


def _show_censoring(axes: Axes, panel: Panel) -> None:
    """Draw the level at which unsolved tasks are counted, and write the fraction of tasks solved."""
    assert panel.limit is not None
    axes.axhline(panel.limit, color="#555555", linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_ylim(0, panel.limit * 1.42)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick < 0.94 * panel.limit] + [panel.limit])
    solved = "   ".join(
        f"{plain_label(curve.style.label)} {curve.solved:.0%}".replace(" ", "\xa0") for curve in panel.curves
    )
    lines = [line.replace("\xa0", " ") for line in textwrap.wrap(f"solved:\xa0{solved}", 47)]
    if any(curve.censored.any() for curve in panel.curves):
        lines.append(f"unsolved tasks count as {panel.limit} (hollow markers)")
    axes.text(0.02, 0.995, "\n".join(lines), transform=axes.transAxes, va="top", fontsize=7.5, color="#333333")


def plain_label(label: str) -> str:
    """A label without meaning to matplotlib: $ begins mathematics there, and _ a line without a legend."""
    return (" " if label.startswith("_") else "") + label.replace("$", r"\$")


def _line(style: Style) -> dict[str, Any]:
    linestyle = (0, style.dashes) if style.dashes else "-"
    return {"color": style.colour, "marker": style.marker, "linestyle": linestyle, "linewidth": 1.5}


def plain_ticks(axis) -> None:
    """Put ticks at 1, 2 and 5 of each decade, without exponents."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
