"""Charts of the report: panels as inline SVG, with values for the pointer and the arrow keys, and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from metaleader.methods import Style
from metaleader.report.curves import Curve, Panel, band, marked
from metaleader.report.text import with_error

_WIDTH, _HEIGHT = 400, 262
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 10, 40

_MARKERS = {
    "o": "M{r} 0A{r} {r} 0 1 1 -{r} 0A{r} {r} 0 1 1 {r} 0Z",
    "s": "M-{r} -{r}H{r}V{r}H-{r}Z",
    "^": "M0 -{r}L{r} {r}H-{r}Z",
    "v": "M0 {r}L{r} -{r}H-{r}Z",
    "D": "M0 -{d}L{d} 0L0 {d}L-{d} 0Z",
    "P": "M-{r} 0H{r}M0 -{r}V{r}Z",
    "X": "M-{r} -{r}L{r} {r}M-{r} {r}L{r} -{r}Z",
    "p": "M0 -{d}L{r} 0L0 {d}L-{r} 0Z",
    "<": "M-{r} 0L{r} -{r}V{r}Z",
    ">": "M{r} 0L-{r} -{r}V{r}Z",
    "d": "M0 -{d}L{q} 0L0 {d}L-{q} 0Z",
    "h": "M0 -{d}L{r} -{q}V{q}L0 {d}L-{r} {q}V-{q}Z",
    "H": "M-{d} 0L-{q} -{r}H{q}L{d} 0L{q} {r}H-{q}Z",
    "8": "M-{r} -{q}L-{q} -{r}H{q}L{r} -{q}V{q}L{q} {r}H-{q}L-{r} {q}Z",
    "x": "M-{q} -{q}L{q} {q}M-{q} {q}L{q} -{q}Z",
    "+": "M-{q} 0H{q}M0 -{q}V{q}Z",
    "1": "M0 0V{d}M0 0L{r} -{r}M0 0L-{r} -{r}Z",
    "2": "M0 0V-{d}M0 0L{r} {r}M0 0L-{r} {r}Z",
    "*": "M0 -{d}L{t} -{t}L{d} 0L{t} {t}L0 {d}L-{t} {t}L-{d} 0L-{t} -{t}Z",
}


@dataclass(frozen=True)
class Axes:
    """The ranges of a chart, (low, high) each, and which axes are logarithmic."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_log: bool
    y_log: bool


def common_axes(panels: Sequence[Panel]) -> Axes | None:
    """Axes that contain all panels, so that charts of different runs can be compared; None without any curve."""
    curves = [curve for panel in panels for curve in panel.curves]
    if not curves:
        return None
    xs, means = (np.concatenate([getattr(curve, name) for curve in curves]) for name in ("x", "mean"))
    y_log = any(panel.y_log for panel in panels) and bool((means > 0).all())
    low, high = np.concatenate([band(curve, y_log) for curve in curves], axis=1)
    low, high = low.min(), high.max()
    if y_log:
        low, high = low / 1.1, high * 1.1
    else:
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = low - margin, high + margin
    if any(panel.zero for panel in panels):
        low = 0.0
    if limits := [panel.limit for panel in panels if panel.limit]:
        high = 1.06 * max(limits)
    first, last = float(xs.min()), float(xs.max())
    if first == last:
        first, last = first - 0.5, last + 0.5
    return Axes((first, last), (float(low), float(high)), any(panel.x_log for panel in panels), y_log)


