"""A contact sheet of a stream: tasks in rows, examples with their labels or poses, as one PNG."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from metaleader.tasks import Task, TaskStream

_INK, _GREY, _RED, _BLUE = "#222222", "#777777", "#d62828", "#1e7dd6"
_HELD_OUT = 2
# All in inches: an image, the space it takes with its margin, and that of its caption.
_IMAGE, _CELL, _CAPTION = 0.76, 0.82, 0.2
_LEFT, _TOP = 2.3, 0.62


def contact_sheet(
    stream: TaskStream | Sequence[Task],
    path: str | os.PathLike[str],
    tasks: int = 8,
    examples: int = 10,
    title: str = "",
) -> None:
    """Draw a stream: images with a caption each, or the points of one-dimensional regression.

    Args:
        stream: of images, uint8 or in [0, 1], (N, 1 or 3, H, W); or of x and y with one value each. Four targets are
            drawn as a pose: x, y, sine and cosine of the direction. Names of classes are taken from `stream.names`.
        path: of the PNG to write.
        tasks: how many, spread evenly over the stream.
        examples: training datapoints shown of each.
        title: above the sheet.

    Raises:
        ValueError: for data that cannot be drawn.
    """
    if tasks < 1 or examples < 1 or len(stream) == 0:
        raise ValueError(f"a sheet needs a task and an example, got {min(tasks, len(stream))} and {examples}")
    rounds = np.linspace(0, len(stream) - 1, min(tasks, len(stream))).round().astype(int).tolist()
    chosen = [(t, stream[t]) for t in rounds]
    first = chosen[0][1].train
    if isinstance(first.x, Tensor) and first.x.ndim == 4 and first.x.shape[1] in (1, 3):
        figure = _image_sheet(chosen, examples, getattr(stream, "names", {}), title)
    elif all(isinstance(part, Tensor) and part[0].numel() == 1 for part in first):
        figure = _curve_sheet(chosen, title)
    else:
        raise ValueError("only images (N, 1 or 3, H, W) and regression of one value on one value can be drawn")
    FigureCanvasAgg(figure).print_png(Path(path))


def _image_sheet(chosen: list[tuple[int, Task]], examples: int, names: Any, title: str) -> Figure:
    """One row a task: its round and name, training examples, a gap, held-out examples."""
    width = _LEFT + (examples + _HELD_OUT) * _CELL + 0.35
    height = _TOP + len(chosen) * (_CELL + _CAPTION) + 0.1
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.text(0.15, height - 0.12, title, fontsize=13, weight="bold", color=_INK, va="top")
    starts = {"train": _LEFT, "test": _LEFT + examples * _CELL + 0.2}
    for part, heading in (("train", "revealed"), ("test", "held out")):
        axes.text(starts[part], height - _TOP + 0.06, heading, fontsize=8, color=_GREY)
    for row, (t, task) in enumerate(chosen):
        bottom = height - _TOP - (row + 1) * (_CELL + _CAPTION) + _CAPTION + (_CELL - _IMAGE)
        axes.text(0.15, bottom + _IMAGE / 2, str(t), fontsize=10, color=_GREY, va="center")
        name = "\n".join(textwrap.wrap(task.name.replace("_", " "), 22)[:3])
        axes.text(0.5, bottom + _IMAGE / 2, name, fontsize=10, color=_INK, va="center")
        for part, count in (("train", examples), ("test", _HELD_OUT)):
            x, y = getattr(task, part)
            for i in range(min(count, len(x))):
                left = starts[part] + i * _CELL
                _draw_image(axes, x[i], left, bottom)
                if y[i].numel() == 4 and y.is_floating_point():
                    _draw_pose(axes, left, bottom, y[i].tolist())
                caption = _caption(task, y[i], names)
                axes.text(left + _IMAGE / 2, bottom - 0.03, caption, ha="center", va="top", fontsize=6.5, color=_INK)
    axes.set(xlim=(0, width), ylim=(0, height), aspect="auto")
    axes.axis("off")
    return figure


def _draw_image(axes: Axes, image: Tensor, left: float, bottom: float) -> None:
    pixels = image.permute(1, 2, 0).cpu().numpy()
    if pixels.dtype != np.uint8:
        pixels = (np.clip(pixels, 0.0, 1.0) * 255).round().astype(np.uint8)
    extent = (left, left + _IMAGE, bottom, bottom + _IMAGE)
    axes.imshow(np.broadcast_to(pixels, (*pixels.shape[:2], 3)), extent=extent, interpolation="nearest")


def _draw_pose(axes: Axes, left: float, bottom: float, pose: list[float]) -> None:
    """A map of the table in the image's corner: where the object is, and an arrow where it looks."""
    size = 0.26
    left, bottom = left + _IMAGE - size, bottom + _IMAGE - size
    axes.add_patch(Rectangle((left, bottom), size, size, facecolor="white", edgecolor=_GREY, linewidth=0.5, zorder=3))
    x, y, sine, cosine = pose
    start = (left + size * (0.5 + 0.22 * x), bottom + size * (0.5 + 0.22 * y))
    end = (start[0] + 0.25 * size * cosine, start[1] + 0.25 * size * sine)
    axes.plot(*start, ".", color=_RED, markersize=3, zorder=4)
    axes.plot(*zip(start, end, strict=True), color=_RED, linewidth=1, zorder=4)


def _caption(task: Task, y: Tensor, names: Any) -> str:
    values = y.flatten().tolist()
    if y.is_floating_point():
        if len(values) == 4:
            return f"{values[0]:+.1f} {values[1]:+.1f} {np.degrees(np.arctan2(values[2], values[3])):.0f}°"
        return " ".join(f"{value:.2f}" for value in values[:3])
    if task.classes is None:
        return " ".join(str(value) for value in values[:3])
    global_class = task.classes[values[0]]
    return f"{values[0]} {names.get(global_class, global_class)}".replace("_", " ")[:16]


def _curve_sheet(chosen: list[tuple[int, Task]], title: str) -> Figure:
    """One small plot a task, on common scales: the held-out curve and the training points."""
    columns = min(4, len(chosen))
    lines = -(-len(chosen) // columns)
    figure = Figure(figsize=(0.6 + 2.6 * columns, 0.8 + 1.9 * lines), dpi=110, facecolor="white", layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, (t, task) in zip(grid, chosen, strict=False):
        (x, y), (test_x, test_y) = ([part.flatten().cpu() for part in batch] for batch in (task.train, task.test))
        order = test_x.argsort()
        axes.plot(test_x[order], test_y[order], color=_BLUE, linewidth=1.2, label="held out")
        axes.plot(x, y, ".", color=_RED, markersize=3.5, label="revealed")
        axes.set_title(f"{t}   {task.name}", fontsize=9, color=_INK)
        axes.tick_params(labelsize=7, colors=_GREY)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(chosen) :]:
        axes.axis("off")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold", color=_INK)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="upper right", ncols=2, fontsize=8, frameon=False)
    return figure
