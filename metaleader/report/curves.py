"""The curves of a run's figures as numbers, with standard errors over seeds.

A figure is a row of panels, and a panel is a few curves with labels. `report.figures` draws panels for print,
`report.svg` for the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from metaleader.methods import Style
from metaleader.report.records import (
    Records,
    finished,
    methods_of,
    num_rounds,
    of_one_protocol,
    over_seeds,
    record_error,
    third,
    where,
)

# With this many tasks or more, curves over tasks are running means, because single tasks differ too much.
_SMOOTH_FROM, _WINDOW = 15, 5


@dataclass(frozen=True)
class Curve:
    """The curve of a method.

    Attributes:
        method: the name of the method.
        style: its label, colour, marker and dashes.
        x: the task or the number of datapoints, (N,).
        mean: over seeds, (N,).
        error: the standard error over seeds, (N,); NaN where only one seed has a value.
        censored: the fraction of the tasks behind each value that never met the threshold, (N,).
        solved: the fraction of all tasks that met the threshold; None without a threshold.
    """

    method: str
    style: Style
    x: np.ndarray
    mean: np.ndarray
    error: np.ndarray
    censored: np.ndarray
    solved: float | None = None


@dataclass(frozen=True)
class Panel:
    """Curves on common axes.

    Attributes:
        curves: one per method with records; may be empty.
        x_label: label of the horizontal axis.
        y_label: label of the vertical axis.
        x_log: whether the horizontal axis is logarithmic.
        y_log: whether the vertical axis is logarithmic.
        limit: the value at which tasks that never met the threshold are counted: the number of all their datapoints.
        zero: whether the vertical axis starts at zero.
    """

    curves: tuple[Curve, ...]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    limit: int | None = None
    zero: bool = False


# Labels and colours of methods, by method
Given = Mapping[str, Mapping[str, Any]] | None


def run_panels(
    records: Records, sizes: Iterable[int], gamma: float | None, error_name: str, given: Given = None
) -> dict[str, list[Panel]]:
    """The panels of a run's figures; the arguments are those of `draw_figures`."""
    return {
        "figure": stream_panels(records, sizes, gamma, error_name, given),
        "learning": [learning_panel(records, error_name, given)],
        "cumulative": cumulative_panels(records, given),
    }


def stream_panels(
    records: Records, sizes: Iterable[int], gamma: float | None, error_name: str, given: Given = None
) -> list[Panel]:
    """The panels of the paper: datapoints to proficiency and errors, or accuracies without a threshold."""
    methods, records = methods_of(records, given), of_one_protocol(records)
    window = _WINDOW if num_rounds(records) >= _SMOOTH_FROM else 1
    x_label = "task" if window == 1 else f"task (running mean of {window} tasks)"
    has_accuracy = any(r["accuracy"] is not None for r in records)
    suffix = _protocol_suffix(records)
    panels = []
    if gamma is not None:
        done = finished(records)
        limit = max((r["datapoints"] for r in done), default=0)
        curves = _curves(
            done, methods, "round", lambda r: limit if r["needed"] is None else r["needed"], window, solved=True
        )
        label = f"datapoints to {'accuracy' if has_accuracy else error_name} {gamma:g}{suffix}"
        panels.append(Panel(curves, x_label, label, limit=limit, zero=True))
    by_accuracy = gamma is None and has_accuracy
    value, name = ((lambda r: r["accuracy"]), "accuracy") if by_accuracy else (record_error, error_name)
    for size in sizes:
        curves = _curves(where(records, datapoints=size), methods, "round", value, window)
        label = f"{name} after {size:,} datapoints{suffix}"
        panels.append(Panel(curves, x_label, label, y_log=not by_accuracy and _needs_log(curves)))
    return panels


def learning_panel(records: Records, error_name: str, given: Given = None) -> Panel:
    """Learning within a task: the error against the number of datapoints, over the last third of the tasks."""
    methods, records = methods_of(records, given), of_one_protocol(records)
    curves = _curves(third(records, "last"), methods, "datapoints", record_error)
    sizes = [r["datapoints"] for r in records]
    x_log = bool(sizes) and max(sizes) >= 12 * min(sizes)
    label = f"{error_name} within a task, last third{_protocol_suffix(records)}"
    return Panel(curves, "datapoints of the task", label, x_log, _needs_log(curves))


