"""Orders of tasks: at random, by an attribute, by similarity, drifting, recurring."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from metaleader.streams.base import View
from metaleader.tasks import Task, TaskStream, rng

# Values of attributes by name, one per task: numbers, or text
Attributes = Mapping[str, Sequence[Any]]

_KINDS = ("similar", "drifting", "recurring")
# The standard deviation of the noise of a drifting order, as a fraction of the stream
_NOISE = 0.1
# The number of groups that an attribute with many values is divided into
_GROUPS = 4


def reorder(
    stream: TaskStream | Sequence[Task],
    order: str | Sequence[int],
    seed: int = 0,
    attributes: Attributes | None = None,
) -> View:
    """Return the tasks of a stream in another order.

    Args:
        stream: a stream or a list of tasks.
        order: "given"; "random"; the name of an attribute, ascending, with text in the order of its first appearance;
            "similar", a path on which each task is the most similar one of those left; "drifting", by the first
            attribute, with noise, so that the distribution of tasks shifts gradually; "recurring", in groups of equal
            values of the first attribute, each of which occurs twice with different tasks; one of the last three with
            an attribute, such as "drifting:colour"; or a list of rounds.
        seed: of random and drifting orders.
        attributes: the attributes, with one value per task; those of the stream if None.

    >>> from metaleader.streams import rainbow_digits
    >>> reorder(rainbow_digits(), "recurring:rotation").attributes["rotation"][::7]
    [0, 90, 180, 270, 0, 90, 180, 270]
    """
    if not isinstance(order, str):
        return View(stream, order)
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    num = len(stream)
    if order == "given":
        return View(stream, range(num))
    if order == "random":
        return View(stream, rng("reorder", seed).permutation(num))
    chosen: Attributes = getattr(stream, "attributes", {}) if attributes is None else attributes
    for name, values in chosen.items():
        if len(values) != num:
            raise ValueError(f"attribute {name!r} has {len(values)} values for {num} tasks; give one per task")
    return View(stream, arrange(order, chosen, seed, others=("given", "random")))


def arrange(
    order: str,
    attributes: Attributes,
    seed: int,
    *,
    others: Sequence[str],
    categories: Mapping[str, Sequence[str]] | None = None,
) -> list[int]:
    """Return a permutation of tasks; ties keep the given order.

    Args:
        order: as in `reorder`, except "given", "random" and lists.
        attributes: values of all tasks.
        seed: of a drifting order.
        others: the orders that the caller implements, for the error message.
        categories: the order of the values of textual attributes; that of their first appearance if absent.
    """
    kind, _, name = order.partition(":") if order.partition(":")[0] in _KINDS else ("", "", order)
    if (name or not attributes) and name not in attributes:
        raise ValueError(_unknown(order, [*others, *attributes], next(iter(attributes), None)))
    chosen = [name] if name else [*attributes] if kind == "similar" else [next(iter(attributes))]
    columns = [_numbers(attributes[name], (categories or {}).get(name)) for name in chosen]
    ascending = np.lexsort(columns[::-1])
    if kind == "similar":
        return _path([(column, _is_numeric(attributes[name])) for name, column in zip(chosen, columns, strict=True)])
    if kind == "drifting":
        noise = _NOISE * len(ascending) * rng("drifting order", seed).standard_normal(len(ascending))
        return ascending[np.argsort(np.arange(len(ascending)) + noise, kind="stable")].tolist()
    if kind == "recurring":
        return _recurring(columns[0], ascending)
    return ascending.tolist()


def _unknown(order: str, valid: list[str], attribute: str | None) -> str:
    """The message for an unknown order."""
    names = [*valid, *(_KINDS if attribute else ())]
    close = difflib.get_close_matches(order.rpartition(":")[2], names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    more = f"{', '.join(_KINDS)} also by one attribute, such as drifting:{attribute}"
    note = more if attribute else "the stream has no attributes for other orders"
    return f"order must be one of {', '.join(names)}; got {order!r}{hint}; {note}"


def _is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, numbers.Real) for value in values)


def _numbers(values: Sequence[Any], categories: Sequence[str] | None) -> np.ndarray:
    """Numbers that sort as the values do."""
    if _is_numeric(values):
        return np.asarray(values, dtype=np.float64)
    positions = {value: i for i, value in enumerate(categories or dict.fromkeys(values))}
    return np.asarray([positions[value] for value in values], dtype=np.float64)


def _path(columns: list[tuple[np.ndarray, bool]]) -> list[int]:
    """Nearest neighbours, starting at the first task in ascending order.

    A number contributes its difference in standard deviations; text contributes 1 if it differs.
    """
    left = np.lexsort([column for column, _ in columns][::-1])
    path = [int(left[0])]
    left = np.sort(left[1:])
    while len(left):
        distance = np.zeros(len(left))
        for column, numeric in columns:
            away = np.abs(column[left] - column[path[-1]])
            distance += away / (column.std() or 1.0) if numeric else away > 0
        nearest = int(distance.argmin())
        path.append(int(left[nearest]))
        left = np.delete(left, nearest)
    return path


def _recurring(column: np.ndarray, ascending: np.ndarray) -> list[int]:
    """Two passes over groups of tasks: the first half of each group, then the second half of each."""
    values = np.unique(column)
    if len(values) <= len(column) // 2:
        groups = [np.flatnonzero(column == value) for value in values]
    else:
        groups = [np.sort(part) for part in np.array_split(ascending, min(_GROUPS, max(1, len(column) // 2)))]
    halves = [np.array_split(group, 2) for group in groups]
    return [int(i) for which in (0, 1) for pair in halves for i in pair[which]]
