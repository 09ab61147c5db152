"""Records of one's own loop over `play`: as rows of a table, as a CSV file, and as a report."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from metaleader.evaluate import Record
from metaleader.report.curves import Given
from metaleader.report.records import methods_of
from metaleader.runs.folder import COLUMNS, csv_lines
from metaleader.system.files import check_target, write_atomic

_DEFAULTS = {"protocol": "online", "accuracy": None, "needed": None}
_NUMBERS = ("seed", "round", "datapoints")


def write_report(
    records: Any,
    path: str | os.PathLike[str],
    *,
    title: str = "metaleader",
    sizes: Sequence[int] = (),
    gamma: float | None = None,
    error_name: str = "",
    styles: Given = None,
) -> Path:
    """Write records of a loop of your own as an HTML page, like the report of `metaleader run`.

    Args:
        records: what `play` yields for one learner; or for several, by name: `{"ftml": records, "toe": records}`. The
            records of several seeds are a list with one sequence per seed: `{"ftml": [records_0, records_1]}`. Rows
            with the columns of `records.csv` are taken too.
        path: the page to write, such as "report.html".
        title: the heading of the page.
        sizes: the sizes of D_t shown, which must have been measured; by default the smallest and the largest.
        gamma: the threshold of proficiency that was passed to `play`.
        error_name: the name of the error in tables and figures; by default "error", or "loss" for regression.
        styles: labels and colours by name, as `{"ftml": {"label": "mine", "colour": "#D55E00"}}`; both are optional.

    Returns:
        The path of the page.

    Raises:
        ValueError: if there are no records, two are of the same measurement, or a size was not measured.
    """
    # Presets import the package, and matplotlib is a slow import.
    from metaleader.report.loaded import Shown
    from metaleader.report.page import READING, html_page, measured_sections

    rows = record_rows(records)
    measured = sorted({row["datapoints"] for row in rows})
    for size in sizes:
        if size not in measured:
            raise ValueError(f"no record has {size} datapoints; there are {', '.join(map(str, measured))}")
    try:
        methods_of(rows, styles)
    except TypeError as error:
        raise ValueError(f"a style has a label, a colour or both, got {styles!r}") from error
    has_accuracy = any(row["accuracy"] is not None for row in rows)
    shown = Shown(
        name=title,
        records=rows,
        given=styles,
        sizes=sorted(sizes) or sorted({measured[0], measured[-1]}),
        gamma=gamma,
        error_name=error_name or ("error" if has_accuracy else "loss"),
        steps=None,
    )
    path = Path(path)
    check_target(path)
    seeds = len({row["seed"] for row in rows})
    introduction = f"<p>{len(rows):,} records, {seeds} seed{'s' if seeds > 1 else ''}. {READING}</p>"
    content = f"<section><h2>{escape(title)}</h2>{''.join(measured_sections([shown]))}</section>"
    write_atomic(path, html_page(title, introduction, content).encode())
    return path


def write_records(records: Any, path: str | os.PathLike[str]) -> Path:
    """Write records of a loop of your own as a CSV file with the columns of `records.csv`.

    Args:
        records: as in `write_report`.
        path: the file to write.
    """
    rows = record_rows(records)
    more = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in COLUMNS]
    path = Path(path)
    check_target(path)
    write_atomic(path, csv_lines([(*COLUMNS, *more), *([row.get(name) for name in (*COLUMNS, *more)] for row in rows)]))
    return path


def record_rows(records: Any) -> list[dict[str, Any]]:
    """The records as rows with the columns of `records.csv`; the argument is that of `write_report`."""
    rows = []
    if isinstance(records, Mapping):
        for name, of_method in records.items():
            rows += _rows(of_method, {"method": str(name), "seed": 0})
    else:
        rows += _rows(records, {"method": "learner", "seed": 0})
    if not rows:
        raise ValueError("there are no records; `play` yields one for each measured reveal")
    seen = set()
    for row in rows:
        key = tuple(row[name] for name in ("method", "seed", "protocol", "round", "datapoints"))
        if key in seen:
            raise ValueError(
                f"two records are of {row['method']}, seed {row['seed']}, round {row['round']} after"
                f" {row['datapoints']} datapoints; pass the records of each learner under a name of its own, and those"
                " of several seeds as one list per seed"
            )
        seen.add(key)
    return rows


def _rows(records: Any, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    if isinstance(records, Record | Mapping) or not isinstance(records, Iterable):
        records = [records]
    rows = []
    for seed, item in enumerate(records):
        if isinstance(item, Record):
            rows.append(_row({**given, **vars(item)}))
        elif isinstance(item, Mapping):
            rows.append(_row({**given, **item}))
        elif isinstance(item, Iterable) and not isinstance(item, str | bytes):
            rows += _rows(item, {**given, "seed": seed})
        else:
            raise ValueError(f"a record is an ml.Record or a row of records.csv, got {item!r}")
    return rows


def _row(values: Mapping[str, Any]) -> dict[str, Any]:
    """One row; the further columns in `more` become columns."""
    row = {**_DEFAULTS, **values}
    row |= row.pop("more", None) or {}
    missing = [name for name in COLUMNS if name not in row]
    if missing:
        raise ValueError(f"a record lacks {', '.join(missing)}: {dict(values)}")
    for name in _NUMBERS:
        if isinstance(row[name], bool) or row[name] != row[name] or int(row[name]) != row[name]:
            raise ValueError(f"{name} of a record must be an integer, got {row[name]!r}")
        row[name] = int(row[name])
    for name in ("accuracy", "needed"):  # data frames write NaN for a missing value
        if isinstance(row[name], float) and math.isnan(row[name]):
            row[name] = None
    return row
