"""Paired differences between methods over seeds, with t intervals.

Methods share seeds and streams. The differences within a seed therefore vary less than the values of either method.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from metaleader.report.records import Records, methods_of, record_error, third, where


@dataclass(frozen=True)
class Difference:
    """The error of one method minus that of another, over the seeds that both have.

    Attributes:
        first: the method whose error is subtracted; it is better if the difference is positive.
        second: the other method.
        datapoints: the size of D_t.
        seeds: the number of seeds.
        mean: the mean difference.
        interval: the t interval of the mean; None with a single seed.
        p: the two-sided p-value of a paired t test, not adjusted for the number of pairs; None with a single seed.
    """

    first: str
    second: str
    datapoints: int
    seeds: int
    mean: float
    interval: tuple[float, float] | None
    p: float | None


def paired_differences(
    records: Records,
    datapoints: int | None = None,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    rounds: Literal["all", "first", "last"] = "last",
    level: float = 0.95,
) -> list[Difference]:
    """Compare methods by the errors of each seed, averaged over rounds; an error is 1 - accuracy, or a loss.

    Args:
        records: rows with the columns of `records.csv`.
        datapoints: the size of D_t; the largest if None.
        pairs: pairs of methods; all, in the order of figures, if None.
        rounds: all rounds, or the first or the last third of them.
        level: the confidence level of the intervals.

    Raises:
        ValueError: if a method has no such records, or two methods were measured on different rounds of a seed.

    >>> rows = [{"method": m, "seed": s, "round": 0, "datapoints": 5, "loss": x + s, "accuracy": None}
    ...         for m, x in (("ours", 1.0), ("theirs", 3.0)) for s in range(3)]
    >>> (found,) = paired_differences(rows)
    >>> found.mean, found.interval
    (2.0, (2.0, 2.0))
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    chosen = records if rounds == "all" else third(records, rounds)
    size = max((r["datapoints"] for r in chosen), default=0) if datapoints is None else datapoints
    if pairs is None:
        pairs = list(itertools.combinations(methods_of(chosen), 2))
    errors = {name: _errors(where(chosen, method=name, datapoints=size)) for name in dict.fromkeys(sum(pairs, ()))}
    return [_difference(first, second, size, errors, level) for first, second in pairs]


def _errors(records: Records) -> dict[int, dict[int, float]]:
    """The error by seed and round."""
    errors: dict[int, dict[int, float]] = {}
    for record in records:
        errors.setdefault(record["seed"], {})[record["round"]] = record_error(record)
    return errors


def _difference(
    first: str, second: str, size: int, errors: dict[str, dict[int, dict[int, float]]], level: float
) -> Difference:
    a, b = errors[first], errors[second]
    for name in (first, second):
        if not errors[name]:
            raise ValueError(f"method {name!r} has no records at {size} datapoints in these rounds")
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        raise ValueError(f"{first!r} and {second!r} have no seed in common: {sorted(a)} and {sorted(b)}")
    for seed in seeds:
        if a[seed].keys() != b[seed].keys():
            raise ValueError(f"{first!r} and {second!r} were measured on different rounds of seed {seed}")
    values = np.array([np.mean(list(b[seed].values())) - np.mean(list(a[seed].values())) for seed in seeds])
    mean, num = float(values.mean()), len(values)
    if num == 1:
        return Difference(first, second, size, num, mean, None, None)
    from scipy.special import stdtr, stdtrit  # a slow import

    error = float(values.std(ddof=1)) / math.sqrt(num)
    half = float(stdtrit(num - 1, 0.5 + level / 2)) * error
    p = float(2 * stdtr(num - 1, -abs(mean) / error)) if error > 0 else float(mean == 0)
    return Difference(first, second, size, num, mean, (mean - half, mean + half), p)
