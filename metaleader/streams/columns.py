"""The columns of a data frame as checked arrays, with messages that name column, row and group."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


class Table:
    """The rows of a data frame that belong to the groups in use: group after group, each sorted by time.

    Rows of the table are numbered from 0; `where` names the row of the frame.

    Args:
        frame: a data frame of pandas or polars, or a table of pyarrow.
        group: the column of groups.
        time: the column to sort by, or None.
        groups: the groups to use, in this order; all, by their first row, if None.

    Attributes:
        names: the columns of the frame.
        group: the column of groups.
        rows_of: the rows of each group.
        positions: the position of each group of the frame in the order of first rows in the frame.
    """

    def __init__(self, frame: Any, group: str, time: str | None, groups: Sequence[Any] | None) -> None:
        self._frame = _as_narwhals(frame)
        self.names, self.group = list(self._frame.columns), group
        self.check_names([group, *([] if time is None else [time])])
        self._rows, self._groups = np.arange(len(self._frame)), []
        chosen = None if groups is None else set(groups)
        values = self._frame[group].to_list()
        if chosen is None:
            values = self.values(group, "every row needs a group")
        self._groups = values
        self._rows = np.asarray([row for row, name in enumerate(values) if chosen is None or name in chosen], dtype=int)
        if len(self._rows) == 0:
            raise ValueError(
                f"the frame has no rows{'' if chosen is None else f' of the groups {_listed(list(chosen))}'}"
            )
        if time is not None:
            self._rows = self._rows[self._sorted_by(time)]
        rows_of: dict[Any, list[int]] = {}
        for row in self._rows.tolist():
            rows_of.setdefault(values[row], []).append(row)
        self.positions = {name: i for i, name in enumerate(dict.fromkeys(values))}
        if len({str(name) for name in rows_of}) < len(rows_of):
            raise ValueError(f"column {group!r} holds different groups of the same text; convert it to text")
        if groups is not None:
            rows_of = self._in_order(rows_of, groups)
        self._rows = np.concatenate([np.asarray(rows) for rows in rows_of.values()])
        parts = np.split(np.arange(len(self._rows)), np.cumsum([len(rows) for rows in rows_of.values()])[:-1])
        self.rows_of = dict(zip(rows_of, parts, strict=True))

    def check_names(self, names: Iterable[str]) -> list[str]:
        """The names; raises ValueError for one that is not a column, or is given twice."""
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            if name not in self.names:
                close = difflib.get_close_matches(str(name), [str(name) for name in self.names], n=1)
                hint = f"; did you mean {close[0]!r}?" if close else "."
                raise ValueError(f"the frame has no column {name!r}{hint} Its columns are {_listed(self.names)}")
            if names.count(name) > 1:
                raise ValueError(f"column {name!r} is given twice")
        return names

    def where(self, row: int) -> str:
        """A row of the table, for messages: its number in the frame and its group."""
        number = int(self._rows[row])
        return f"row {number} (group {self._groups[number]!r})" if self._groups else f"row {number}"

    def dtype(self, name: str) -> Any:
        """The dtype of a column, one of narwhals."""
        return self._frame[name].dtype

    def numbers(self, name: str) -> np.ndarray:
        """The finite values of a column of numbers or booleans, in float64."""
        column = self._frame[name]
        missing = column.is_null().to_numpy()[self._rows]
        values = np.asarray(column.cast(_narwhals().Float64).to_numpy(), dtype=np.float64)[self._rows]
        wrong = np.flatnonzero(missing | ~np.isfinite(values))
        if len(wrong):
            row = int(wrong[0])
            more = f" and {len(wrong) - 1} more rows" if len(wrong) > 1 else ""
            held = "no value" if missing[row] else f"the value {values[row]}"
            raise ValueError(f"column {name!r} has {held} in {self.where(row)}{more}; drop these rows, or fill them")
        return values

    def values(self, name: str, advice: str = "drop these rows, or fill them") -> list[Any]:
        """The values of a column of any dtype; raises ValueError if one is missing."""
        column = self._frame[name]
        missing = column.is_null().to_numpy()
        if column.dtype.is_float():
            missing = missing | np.isnan(column.cast(_narwhals().Float64).to_numpy())
        for row in np.flatnonzero(missing[self._rows])[:1].tolist():
            raise ValueError(f"column {name!r} has no value in {self.where(row)}; {advice}")
        values = column.to_list()
        return [values[row] for row in self._rows.tolist()]

    def constant_columns(self, exclude: Sequence[str]) -> dict[str, list[Any]]:
        """The columns of numbers, booleans or text that are constant within every group, with a value per group."""
        nw, constant = _narwhals(), {}
        starts = np.asarray([rows[0] for rows in self.rows_of.values()])
        first = np.repeat(starts, [len(rows) for rows in self.rows_of.values()])
        for name in self.names:
            column = self._frame[name]
            plain = column.dtype.is_numeric() or column.dtype in (nw.Boolean, nw.String, nw.Categorical, nw.Enum)
            if name in (self.group, *exclude) or not plain or bool(column.is_null().any()):
                continue
            values = column.to_numpy()[self._rows]
            if bool((values == values[first]).all()):
                chosen = values[starts].tolist()
                constant[name] = [float(value) for value in chosen] if column.dtype.is_numeric() else chosen
        return constant

    def _sorted_by(self, time: str) -> list[int]:
        values = self.values(time)
        try:
            return sorted(range(len(values)), key=values.__getitem__)
        except TypeError as error:
            raise ValueError(f"column {time!r} cannot be sorted: {error}; convert it to one dtype") from error

    def _in_order(self, rows_of: dict[Any, list[int]], groups: Sequence[Any]) -> dict[Any, list[int]]:
        unknown = [name for name in groups if name not in rows_of]
        if unknown or len(set(groups)) < len(groups):
            problem = f"{unknown[0]!r} is not in column {self.group!r}" if unknown else "a group is given twice"
            raise ValueError(f"order must be an order, or a list of groups of the frame: {problem}")
        return {name: rows_of[name] for name in groups}


def checked_numbers(table: Table, names: Sequence[str], role: str) -> np.ndarray:
    """Columns of finite numbers or booleans as (rows, columns), float64.

    Args:
        table: the rows.
        names: the columns.
        role: "features" or "targets", for messages.
    """
    nw = _narwhals()
    dtypes = {name: table.dtype(name) for name in names}
    wrong = {name: dtype for name, dtype in dtypes.items() if not (dtype.is_numeric() or dtype == nw.Boolean)}
    if wrong:
        objects = {name: f" of {_one_type(table, name)}" for name, dtype in wrong.items() if dtype == nw.Object}
        kinds = ", ".join(f"{name!r} has dtype {dtype}{objects.get(name, '')}" for name, dtype in wrong.items())
        advice = "; or name the numeric ones with features=[...]" if role == "features" else ""
        raise ValueError(
            f"{role} must be numbers or booleans: {kinds}; encode text (pandas.get_dummies, or to_dummies of polars)"
            f" and convert times to numbers{advice}"
        )
    return np.stack([table.numbers(name) for name in names], 1)


def checked_labels(
    table: Table, targets: Sequence[str], labels: Sequence[Any] | None
) -> tuple[np.ndarray, tuple[Any, ...] | None]:
    """The targets, and the labels behind them.

    Returns:
        Numbers (rows, targets), float64, and None; or positions in the labels (rows,), int64, and the labels.
    """
    nw = _narwhals()
    textual = [table.dtype(name) in (nw.String, nw.Categorical, nw.Enum, nw.Boolean) for name in targets]
    if labels is None and not any(textual):
        return checked_numbers(table, targets, "targets"), None
    if len(targets) > 1:
        raise ValueError(f"a target with labels must be one column, got {_listed(targets)}")
    (name,) = targets
    values = table.values(name)
    if table.dtype(name) == nw.Object:
        _one_type(table, name)
    order = sorted(set(values)) if labels is None else list(labels)
    positions = {label: i for i, label in enumerate(order)}
    if len(positions) < len(order) or len(order) < 2:
        raise ValueError(f"column {name!r} needs two or more different labels, got {_listed(order)}")
    for row, value in enumerate(values):
        if value not in positions:
            raise ValueError(f"column {name!r} holds {value!r} in {table.where(row)}; the labels are {_listed(order)}")
    return np.asarray([positions[value] for value in values], dtype=np.int64), tuple(order)


def _one_type(table: Table, name: str) -> str:
    """The type of a column of Python objects; raises ValueError for several, with the first row of another type."""
    values = table.values(name)
    first = type(values[0])
    for row, value in enumerate(values):
        if type(value) is not first:
            raise ValueError(
                f"column {name!r} mixes {first.__name__} and {type(value).__name__}: {table.where(row)} holds"
                f" {value!r}, {table.where(0)} holds {values[0]!r}; convert it to one dtype"
            )
    return first.__name__


def _as_narwhals(frame: Any) -> Any:
    nw = _narwhals()
    try:
        return nw.from_native(frame, eager_only=True)
    except nw.exceptions.DuplicateError as error:
        raise ValueError(f"the frame has columns of the same name: {error}") from error
    except TypeError as error:
        lazy = hasattr(frame, "collect")
        advice = "call its method collect() first" if lazy else "for arrays, use metaleader.streams.ArrayStream"
        raise ValueError(
            f"from_frame takes a data frame of pandas or polars, got {type(frame).__name__}; {advice}"
        ) from error


def _narwhals() -> Any:
    try:
        import narwhals.stable.v2 as nw
    except ImportError as error:
        raise ImportError("from_frame needs narwhals; install it with: pip install 'metaleader[frames]'") from error
    return nw


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(repr(value) for value in values[:10]) + (
        f" and {len(values) - 10} more" if len(values) > 10 else ""
    )
