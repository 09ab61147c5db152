"""The gallery: the paper's figures, drawn from records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

# Okabe and Ito's colour-blind-safe palette, with a marker each for print.
STYLES: dict[str, tuple[str, str, str]] = {
    "ftml": ("FTML", "#0072B2", "o"),
    "ftml-last": ("FTML, last layer", "#56B4E9", "s"),
    "ftl": ("FTL", "#E69F00", "^"),
    "toe": ("TOE", "#009E73", "D"),
    "scratch": ("from scratch", "#CC79A7", "v"),
}


def stream_figure(
    records: Sequence[dict[str, Any]], few: int, many: int, path: Path, error_name: str = "error", window: int = 5
) -> list[Path]:
    """Draw a stream's three panels, as PNG and SVG: datapoints to proficiency, error after few and after many.

    Args:
        records: as `read_records` gives them; the error is 1 - accuracy, or the loss for regression.
        few: the size of D_t of the middle panel.
        many: the size of D_t of the right panel.
        path: without suffix.
        error_name: the label of the error axes.
        window: tasks in the running mean that is drawn; the band is the standard error over seeds.
    """
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    methods = [name for name in STYLES if any(r["method"] == name for r in records)]
    largest = max(r["datapoints"] for r in records)
    for method in methods:
        own = [r for r in records if r["method"] == method]
        needed = [{**r, "value": r["needed"] or largest} for r in own if r["datapoints"] == largest]
        _draw(panels[0], method, needed, window)
        for panel, size in zip(panels[1:], (few, many), strict=True):
            _draw(panel, method, [{**r, "value": record_error(r)} for r in own if r["datapoints"] == size], window)
    panels[0].set_ylabel("datapoints to proficiency")
    panels[0].set_ylim(0, largest * 1.05)
    for panel, size in zip(panels[1:], (few, many), strict=True):
        panel.set_ylabel(f"{error_name} after {size} datapoints")
        panel.set_yscale("log")
    for panel in panels:
        panel.set_xlabel("task")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[2].legend(frameon=False, fontsize=9)
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for target in paths:
        figure.savefig(target, dpi=150)
    plt.close(figure)
    return paths


def record_error(record: dict[str, Any]) -> float:
    """The error of a record: 1 - accuracy, or the loss for regression."""
    return record["loss"] if record["accuracy"] is None else 1 - record["accuracy"]


def _draw(axes: Axes, method: str, records: Sequence[dict[str, Any]], window: int) -> None:
    if not records:
        return
    label, colour, marker = STYLES[method]
    rounds = sorted({r["round"] for r in records})
    seeds = sorted({r["seed"] for r in records})
    value = {(r["seed"], r["round"]): r["value"] for r in records}
    table = np.array([[value[seed, t] for t in rounds] for seed in seeds], dtype=float)
    width = min(window, len(rounds))
    table = np.apply_along_axis(lambda row: np.convolve(row, np.ones(width) / width, mode="valid"), 1, table)
    x = np.asarray(rounds[width - 1 :])
    mean = table.mean(0)
    axes.plot(x, mean, color=colour, marker=marker, markevery=max(1, len(x) // 8), markersize=4, label=label)
    if len(seeds) > 1:
        error = table.std(0, ddof=1) / np.sqrt(len(seeds))
        axes.fill_between(x, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