def cumulative_panels(records: Records, given: Given = None) -> list[Panel]:
    """The sum over rounds of the mean loss over a round's measured reveals; one panel per protocol."""
    panels = []
    for protocol in dict.fromkeys(r["protocol"] for r in records):
        rounds: dict[tuple[str, int, int], list[float]] = {}
        for r in where(records, protocol=protocol):
            rounds.setdefault((r["method"], r["seed"], r["round"]), []).append(r["loss"])
        totals: dict[tuple[str, int], float] = {}
        sums = []
        for (method, seed, t), losses in sorted(rounds.items(), key=lambda item: item[0][2]):
            totals[method, seed] = totals.get((method, seed), 0.0) + float(np.mean(losses))
            sums.append({"method": method, "seed": seed, "round": t, "value": totals[method, seed]})
        # Not the regret: records do not contain the loss of the comparator that Eq. 3 subtracts.
        name = "cumulative loss" if protocol == "online" else f"cumulative loss, {protocol} protocol"
        curves = _curves(sums, methods_of(records, given), "round", lambda r: r["value"])
        panels.append(Panel(curves, "task", name, zero=True))
    return panels


def band(curve: Curve, y_log: bool) -> tuple[np.ndarray, np.ndarray]:
    """The lower and upper edge of the shading, (N,) each: the mean plus and minus the standard error.

    On a logarithmic axis the shading is the standard error of the logarithm, error / mean: the edges are the mean
    divided and multiplied by exp(error / mean). For small errors both are the same. For large errors, mean - error
    approaches zero, which a logarithmic axis cannot show. The factor is at most e, because the standard error of
    positive numbers does not exceed their mean.
    """
    error = np.nan_to_num(curve.error)
    if not y_log:
        return curve.mean - error, curve.mean + error
    factor = np.exp(error / curve.mean)
    return curve.mean / factor, curve.mean * factor


def marked(curve: Curve, order: int, x_log: bool) -> np.ndarray:
    """Which points of a curve get a marker: all of up to 12, otherwise about 9, at offsets that depend on the order."""
    along = np.log(curve.x) if x_log else curve.x.astype(float)
    places = np.linspace(along[0], along[-1], 9) + (along[-1] - along[0]) / 8 * (order % 4) / 4
    marks = np.zeros(len(along), dtype=bool)
    marks[np.abs(along[:, None] - places).argmin(0) if len(along) > 12 else slice(None)] = True
    return marks


def _curves(
    records: Records,
    methods: Mapping[str, Style],
    x_name: str,
    value: Callable[[Mapping[str, Any]], float],
    window: int = 1,
    solved: bool = False,
) -> tuple[Curve, ...]:
    """One curve per method with finite values; running means are taken per seed."""
    curves = []
    for method, style in methods.items():
        selected = where(records, method=method)
        xs, seeds = sorted({r[x_name] for r in selected}), sorted({r["seed"] for r in selected})
        column, row = {x: i for i, x in enumerate(xs)}, {seed: i for i, seed in enumerate(seeds)}
        sums, counts, unsolved = np.zeros((3, len(seeds), len(xs)))
        for r in selected:
            cell = row[r["seed"]], column[r[x_name]]
            # Values of a learner that diverged cannot be drawn: the curve has a gap there.
            number = value(r)
            sums[cell] += number if math.isfinite(number) else math.nan
            counts[cell] += 1
            unsolved[cell] += solved and r["needed"] is None
        table = np.divide(sums, counts, out=np.full_like(sums, math.nan), where=counts > 0)
        width = min(window, len(xs))
        if width == 0:
            continue
        table, unsolved, counts = (_running_sum(values, width) for values in (table, unsolved, counts))
        drawn = ~np.isnan(table).all(0)
        if not drawn.any():
            continue
        mean, error = over_seeds(table[:, drawn] / width, ~np.isnan(table[:, drawn]))
        censored = unsolved.sum(0)[drawn] / counts.sum(0)[drawn]
        fraction = float(np.mean([r["needed"] is not None for r in selected])) if solved else None
        curves.append(Curve(method, style, np.array(xs[width - 1 :])[drawn], mean, error, censored, fraction))
    return tuple(curves)


def _protocol_suffix(records: Records) -> str:
    """The addition to a label; empty for Algorithm 1."""
    return ", regret protocol" if where(records, protocol="regret") else ""


def _running_sum(table: np.ndarray, width: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(table, width, axis=1).sum(-1)


def _needs_log(curves: Iterable[Curve]) -> bool:
    """Whether all values are positive and the largest is more than 8 times the smallest."""
    values = [float(v) for curve in curves for v in curve.mean]
    return bool(values) and min(values) > 0 and max(values) > 8 * min(values)
