"""Memory: everything revealed so far, and how meta-batches are drawn from it (the paper's buffer and nu^t).

Rows of all tasks lie one after the other in one tensor, images as the uint8 they came as; a draw is row numbers, made
on the CPU from (seed, step) for a whole reveal at once and moved once, so that every device sees the same draws.

A task of n datapoints gives disjoint support and query sets. Where n is smaller than support + query, its datapoints
are divided between the two in proportion, at least one each, and repeated in turn to fill the sets; a single datapoint
is both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.memory.rows import Rows
from metaleader.tasks import Batch, rng

# nu^t: the weights of tasks 0 .. t-1 given t; None means uniform
Weights = Callable[[int], np.ndarray]
Which = Literal["all", "past", "current"]


def recency(half_life: float) -> Weights:
    """Weights that halve with every `half_life` tasks of age.

    >>> recency(1.0)(3)
    array([0.25, 0.5 , 1.  ])
    """
    if not half_life > 0:
        raise ValueError(f"half_life must be positive, got {half_life}")
    return lambda num_tasks: 0.5 ** (np.arange(num_tasks - 1, -1, -1) / half_life)


class Draw(NamedTuple):
    """Meta-batches as row numbers: a leading step dimension, then tasks, then datapoints.

    Attributes:
        support: (steps, tasks, support) row numbers.
        query: (steps, tasks, query) row numbers.
        support_y: the same shape as `support`: labels that stand in for the stored ones (n-way), or None.
        query_y: likewise for `query`.
        classes: (steps, tasks, n) the global class behind each label of a task (n-way), or None.
    """

    support: Tensor
    query: Tensor
    support_y: Tensor | None = None
    query_y: Tensor | None = None
    classes: Tensor | None = None

    def to(self, device: torch.device | str) -> Draw:
        """The same draw on a device."""
        return Draw(*(None if part is None else part.to(device) for part in self))  # pyright: ignore[reportArgumentType]

    def at(self, step: int | slice) -> Draw:
        """The draw of one step, or of several."""
        return Draw(*(None if part is None else part[step] for part in self))  # pyright: ignore[reportArgumentType]


class TaskBuffer:
    """All datapoints revealed so far, by task; with `max_tasks`, of so many tasks.

    When a task begins for which there is no room, the one that counts least is forgotten, the oldest of equals.

    Args:
        device: where the data is kept.
        weights: nu^t, the distribution over the tasks seen; uniform if None.
        max_tasks: the tasks kept, the open one among them, two or more; all if None.
    """

    kind = "tasks"

    def __init__(
        self, device: torch.device | str = "cpu", weights: Weights | None = None, max_tasks: int | None = None
    ) -> None:
        if max_tasks is not None and not (isinstance(max_tasks, int | np.integer) and max_tasks >= 2):
            raise ValueError(f"max_tasks must be an integer of at least 2, or None to keep all; got {max_tasks!r}")
        self.device = torch.device(device)
        self.weights, self.max_tasks = weights, max_tasks
        self.store = Rows(self.device)
        # Of the tasks kept; their numbers are those among all seen.
        self.names: list[str] = []
        self.starts: list[int] = []
        self.numbers: list[int] = []
        self.seen = 0
        self._open: str | None = None

    def __len__(self) -> int:
        """The number of tasks kept, each with at least one datapoint."""
        return len(self.names)

    @property
    def num_datapoints(self) -> int:
        """The number of datapoints kept."""
        return self.store.length

    def begin(self, name: str) -> None:
        """Open a new task, which enters the buffer with its first datapoint; what leaves it no room is forgotten."""
        excess = 0 if self.max_tasks is None else len(self.names) + 1 - self.max_tasks
        if excess <= 0:
            self._open = name
            return
        weights = self._weights(len(self.names))
        least_first = range(len(self.names)) if weights is None else np.argsort(weights, kind="stable").tolist()
        kept = sorted(least_first[excess:])
        spans = self._spans()
        store = self.store.only([spans[i] for i in kept])
        starts = np.cumsum([0, *self.counts()[kept[:-1]]]).tolist()
        names, numbers = [self.names[i] for i in kept], [self.numbers[i] for i in kept]
        # At once: an interrupt comes before it or after.
        self.store, self.starts, self.names, self.numbers, self._open = store, starts, names, numbers, name

    def append(self, batch: Batch) -> None:
        """Keep datapoints of the open task."""
        start = self.store.length
        self.store.append(batch)
        if self._open is not None:
            self.names.append(self._open)
            self.starts.append(start)
            self.numbers.append(self.seen)
            self.seen += 1
            self._open = None

    def current(self) -> Batch | None:
        """D_t: all datapoints of the open task, None before the first."""
        if self._open is not None or not self.names:
            return None
        return self.store.take(slice(self.starts[-1], self.store.length))

    def named(self, name: str) -> Batch | None:
        """All datapoints of the tasks of a name, in the order they came; None where there are none."""
        parts = [self.store.take(span) for own, span in zip(self.names, self._spans(), strict=True) if own == name]
        return tree_map(lambda *leaves: torch.cat(leaves), *parts) if parts else None

    def _spans(self) -> list[slice]:
        """The rows of each task."""
        return [slice(*ends) for ends in zip(self.starts, [*self.starts[1:], self.store.length], strict=True)]

    def counts(self) -> np.ndarray:
        """The number of datapoints of each task."""
        return np.diff(np.asarray([*self.starts, self.store.length], dtype=np.int64))

    def draw(
        self, seed: int, steps: Sequence[int], tasks: int, support: int, query: int, which: Which = "all"
    ) -> Draw | None:
        """Draw meta-batches for some steps; a step's draw depends on (seed, step) and the buffer alone.

        Args:
            seed: of the learner.
            steps: the numbers of the meta-updates to draw for.
            tasks: how many tasks a step, with replacement, from nu^t.
            support: datapoints in a task's support set; may be 0.
            query: datapoints in a task's query set.
            which: all tasks seen, those before the open one, or the open one only.

        Returns:
            Row numbers on the buffer's device, or None where there is nothing to draw from.
        """
        is_open = self._open is None and bool(self.names)
        last = len(self.names) - int(is_open)
        first, stop = {"all": (0, len(self.names)), "past": (0, last), "current": (last, len(self.names))}[which]
        if stop == first:
            return None
        width = support + query
        uniforms = np.stack([rng("draw", seed, step).random((tasks, 1 + 2 * width)) for step in steps])
        uniforms = uniforms.reshape(-1, 1 + 2 * width)
        weights = self._weights(stop) if which != "current" else None
        chosen = first + _choose(uniforms[:, 0], stop - first, weights)
        # Only the chosen tasks are looked at: the cost must not grow with the number of tasks.
        numbers = chosen.tolist()
        starts = np.array([self.starts[i] for i in numbers], dtype=np.int64)
        stops = [self.starts[i + 1] if i + 1 < len(self.starts) else self.store.length for i in numbers]
        counts = np.array(stops, dtype=np.int64) - starts
        picked = starts[:, None] + split(distinct(uniforms[:, 1:], counts, width), counts, support, query)
        picked = torch.from_numpy(picked.reshape(len(steps), tasks, width))
        return Draw(picked[..., :support], picked[..., support:]).to(self.device)

    def _weights(self, stop: int) -> np.ndarray | None:
        """nu^t of the first so many tasks kept; None where they count the same."""
        if self.weights is None:
            return None
        # Of all that were seen, without the open one where it is not drawn from.
        found = checked_weights(self.weights, self.seen - (len(self.names) - stop))
        if self.seen > len(self.names):
            found = found[self.numbers[:stop]]
        return found if found.sum() > 0 else None

    def gather(self, draw: Draw) -> tuple[Batch, Batch]:
        """The support and query batches of a draw, each (..., tasks, datapoints, ...)."""
        return self.store.gather(draw.support, draw.support_y), self.store.gather(draw.query, draw.query_y)

    def mark(self) -> tuple[Any, ...]:
        """A point to return to with `rollback`, as long as no task is forgotten."""
        return self.store.length, len(self.names), self.seen, self._open

    def rollback(self, mark: tuple[Any, ...]) -> None:
        """Forget what was appended after a mark."""
        length, num_tasks, self.seen, self._open = mark
        self.store.cut(length)
        del self.names[num_tasks:], self.starts[num_tasks:], self.numbers[num_tasks:]

    def state_dict(self, data: bool = True) -> dict[str, Any]:
        """Everything kept; with `data=False` only the bookkeeping, for a checkpoint whose stream rebuilds the data."""
        state = {"kind": self.kind, "names": list(self.names), "starts": list(self.starts), "open": self._open}
        if self.seen > len(self.names):
            state |= {"numbers": list(self.numbers), "seen": self.seen}
        return state | self.store.state_dict(data)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; without data in it, what is kept already must be what the state was saved with."""
        names, starts = list(state["names"]), list(state["starts"])
        # Where nothing was forgotten, a state does not say it.
        numbers, seen = list(state.get("numbers", range(len(names)))), state.get("seen", len(names))
        self.store.load_state_dict(state)
        if "data" not in state and (starts, numbers) != (self.starts, self.numbers):
            raise ValueError(
                f"the state was saved without its data, of tasks {numbers} as they came, and {self.numbers} are here;"
                " observe the same data (update=False) before loading"
            )
        self.names, self.starts, self.numbers, self.seen, self._open = names, starts, numbers, seen, state["open"]


