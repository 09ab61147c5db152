"""The gallery: the paper's figures, drawn from records for print."""

from __future__ import annotations

import math
import os
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

from metaleader.report.curves import (
    Curve,
    Panel,
    Records,
    band,
    cumulative_panels,
    learning_panel,
    marked,
    stream_panels,
    style,
)
from metaleader.system.files import write_drawn

# The same records give the same bytes: no random ids in the SVG (a salt), no dates (see _save).
_LOOK: Any = {"svg.hashsalt": "metaleader", "font.size": 10, "axes.labelsize": 10, "axes.linewidth": 0.8}


def draw_figures(
    records: Records,
    sizes: Iterable[int],
    folder: str | os.PathLike[str],
    error_name: str = "error",
    gamma: float | None = None,
) -> list[Path]:
    """Draw a run's figures, each as PNG and SVG: the stream's panels, learning within a task, the cumulative loss.

    Args:
        records: as `read_records` gives them.
        sizes: the sizes of D_t that the panels look at, as `Preset.panels`.
        folder: where to write `figure`, `learning` and `cumulative`.
        error_name: what the error is called.
        gamma: the threshold of proficiency; without one the panels show accuracies.

    Returns:
        The files, `figure.png` first.
    """
    paths = []
    for name, panels in (
        ("figure", stream_panels(records, sizes, gamma, error_name)),
        ("learning", [learning_panel(records, error_name)]),
        ("cumulative", cumulative_panels(records)),
    ):
        paths += draw_panels(panels, Path(folder) / name)
    return paths


def draw_panels(panels: Sequence[Panel], path: Path) -> list[Path]:
    """Draw panels side by side; `path` has no suffix. Returns the PNG and the SVG."""
    with matplotlib.rc_context(_LOOK):
        alone = len(panels) < 2
        figure = Figure(figsize=(5.6, 4.4) if alone else (1.0 + 3.7 * len(panels), 3.9), layout="constrained")
        figure.set_layout_engine("constrained", w_pad=0.08, wspace=0.03)
        FigureCanvasAgg(figure)
        for axes, panel in zip(figure.subplots(1, max(1, len(panels)), squeeze=False)[0], panels, strict=False):
            _draw_panel(axes, panel)
        curves = {curve.method: curve for panel in panels for curve in panel.curves}
        if curves:
            handles: list[Any] = [
                Line2D([], [], label=style(name)[0], **_line(name), markersize=5.5) for name in curves
            ]
            if any(np.isfinite(curve.error).any() for curve in curves.values()):
                handles.append(Patch(color="#999999", alpha=0.4, linewidth=0, label="standard error over seeds"))
            _draw_legend(figure, handles, 2 if alone else len(handles))
        paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
        write_drawn(paths[0], lambda file: figure.savefig(file, format="png", dpi=160, metadata={"Software": None}))
        write_drawn(paths[1], lambda file: figure.savefig(file, format="svg", metadata={"Date": None}))
    return paths


def _draw_legend(figure: Figure, handles: list[Any], columns: int) -> None:
    """Above the panels, in as few rows as fit into the width."""
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
        _plain_ticks(axes.xaxis)
    if panel.y_log:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    if panel.zero:
        axes.set_ylim(bottom=0)
    if panel.limit is not None:
        _show_censoring(axes, panel)


def _draw_curve(axes: Axes, curve: Curve, order: int, panel: Panel) -> None:
    line = _line(curve.method)
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
    """The level at which unsolved tasks are counted, and the fraction solved beside each mean."""
    assert panel.limit is not None
    axes.axhline(panel.limit, color="#555555", linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_ylim(0, panel.limit * 1.42)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick < 0.94 * panel.limit] + [panel.limit])
    solved = "   ".join(f"{style(c.method)[0]} {c.solved:.0%}" for c in panel.curves)
    lines = _wrapped(f"solved: {solved}", 44)
    if any(curve.censored.any() for curve in panel.curves):
        lines.append(f"unsolved tasks count as {panel.limit} (hollow markers)")
    axes.text(0.02, 0.995, "\n".join(lines), transform=axes.transAxes, va="top", fontsize=7.5, color="#333333")


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for part in text.split("   "):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + part
    return lines


def _line(method: str) -> dict:
    _, colour, marker, dashes = style(method)
    return {"color": colour, "marker": marker, "linestyle": (0, dashes) if dashes else "-", "linewidth": 1.5}


def _plain_ticks(axis) -> None:
    """Ticks at 1, 2 and 5 of each decade, in plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
