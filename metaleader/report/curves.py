"""Curves of a run: what the figures show, as numbers, with the standard error over seeds.

A figure is a row of panels, and a panel is a few curves with labels. `report.figures` draws panels for print,
`report.svg` for the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

# Records, as `read_records` gives them.
Records = Sequence[Mapping[str, Any]]

# Okabe and Ito's colour-blind-safe palette, with a marker and dashes each for print without colour.
STYLES: dict[str, tuple[str, str, str, tuple[float, ...]]] = {
    "ftml": ("FTML", "#0072B2", "o", ()),
    "ftml-last": ("FTML, last layer", "#56B4E9", "s", (5, 1.5)),
    "ftl": ("FTL", "#E69F00", "^", (7, 1.5, 1.5, 1.5)),
    "toe": ("TOE", "#009E73", "D", (1.5, 1.5)),
    "scratch": ("from scratch", "#CC79A7", "v", (3, 2)),
    "ftml-first": ("FTML, first order", "#003E63", "h", (9, 2)),
    "ftl-matched": ("FTL, matched compute", "#8C5A00", "<", (7, 1, 1, 1)),
    "toe-matched": ("TOE, matched compute", "#00543D", "d", (1, 1)),
    "scratch-long": ("from scratch, long", "#7A3E62", ">", (3, 1)),
    "ftml-rates": ("FTML, learned step sizes", "#A50026", "8", (10, 1.5)),
    "ftml-every": ("FTML, loss after every step", "#A6761D", "H", (2, 3)),
    "ftml-anneal": ("FTML, annealed outer step", "#7B3294", "x", (5, 3, 1, 3)),
    "ftml-plus": ("FTML plus", "#E7298A", "*", (4, 1)),
    "ftml-bounded": ("FTML, 16 tasks kept", "#1B7837", "p", (6, 1.5, 1, 1.5)),
}
_OTHERS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("#D55E00", "P", (9, 2)),
    ("#666666", "X", (1, 2.5)),
    ("#8C6D00", "p", (6, 2, 2, 2)),
)

# From so many tasks on, the curves over tasks are running means: single tasks differ too much to be read.
_SMOOTH_FROM, _WINDOW = 15, 5


@dataclass(frozen=True)
class Curve:
    """A method's curve.

    Attributes:
        method: whose it is.
        x: the task or the datapoints, (N,).
        mean: over seeds, (N,).
        error: the standard error over seeds, (N,); NaN where only one seed has a value.
        censored: the fraction of the tasks behind each value that never met the threshold, (N,).
        solved: the fraction of all tasks that met the threshold; None where there is none.
    """

    method: str
    x: np.ndarray
    mean: np.ndarray
    error: np.ndarray
    censored: np.ndarray
    solved: float | None = None


@dataclass(frozen=True)
class Panel:
    """Curves on common axes.

    Attributes:
        curves: one for each method with records; may be none.
        x_label: of the horizontal axis.
        y_label: of the vertical axis.
        x_log: whether the horizontal axis is logarithmic.
        y_log: whether the vertical axis is logarithmic.
        limit: where tasks that never met the threshold are counted: at all their data.
        zero: whether the vertical axis begins at zero.
    """

    curves: tuple[Curve, ...]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    limit: int | None = None
    zero: bool = False


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, with its standard error (NaN for one seed) and the number of seeds (none: the mean is NaN)."""

    mean: float
    error: float
    seeds: int


def style(method: str) -> tuple[str, str, str, tuple[float, ...]]:
    """The label, colour, marker and dashes of a method; a method of the user's own gets some of the spare ones."""
    if method in STYLES:
        return STYLES[method]
    return method, *_OTHERS[sum(method.encode()) % len(_OTHERS)]


def record_error(record: Mapping[str, Any]) -> float:
    """The error of a record: 1 - accuracy, or the loss for regression."""
    return record["loss"] if record["accuracy"] is None else 1 - record["accuracy"]


def methods_of(records: Records) -> list[str]:
    """The methods that have records, those of the paper first."""
    found = {r["method"]: None for r in records}
    return [name for name in STYLES if name in found] + [name for name in found if name not in STYLES]