def checked_weights(weights: Weights, num: int) -> np.ndarray:
    """The weights of 0 .. num-1, refused where they are no distribution."""
    given = np.asarray(weights(num), dtype=np.float64)
    if given.shape != (num,) or not np.isfinite(given).all() or (given < 0).any() or given.sum() <= 0:
        raise ValueError(f"the task weights must be {num} numbers, none negative and not all zero; got {given}")
    return given


def _choose(uniform: np.ndarray, num: int, weights: np.ndarray | None) -> np.ndarray:
    """Tasks 0 .. num-1 from uniform numbers, by weight."""
    if weights is None:
        return np.minimum((uniform * num).astype(np.int64), num - 1)
    cumulative = np.cumsum(weights)
    return np.minimum(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"), num - 1)


def distinct(uniform: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """Up to `width` distinct numbers below each count, in random order (Floyd's sampling, then a shuffle).

    Args:
        uniform: (rows, 2 width) uniform numbers.
        counts: (rows,), one or more.
        width: numbers wanted; rows with a smaller count repeat their numbers in turn.
    """
    take = np.minimum(counts, width)[:, None]
    columns = np.arange(width)
    tops = counts[:, None] - take + columns
    # Candidates, in place of which stands the top of those that are taken already.
    chosen = np.minimum((uniform[:, :width] * (tops + 1)).astype(np.int64), tops)
    for j in range(1, width):
        taken = (chosen[:, :j] == chosen[:, j, None]).any(1)
        np.copyto(chosen[:, j], tops[:, j], where=taken)
    keys = np.where(columns < take, uniform[:, width:], 2.0)
    order = np.argsort(keys, axis=1, kind="stable")
    # Columns that are not wanted, from `take` on, stay behind the others and are not read.
    return np.take_along_axis(chosen, np.take_along_axis(order, columns % take, axis=1), axis=1)


def split(numbers: np.ndarray, counts: np.ndarray, support: int, query: int) -> np.ndarray:
    """Columns for the support set, then for the query set; short rows are divided in proportion and repeated."""
    width = support + query
    if support == 0 or (counts >= width).all():
        return numbers
    have = np.minimum(counts, width)
    for_support = np.clip(have * support // width, 1, np.maximum(have - 1, 1))
    for_query = np.maximum(have - for_support, 1)
    first = np.arange(support) % for_support[:, None]
    second = (np.where(have > 1, for_support, 0))[:, None] + np.arange(query) % for_query[:, None]
    return np.take_along_axis(numbers, np.concatenate([first, second], axis=1), axis=1)
