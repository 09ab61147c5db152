"""A stream over a data frame: one task per group of rows, such as a customer, a sensor or a site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from metaleader.streams.base import BaseStream
from metaleader.streams.columns import Table, checked_labels, checked_numbers
from metaleader.streams.order import arrange
from metaleader.tasks import Batch, Task, rng

# Mean and standard deviation by column
Statistics = Mapping[str, tuple[float, float]]


class FrameStream(BaseStream):
    """The stream that `from_frame` returns.

    Attributes:
        groups: the group of each task.
        features: the columns of x.
        targets: the columns of y; one if the target has labels.
        labels: the label behind each number of y, in order; None for regression.
        statistics: mean and standard deviation of each standardised column.
        attributes: the columns that are constant within every group, with one value per task.
    """

    def __init__(
        self,
        columns: tuple[np.ndarray, np.ndarray],
        splits: Mapping[Any, tuple[np.ndarray, np.ndarray]],
        names: tuple[tuple[str, ...], tuple[str, ...]],
        labels: tuple[Any, ...] | None,
        statistics: Statistics,
        attributes: Mapping[str, Sequence[Any]],
    ) -> None:
        self.groups = tuple(splits)
        self.features, self.targets = names
        self.labels, self.statistics = labels, dict(statistics)
        self._x, self._y = map(torch.from_numpy, columns)
        self._splits = [tuple(map(torch.from_numpy, split)) for split in splits.values()]
        self._attributes = attributes

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def attributes(self) -> Mapping[str, Sequence[Any]]:
        """The columns that are constant within every group."""
        return self._attributes

    def task(self, t: int) -> Task:
        """The task of round t."""
        train, test = (Batch(self._x[rows], self._y[rows]) for rows in self._splits[t])
        return Task(str(self.groups[t]), train, test)


def from_frame(
    frame: Any,
    group: str,
    target: str | Sequence[str],
    *,
    features: Sequence[str] | None = None,
    labels: Sequence[Any] | None = None,
    time: str | None = None,
    held_out: float | str = 0.2,
    order: str | Sequence[Any] = "given",
    standardise: int | Statistics = 0,
    seed: int = 0,
) -> FrameStream:
    """Return a stream with one task per group of rows of a data frame.

    x is float32 (N, features), with 0 and 1 for booleans. y is float32 (N, targets), or int64 (N,) for labels.

    Args:
        frame: a data frame of pandas or polars, or a table of pyarrow; it is copied. Needs the extra `frames`.
        group: the column whose values are the tasks.
        target: the column to predict, or several columns of numbers.
        features: the columns of x, numbers or booleans; all columns but those named by other arguments if None.
        labels: the labels of a classification in the order of the network's outputs. If None, a target of text or
            booleans has its sorted values as labels, and a target of numbers is a regression.
        time: the column to sort the rows by; the held-out rows are then the last ones of each group.
        held_out: the fraction of rows of each group to hold out, at least one row; or a column of booleans that is true
            for held-out rows. Without `time`, the seed and the group determine the rows of a fraction.
        order: "given", by the first row of each group; "random"; the name of a column that is constant within every
            group, or another order of `reorder`; or a list of the groups to use.
        standardise: subtract the mean of each feature and numeric target, and divide by its standard deviation: those
            of the training rows of this number of first tasks; or those of another stream, its `statistics`. A loss is
            then one of standardised targets. 0 leaves all columns as they are.
        seed: of the order and of the held-out rows.

    Raises:
        ValueError: for invalid columns or values; the message names the column, the row (from 0) and the group.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"site": list("aaabbb"), "heat": range(6), "y": [1.0, 2, 3, 5, 7, 9]})
    >>> stream = from_frame(frame, group="site", target="y")
    >>> stream[1].name, stream[1].train.x.shape, stream[1].test.y.shape
    ('b', torch.Size([2, 1]), torch.Size([1, 1]))
    """
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    targets = (target,) if isinstance(target, str) else tuple(target)
    table = Table(frame, group, time, None if isinstance(order, str) else order)
    split_column = held_out if isinstance(held_out, str) else None
    if not isinstance(held_out, str) and not 0 < held_out < 1:
        raise ValueError(f"held_out must lie between 0 and 1, or name a column of booleans; got {held_out}")
    named = {group, *targets, *filter(None, (time, split_column))}
    chosen = tuple(table.names if features is None else table.check_names(features))
    chosen = tuple(name for name in chosen if features is not None or name not in named)
    table.check_names([*targets, *filter(None, [split_column])])
    if split_column is not None and str(table.dtype(split_column)) != "Boolean":
        raise ValueError(f"column {split_column!r} has dtype {table.dtype(split_column)}; held_out takes booleans")
    misused = [name for name in chosen if name in named - {time}]
    if misused or not chosen or not targets:
        problem = f"{misused[0]!r} is the group, target or held-out column" if misused else "there are none"
        raise ValueError(f"features and targets must be different columns: {problem}")
    x = checked_numbers(table, chosen, "features")
    y, known = checked_labels(table, targets, labels)
    splits = _splits(table, held_out, time is not None, seed)
    attributes = table.constant_columns(exclude=targets)
    if isinstance(order, str) and order != "given":
        if order == "random":
            permutation = rng("frame order", seed).permutation(len(splits)).tolist()
        else:
            permutation = arrange(order, attributes, seed, others=("given", "random"))
        names = list(splits)
        splits = {names[i]: splits[names[i]] for i in permutation}
        attributes = {name: [values[i] for i in permutation] for name, values in attributes.items()}
    standardised = (*chosen, *(targets if known is None else ()))
    statistics = _statistics(standardised, standardise, x, y, [train for train, _ in splits.values()])
    for name, (mean, deviation) in statistics.items():
        part, i = (x, chosen.index(name)) if name in chosen else (y, targets.index(name))
        part[:, i] = (part[:, i] - mean) / deviation
    columns = _single(table, x, chosen), y if known is not None else _single(table, y, targets)
    return FrameStream(columns, splits, (chosen, targets), known, statistics, attributes)


def _splits(table: Table, held_out: float | str, last: bool, seed: int) -> dict[Any, tuple[np.ndarray, np.ndarray]]:
    """The rows for training and the held-out rows of each group, in the order of the table."""
    tests = np.asarray(table.values(held_out), dtype=bool) if isinstance(held_out, str) else None
    splits: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
    for name, rows in table.rows_of.items():
        if len(rows) < 2:
            raise ValueError(
                f"group {name!r} of column {table.group!r} has 1 row: {table.where(rows[0])}; a task needs one to"
                " train on and one to hold out: drop such groups, or list the groups to use with order=[...]"
            )
        if tests is None:
            size = min(max(1, round(float(held_out) * len(rows))), len(rows) - 1)
            is_test = np.zeros(len(rows), dtype=bool)
            is_test[-size:] = True
            if not last:
                is_test = is_test[rng("frame held out", seed, table.positions[name]).permutation(len(rows))]
        else:
            is_test = tests[rows]
            if is_test.all() or not is_test.any():
                kind = "true" if is_test.all() else "false"
                raise ValueError(
                    f"column {held_out!r} is {kind} in all {len(rows)} rows of group {name!r}; a task needs a row to"
                    " train on and one to hold out"
                )
        splits[name] = rows[~is_test], rows[is_test]
    return splits


def _statistics(
    names: Sequence[str], standardise: int | Statistics, x: np.ndarray, y: np.ndarray, trains: Sequence[np.ndarray]
) -> dict[str, tuple[float, float]]:
    if isinstance(standardise, Mapping):
        unknown = sorted(set(standardise) - set(names))
        if unknown:
            raise ValueError(f"standardise has {unknown[0]!r}, which is no column of numbers of this stream")
        wrong = [name for name, (mean, sd) in standardise.items() if not (np.isfinite([mean, sd]).all() and sd > 0)]
        if wrong:
            raise ValueError(
                f"standardise: {wrong[0]!r} has {standardise[wrong[0]]}; give a mean and a positive number"
            )
        return {name: (float(mean), float(sd)) for name, (mean, sd) in standardise.items()}
    if isinstance(standardise, bool) or not 0 <= standardise <= len(trains):
        raise ValueError(
            f"standardise must be a number of first tasks in 0..{len(trains)}, or the statistics of another stream; got"
            f" {standardise}"
        )
    if standardise == 0:
        return {}
    rows = np.concatenate(trains[:standardise])
    values = np.concatenate([x, y], 1)[rows] if len(names) > x.shape[1] else x[rows]
    # A constant column is only centred.
    deviations = [sd if sd > 0 else 1.0 for sd in values.std(0).tolist()]
    return dict(zip(names, zip(values.mean(0).tolist(), deviations, strict=True), strict=True))


def _single(table: Table, values: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The values in float32; raises ValueError for values that are too large."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    for row, i in _first(~np.isfinite(single)):
        raise ValueError(f"column {names[i]!r} holds {values[row, i]:g} in {table.where(row)}, too large for float32")
    return single


def _first(wrong: np.ndarray) -> Iterator[tuple[int, int]]:
    """The first position of a true value, if there is one."""
    if wrong.any():
        row, column = np.argwhere(wrong)[0].tolist()
        yield row, column