def legend(styles: Iterable[Style]) -> str:
    """The labels of methods, with their lines and markers."""
    items = []
    for style in styles:
        line = f'<path class="line" d="M1 7H35"{_dashes(style)}/>{_marker(style, 18, 7, hollow=False)}'
        swatch = f'<svg class="swatch" viewBox="0 0 36 14" aria-hidden="true">{line}</svg>'
        items.append(f'<li class="series" style="{colours(style)}">{swatch}<span>{escape(style.label)}</span></li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def colours(style: Style) -> str:
    """CSS with the colour of a method on a light and on a dark page."""
    light = "".join(f"{round(0.62 * int(style.colour[i : i + 2], 16) + 0.38 * 255):02x}" for i in (1, 3, 5))
    return f"--light:{style.colour};--dark:#{light}"


def chart(panel: Panel, axes: Axes | None) -> str:
    """A panel as a figure: SVG, values for the pointer and the arrow keys, and the same values as a table."""
    title = f"<h4>{escape(panel.y_label)}</h4>"
    if not panel.curves or axes is None:
        return f'<figure class="chart">{title}<p class="none">No records.</p></figure>'
    to_x = _scale(axes.x, axes.x_log, _LEFT, _WIDTH - _RIGHT)
    to_y = _scale(axes.y, axes.y_log, _HEIGHT - _BOTTOM, _TOP)
    elements = [_grid(axes, to_x, to_y, panel.x_label)]
    if panel.limit is not None:
        y = _f(to_y(panel.limit))
        elements.append(f'<path class="limit" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
    elements += [_band(curve, axes.y_log, to_x, to_y) for curve in panel.curves]
    # The first method on top.
    for order, curve in reversed(list(enumerate(panel.curves))):
        elements.append(_line(curve, to_x, to_y, marked(curve, order, axes.x_log)))
    names = ", ".join(curve.style.label for curve in panel.curves)
    label = f"{panel.y_label} against {panel.x_label}: {names}. Left and right arrow keys read the values."
    values, table = _values(panel, to_x, to_y)
    return (
        f'<figure class="chart">{title}<div class="plot" data-values="{escape(json.dumps(values))}">'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" tabindex="0" aria-label="{escape(label)}">'
        f'{"".join(elements)}<g class="probe"></g></svg><div class="tip" role="status" hidden></div></div>'
        f"{_note(panel)}<details><summary>Values</summary>{table}</details></figure>"
    )


def _note(panel: Panel) -> str:
    """The fraction of tasks solved, and how unsolved tasks are counted."""
    if panel.limit is None:
        return ""
    solved = ", ".join(f"{curve.style.label} {curve.solved:.0%}" for curve in panel.curves)
    note = f"Solved: {solved}."
    if any(curve.censored.any() for curve in panel.curves):
        note += f" Unsolved tasks count as {panel.limit:,}, all their data (dotted line, hollow markers)."
    return f"<figcaption>{escape(note)}</figcaption>"


def _values(panel: Panel, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> tuple[dict, str]:
    """The values that the script shows at each x, and a table of the same values."""
    xs = sorted({float(x) for curve in panel.curves for x in curve.x})
    series, columns = [], []
    for curve in panel.curves:
        at = {float(x): i for i, x in enumerate(curve.x)}
        texts = [_text(curve, at[x]) if x in at else None for x in xs]
        ys = [round(to_y(curve.mean[at[x]]), 1) if x in at else None for x in xs]
        series.append({"name": curve.style.label, "colour": colours(curve.style), "y": ys, "text": texts})
        columns.append([text or "" for text in texts])
    unit = "datapoints" if panel.x_label.startswith("datapoints") else "task"
    values = {
        "x": [round(to_x(x), 1) for x in xs],
        "label": [f"{unit} {x:.0f}" if unit == "task" else f"{x:.0f} {unit}" for x in xs],
        "series": series,
    }
    rows = [[f"{x:.0f}", *texts] for x, *texts in zip(xs, *columns, strict=True)]
    return values, html_table(panel.y_label, [panel.x_label, *(s["name"] for s in series)], rows)


def html_table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table in a scrollable box; the first cell of a row is its heading. All text is escaped."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = []
    for first, *others in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        body.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _text(curve: Curve, i: int) -> str:
    text = with_error(curve.mean[i], curve.error[i])
    return f"{text}, {curve.censored[i]:.0%} unsolved" if curve.censored[i] > 0 else text


def _line(curve: Curve, to_x: Callable, to_y: Callable, marks: np.ndarray) -> str:
    points = [(to_x(x), to_y(y)) for x, y in zip(curve.x, curve.mean, strict=True)]
    path = "M" + "L".join(f"{_f(x)} {_f(y)}" for x, y in points)
    markers = [
        _marker(curve.style, *point, hollow=censored > 0)
        for point, censored, mark in zip(points, curve.censored, marks, strict=True)
        if mark
    ]
    line = f'<path class="line" d="{path}"{_dashes(curve.style)}/>'
    return f'<g class="series" style="{colours(curve.style)}">{line}{"".join(markers)}</g>'


def _band(curve: Curve, y_log: bool, to_x: Callable, to_y: Callable) -> str:
    if not np.nan_to_num(curve.error).any():
        return ""
    lower, upper = (
        [f"{_f(to_x(x))} {_f(to_y(y))}" for x, y in zip(curve.x, edge, strict=True)] for edge in band(curve, y_log)
    )
    return f'<path class="series band" style="{colours(curve.style)}" d="M{"L".join(upper + lower[::-1])}Z"/>'


def _marker(style: Style, x: float, y: float, hollow: bool) -> str:
    path = _MARKERS[style.marker].format(r=3.2, d=4.4, q=1.9, t=1.2)
    kind = "marker hollow" if hollow else "marker"
    return f'<path class="{kind}" transform="translate({_f(x)} {_f(y)})" d="{path}"/>'


def _dashes(style: Style) -> str:
    return f' stroke-dasharray="{" ".join(f"{1.8 * d:g}" for d in style.dashes)}"' if style.dashes else ""


def _grid(axes: Axes, to_x: Callable, to_y: Callable, x_label: str) -> str:
    bottom, elements = _HEIGHT - _BOTTOM, []
    for tick in _ticks(axes.y, axes.y_log, 5):
        y = _f(to_y(tick))
        elements.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
        elements.append(f'<text x="{_LEFT - 6}" y="{y}" dy=".35em" text-anchor="end">{tick:g}</text>')
    for tick in _ticks(axes.x, axes.x_log, 6, whole=True):
        x = _f(to_x(tick))
        elements.append(f'<path class="grid" d="M{x} {bottom}v4"/>')
        elements.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    elements.append(f'<text x="{middle}" y="{_HEIGHT - 5}" text-anchor="middle">{escape(x_label)}</text>')
    elements.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}"/>')
    return "".join(elements)


def _ticks(span: tuple[float, float], log: bool, num: int, whole: bool = False) -> list[float]:
    """Round numbers within a range: 1, 2 and 5 of each decade, or multiples of 1, 2 or 5 times a power of ten."""
    low, high = span
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        choices = [
            [digit * 10.0**power for power in decades for digit in digits] for digits in ((1, 2, 5), (1, 3), (1,))
        ]
        choices = [[tick for tick in ticks if low <= tick <= high] for ticks in choices]
        return next((ticks for ticks in choices if len(ticks) <= 2 * num), choices[-1])
    power = 10.0 ** math.floor(math.log10((high - low) / num))
    step = next(factor * power for factor in (1, 2, 5, 10) if (high - low) / (factor * power) <= num)
    step = max(step, 1.0) if whole else step
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _scale(span: tuple[float, float], log: bool, start: float, end: float) -> Callable[[float], float]:
    """A function from values to coordinates; values out of range are clipped."""

    def coordinate(value: float) -> float:
        low, high = (math.log(bound) for bound in span) if log else span
        inside = (math.log(value) if value > 0 else low) if log else value
        return start + (end - start) * min(1.0, max(0.0, (inside - low) / (high - low)))

    return coordinate


def _f(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
