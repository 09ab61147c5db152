"""Contact sheets of streams: one row per task, examples with their labels or poses, as a PNG."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from metaleader.system.files import write_drawn
from metaleader.tasks import Task, TaskStream

_INK, _GREY, _RED, _BLUE = "#222222", "#777777", "#d62828", "#1e7dd6"
_DPI = 110
# Held-out datapoints shown per task.
HELD_OUT = 2
# Sizes in pixels. An image is enlarged by an integer factor to at least _IMAGE.
_IMAGE, _MARGIN, _CAPTION = 80, 8, 20
_LEFT, _TOP, _GAP, _NAME = 250, 68, 22, 60


def contact_sheet(
    stream: TaskStream | Sequence[Task],
    path: str | os.PathLike[str],
    tasks: int = 8,
    examples: int = 10,
    title: str = "",
) -> None:
    """Draw a stream: images with captions, or the points of one-dimensional regression.

    Args:
        stream: tasks of images, uint8 or in [0, 1], (N, 1 or 3, H, W), or of x and y with one value each. Names of
            classes come from `stream.names`. If there is a `stream.camera(t)`, its `arrows` draw the labels as poses.
        path: the PNG to write.
        tasks: number of tasks shown, evenly spaced over the stream.
        examples: training datapoints shown per task.
        title: the title above the sheet.

    Raises:
        ValueError: if the data cannot be drawn.
    """
    if tasks < 1 or examples < 1 or len(stream) == 0:
        raise ValueError(f"a sheet needs a task and an example, got {min(tasks, len(stream))} and {examples}")
    rounds = np.linspace(0, len(stream) - 1, min(tasks, len(stream))).round().astype(int).tolist()
    chosen = [(t, stream[t]) for t in rounds]
    first = chosen[0][1].train
    if isinstance(first.x, Tensor) and first.x.ndim == 4 and first.x.shape[1] in (1, 3):
        camera = getattr(stream, "camera", None)
        cameras = [camera(t) if camera else None for t in rounds]
        figure = _image_sheet(chosen, cameras, examples, getattr(stream, "names", {}), title)
    elif all(isinstance(values, Tensor) and values[0].numel() == 1 for values in first):
        figure = _curve_sheet(chosen, title)
    else:
        raise ValueError("only images (N, 1 or 3, H, W) and regression of one value on one value can be drawn")
    write_drawn(path, FigureCanvasAgg(figure).print_png)


def _image_sheet(chosen: list[tuple[int, Task]], cameras: list[Any], examples: int, names: Any, title: str) -> Figure:
    """One row per task: its round and name, training examples, a gap, held-out examples."""
    side = max(chosen[0][1].train.x.shape[2:])
    scale = -(-_IMAGE // side)
    cell = side * scale + _MARGIN
    shown = {"train": min(examples, max(len(task.train.y) for _, task in chosen)), "test": HELD_OUT}
    starts = {"train": _LEFT, "test": _LEFT + shown["train"] * cell + _GAP}
    width = starts["test"] + HELD_OUT * cell + _MARGIN
    height = _TOP + len(chosen) * (cell + _CAPTION)
    figure, axes = _canvas(width, height)
    axes.text(16, 14, title, fontsize=13, weight="bold", color=_INK, va="top")
    meaning = "x, y, azimuth" if any(cameras) else "label" if chosen[0][1].classes is None else "label and class"
    for left, heading in zip(
        (12, _NAME, *starts.values()), ("round", "task", f"revealed: {meaning}", "held out"), strict=True
    ):
        axes.text(left, _TOP - 8, heading, fontsize=8, color=_GREY)
    for row, ((t, task), camera) in enumerate(zip(chosen, cameras, strict=True)):
        top = _TOP + row * (cell + _CAPTION)
        middle = top + (cell - _MARGIN) / 2
        axes.text(44, middle, str(t), fontsize=9, color=_GREY, va="center", ha="right")
        name = "\n".join(textwrap.wrap(task.name.replace("_", " "), 24)[:3])
        axes.text(_NAME, middle, name, fontsize=10, color=_INK, va="center")
        for split, count in shown.items():
            x, y = (values[:count] for values in getattr(task, split))
            for i, left in enumerate(range(starts[split], starts[split] + len(x) * cell, cell)):
                _draw_image(axes, x[i], left, top, scale)
                caption = _caption(task, y[i], names, is_pose=camera is not None)
                centre = left + x[i].shape[-1] * scale / 2
                axes.text(centre, top + cell - _MARGIN + 3, caption, ha="center", va="top", fontsize=7, color=_INK)
            if camera is not None:
                _draw_arrows(axes, camera.arrows(y.numpy()) * (side * scale), starts[split], cell, top)
    return figure


def _canvas(width: int, height: int) -> tuple[Figure, Axes]:
    """A figure whose coordinates are pixels from the top left corner."""
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="auto", autoscale_on=False)
    axes.axis("off")
    return figure, axes


def _draw_image(axes: Axes, image: Tensor, left: int, top: int, scale: int) -> None:
    pixels = image.permute(1, 2, 0).cpu().numpy()
    if pixels.dtype != np.uint8:
        pixels = (np.clip(pixels, 0.0, 1.0) * 255).round().astype(np.uint8)
    rows, columns = pixels.shape[:2]
    extent = (left, left + columns * scale, top + rows * scale, top)
    axes.imshow(
        np.broadcast_to(pixels, (rows, columns, 3)),
        extent=extent,
        interpolation="nearest",
        aspect="auto",
        origin="upper",
    )


def _draw_arrows(axes: Axes, arrows: np.ndarray, left: int, cell: int, top: int) -> None:
    """Draw poses over the images of a row: arrows from the position of the object to where its front points."""
    for i, ends in enumerate(arrows):
        tail, tip = ends + np.array([left + i * cell, top])
        style = {"arrowstyle": "-|>", "mutation_scale": 8, "shrinkA": 0, "shrinkB": 0, "color": _RED, "linewidth": 1.1}
        axes.annotate("", tip, tail, arrowprops=style)
        axes.plot(*tail, "o", color=_RED, markersize=2)


def _caption(task: Task, y: Tensor, names: Any, is_pose: bool) -> str:
    values = y.flatten().tolist()
    if is_pose:
        azimuth = round(np.degrees(np.arctan2(values[2], values[3])))
        return f"{values[0]:+.2f} {values[1]:+.2f} {azimuth}°".replace("-", "−")
    if y.is_floating_point():
        return " ".join(f"{value:.2f}" for value in values[:4])
    if task.classes is None:
        return " ".join(str(value) for value in values[:3])
    global_class = task.classes[values[0]]
    return f"{values[0]} {names.get(global_class, global_class)}".replace("_", " ")[:18]


def _curve_sheet(chosen: list[tuple[int, Task]], title: str) -> Figure:
    """One small plot per task, on common scales: the held-out curve and the training points."""
    columns = min(4, len(chosen))
    lines = -(-len(chosen) // columns)
    figure = Figure(figsize=(0.6 + 2.6 * columns, 0.8 + 1.9 * lines), dpi=110, facecolor="white", layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, (t, task) in zip(grid, chosen, strict=False):
        (x, y), (test_x, test_y) = ([values.flatten().cpu() for values in batch] for batch in (task.train, task.test))
        order = test_x.argsort()
        axes.plot(test_x[order], test_y[order], color=_BLUE, linewidth=1.2, label="held out")
        axes.plot(x, y, ".", color=_RED, markersize=3.5, label="revealed")
        axes.set_title(f"round {t}: {task.name}", fontsize=9, color=_INK)
        axes.tick_params(labelsize=7, colors=_GREY)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(chosen) :]:
        axes.axis("off")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold", color=_INK)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="upper right", ncols=2, fontsize=8, frameon=False)
    return figure
