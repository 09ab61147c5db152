"""Selections of a run's records, and means over seeds with their standard errors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from metaleader.methods import Style, styles

# Records as `read_records` returns them.
Records = Sequence[Mapping[str, Any]]


def record_error(record: Mapping[str, Any], suffix: str = "") -> Any:
    """The error of a record: 1 - accuracy, or the loss for regression; None if it was not measured.

    The suffix selects other columns: "_1" for one adaptation step, "_task" for batch-norm statistics of D_t.
    """
    accuracy = record.get(f"accuracy{suffix}")
    return record.get(f"loss{suffix}") if accuracy is None else 1 - accuracy


def step_suffixes(records: Records) -> list[str]:
    """The suffixes of columns with other numbers of adaptation steps, ascending: "_1", "_10"."""
    columns = records[0] if records else ()
    numbers = [int(name[len("loss_") :]) for name in columns if re.fullmatch(r"loss_\d+", name)]
    return [f"_{number}" for number in sorted(numbers)]


def methods_of(records: Records, given: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Style]:
    """The methods that have records, with their styles, those of `METHODS` first; `given` has labels and colours."""
    return styles((r["method"] for r in records), given)


def where(records: Records, **values: Any) -> list[Mapping[str, Any]]:
    """The records that have these values: `where(records, method="toe", datapoints=20)`."""
    return [r for r in records if all(r[name] == value for name, value in values.items())]


def num_rounds(records: Records) -> int:
    """The number of rounds that any method has played."""
    return 1 + max((r["round"] for r in records), default=-1)


def third(records: Records, which: Literal["first", "last"]) -> list[Mapping[str, Any]]:
    """The records of the first or last third of the rounds, rounded up, that any method has played."""
    num = num_rounds(records)
    size = -(-num // 3)
    return [r for r in records if (r["round"] < size if which == "first" else r["round"] >= num - size)]


def finished(records: Records) -> list[Mapping[str, Any]]:
    """The records with all data of a task: only these tell whether the task was solved."""
    return where(records, datapoints=max((r["datapoints"] for r in records), default=0))


def of_one_protocol(records: Records) -> Records:
    """The records of Algorithm 1 if there are any, otherwise all, which are of the regret protocol."""
    return where(records, protocol="online") or records


def over_seeds(values: np.ndarray, valid: np.ndarray | bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over the first dimension, the seeds.

    The standard error is NaN for a single seed, and where a valid value is not finite.

    Args:
        values: (seeds, ...).
        valid: which values are used; at least one seed must be valid everywhere.
    """
    num = np.broadcast_to(valid, values.shape).sum(0)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = values.sum(0, where=valid) / num
        squares = ((values - mean) ** 2).sum(0, where=valid)
    return mean, np.sqrt(np.divide(squares, (num - 1) * num, out=np.full_like(mean, math.nan), where=num > 1))


def estimate(records: Records, value: Callable[[Mapping[str, Any]], float | None]) -> tuple[float, float]:
    """Mean and standard error over seeds of the mean over each seed's records; NaN without any value.

    Records whose value is None are ignored.
    """
    by_seed: dict[int, list[float]] = {}
    for record in records:
        if (number := value(record)) is not None:
            by_seed.setdefault(record["seed"], []).append(number)
    if not by_seed:
        return math.nan, math.nan
    mean, error = over_seeds(np.array([np.mean(values) for values in by_seed.values()]))
    return float(mean), float(error)