def third(records: Records, which: Literal["first", "last"]) -> list[Mapping[str, Any]]:
    """The records of the first or last third of the rounds (rounded up) that any method has played."""
    num = 1 + max((r["round"] for r in records), default=-1)
    size = -(-num // 3)
    return [r for r in records if (r["round"] < size if which == "first" else r["round"] >= num - size)]


def estimate(records: Records, value: Callable[[Mapping[str, Any]], float | None]) -> Estimate:
    """The mean over each seed's records, then over seeds; records without a value are left out."""
    by_seed: dict[int, list[float]] = {}
    for record in records:
        if (number := value(record)) is not None:
            by_seed.setdefault(record["seed"], []).append(number)
    if not by_seed:
        return Estimate(math.nan, math.nan, 0)
    means = np.array([np.mean(values) for values in by_seed.values()])
    # A learner that diverged shows: its mean is not finite, and the error is NaN.
    usable = len(means) > 1 and np.isfinite(means).all()
    error = means.std(ddof=1) / math.sqrt(len(means)) if usable else math.nan
    return Estimate(float(means.mean()), float(error), len(means))


def finished(records: Records) -> list[Mapping[str, Any]]:
    """The records with all of a task's data: they know whether the task was solved."""
    largest = max((r["datapoints"] for r in records), default=0)
    return [r for r in records if r["datapoints"] == largest]


def of_one_protocol(records: Records) -> Records:
    """The records of Algorithm 1, where there are any; else all, which are of the regret protocol then."""
    return [r for r in records if r["protocol"] == "online"] or records


def stream_panels(records: Records, sizes: Iterable[int], gamma: float | None, error_name: str) -> list[Panel]:
    """The panels of the paper: datapoints to proficiency and errors, or accuracies where there is no threshold.

    Args:
        records: of one run.
        sizes: the sizes of D_t to look at.
        gamma: the threshold of proficiency.
        error_name: what the error is called.
    """
    records = of_one_protocol(records)
    num = 1 + max((r["round"] for r in records), default=-1)
    window = _WINDOW if num >= _SMOOTH_FROM else 1
    x_label = "task" if window == 1 else f"task (running mean of {window} tasks)"
    panels = []
    if gamma is not None:
        done = finished(records)
        limit = max((r["datapoints"] for r in done), default=0)
        curves = _curves(done, "round", lambda r: limit if r["needed"] is None else r["needed"], window, solved=True)
        reached = (
            f"accuracy {gamma:g}" if any(r["accuracy"] is not None for r in records) else f"{error_name} {gamma:g}"
        )
        label = f"datapoints to {reached}{_protocol(records)}"
        panels.append(Panel(curves, x_label, label, limit=limit, zero=True))
    by_accuracy = gamma is None and any(r["accuracy"] is not None for r in records)
    for size in sizes:
        after = f"after {size:,} datapoints{_protocol(records)}"
        own = [r for r in records if r["datapoints"] == size]
        if by_accuracy:
            curves = _curves(own, "round", lambda r: r["accuracy"], window)
            panels.append(Panel(curves, x_label, f"accuracy {after}"))
        else:
            curves = _curves(own, "round", record_error, window)
            panels.append(Panel(curves, x_label, f"{error_name} {after}", y_log=_wide(curves)))
    return panels


def learning_panel(records: Records, error_name: str) -> Panel:
    """Learning within a task: the error against the datapoints, over the last third of the tasks."""
    records = of_one_protocol(records)
    curves = _curves(third(records, "last"), "datapoints", record_error)
    sizes = [r["datapoints"] for r in records]
    x_log = bool(sizes) and max(sizes) >= 12 * min(sizes)
    label = f"{error_name} within a task, last third{_protocol(records)}"
    return Panel(curves, "datapoints of the task", label, x_log, _wide(curves))


def cumulative_panels(records: Records) -> list[Panel]:
    """The loss summed over rounds, a panel a protocol: of a round, the mean over its reveals that were measured."""
    panels = []
    for protocol in dict.fromkeys(r["protocol"] for r in records):
        rounds: dict[tuple[str, int, int], list[float]] = {}
        for r in records:
            if r["protocol"] == protocol:
                rounds.setdefault((r["method"], r["seed"], r["round"]), []).append(r["loss"])
        totals: dict[tuple[str, int], float] = {}
        sums = []
        for (method, seed, t), losses in sorted(rounds.items(), key=lambda item: item[0][2]):
            totals[method, seed] = totals.get((method, seed), 0.0) + float(np.mean(losses))
            sums.append({"method": method, "seed": seed, "round": t, "value": totals[method, seed]})
        # The records know no comparator: what Eq. 3 subtracts is not in them.
        name = "cumulative loss" if protocol == "online" else f"cumulative loss, {protocol} protocol"
        panels.append(Panel(_curves(sums, "round", lambda r: r["value"]), "task", name, zero=True))
    return panels


def band(curve: Curve, y_log: bool) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper edge of the shading: the standard error to either side of the mean, (N,) each.

    On a logarithmic axis it is the standard error of the logarithm, error / mean: the edges are the mean divided and
    multiplied by exp(error / mean). For small errors that is the same; for large ones mean - error comes close to zero,
    where such an axis has no place. The factor is at most e: no standard error of positive numbers exceeds their mean.
    """
    error = np.nan_to_num(curve.error)
    if not y_log:
        return curve.mean - error, curve.mean + error
    factor = np.exp(error / curve.mean)
    return curve.mean / factor, curve.mean * factor


def marked(curve: Curve, order: int, x_log: bool) -> np.ndarray:
    """Which points of a curve get a marker: all of a few, else some, at other places for a curve of another order."""
    along = np.log(curve.x) if x_log else curve.x.astype(float)
    places = np.linspace(along[0], along[-1], 9) + (along[-1] - along[0]) / 8 * (order % 4) / 4
    marks = np.zeros(len(along), dtype=bool)
    marks[np.abs(along[:, None] - places).argmin(0) if len(along) > 12 else slice(None)] = True
    return marks


def _curves(
    records: Records,
    x_name: str,
    value: Callable[[Mapping[str, Any]], float],
    window: int = 1,
    solved: bool = False,
) -> tuple[Curve, ...]:
    """A curve for each method; running means are taken of each seed on its own."""
    curves = []
    for method in methods_of(records):
        own = [r for r in records if r["method"] == method]
        xs, seeds = sorted({r[x_name] for r in own}), sorted({r["seed"] for r in own})
        column, row = {x: i for i, x in enumerate(xs)}, {seed: i for i, seed in enumerate(seeds)}
        sums, counts, unsolved = np.zeros((3, len(seeds), len(xs)))
        for r in own:
            place = row[r["seed"]], column[r[x_name]]
            # A learner that diverged has values that cannot be drawn: they leave a gap.
            number = value(r)
            sums[place] += number if math.isfinite(number) else math.nan
            counts[place] += 1
            unsolved[place] += solved and r["needed"] is None
        table = np.divide(sums, counts, out=np.full_like(sums, math.nan), where=counts > 0)
        width = min(window, len(xs))
        table, unsolved, counts = (_running_sum(part, width) for part in (table, unsolved, counts))
        there = ~np.isnan(table).all(0)
        if not there.any():
            continue
        mean, error = _over_seeds(table[:, there] / width)
        censored = unsolved.sum(0)[there] / counts.sum(0)[there]
        fraction = float(np.mean([r["needed"] is not None for r in own])) if solved else None
        curves.append(Curve(method, np.array(xs[width - 1 :])[there], mean, error, censored, fraction))
    return tuple(curves)


def _protocol(records: Records) -> str:
    """What to add to a label: nothing for Algorithm 1."""
    return ", regret protocol" if any(r["protocol"] == "regret" for r in records) else ""


def _running_sum(table: np.ndarray, width: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(table, width, axis=1).sum(-1)


def _over_seeds(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error of each column, over the seeds that have a value there."""
    num = (~np.isnan(table)).sum(0)
    mean = np.nansum(table, 0) / num
    squares = np.nansum((table - mean) ** 2, 0)
    return mean, np.sqrt(np.divide(squares, (num - 1) * num, out=np.full_like(mean, math.nan), where=num > 1))


def _wide(curves: Iterable[Curve]) -> bool:
    """Whether the values span so much that they need a logarithmic axis, and allow one."""
    values = [float(v) for curve in curves for v in curve.mean]
    return bool(values) and min(values) > 0 and max(values) > 8 * min(values)
