"""Memory by task: everything observed so far, and meta-batches drawn from it (the paper's buffer and nu^t)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.memory.rows import Draw, Rows, Weights, Which, checked_weights, choose, distinct, split
from metaleader.tasks import Batch, rng


class TaskBuffer:
    """All datapoints observed so far, by task; with `max_tasks`, those of a bounded number of tasks.

    If a new task exceeds the bound, the task with the smallest weight is dropped, the oldest among equals.

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
        # Of the tasks kept; `numbers` counts all tasks seen.
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

    def begin(self, name: str, classes: Sequence[int] | None = None, num_classes: int | None = None) -> None:
        """Open a new task, which enters the buffer with its first datapoint, and drop tasks that exceed the bound."""
        if classes is not None and self.max_tasks is not None:
            raise ValueError(f"task {name!r} has classes, and images are kept by class: leave max_tasks at None")
        if classes is not None:
            raise ValueError(f"task {name!r} has classes, earlier tasks have none; use a new learner")
        excess = 0 if self.max_tasks is None else len(self.names) + 1 - self.max_tasks
        if excess <= 0:
            self._open = name
            return
        weights = self._weights(len(self.names))
        least_first = range(len(self.names)) if weights is None else np.argsort(weights, kind="stable").tolist()
        kept = sorted(least_first[excess:])
        spans = self._spans()
        store = self.store.copy_of([spans[i] for i in kept])
        starts = np.cumsum([0, *self.counts()[kept[:-1]]]).tolist()
        names, numbers = [self.names[i] for i in kept], [self.numbers[i] for i in kept]
        # One statement: an interrupt comes before or after it.
        self.store, self.starts, self.names, self.numbers, self._open = store, starts, names, numbers, name

    def append(self, batch: Batch, ids: Sequence[int] | Tensor | None = None) -> None:
        """Store datapoints of the open task."""
        if ids is not None:
            raise ValueError("observe: ids belong to n-way tasks; open the task with begin(name, classes=[...])")
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

    def current_classes(self) -> None:
        """None: the tasks have no classes."""

    @property
    def num_new(self) -> int:
        """The size of D_t."""
        return 0 if self._open is not None or not self.names else self.store.length - self.starts[-1]

    def named(self, name: str) -> Batch | None:
        """All datapoints of the tasks with a name, in order of arrival; None for an open task without data.

        Raises:
            ValueError: for a name without data.
        """
        batches = [self.store.take(span) for n, span in zip(self.names, self._spans(), strict=True) if n == name]
        if not batches and name != self._open:
            names = list(dict.fromkeys(self.names))
            listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
            dropped = self.seen - len(self.names)
            note = f"; {dropped} tasks were dropped by max_tasks={self.max_tasks}" if dropped else ""
            raise ValueError(f"no data of task {name!r}; tasks with data: {listed or 'none yet'}{note}")
        return tree_map(lambda *leaves: torch.cat(leaves), *batches) if batches else None

    def latest(self, num: int) -> Batch | None:
        """The latest datapoints, of any task."""
        length = self.store.length
        return self.store.take(slice(max(0, length - num), length)) if length else None

    def _spans(self) -> list[slice]:
        """The rows of each task."""
        return [slice(*ends) for ends in zip(self.starts, [*self.starts[1:], self.store.length], strict=False)]

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
            tasks: the number of tasks per step, drawn with replacement from nu^t.
            support: datapoints in a task's support set; may be 0.
            query: datapoints in a task's query set.
            which: all tasks kept, those before the open one, or the open one only.

        Returns:
            Row numbers on the buffer's device, or None if there is nothing to draw from.
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
        chosen = first + choose(uniforms[:, 0], stop - first, weights)
        # Only the chosen tasks are read, so that the cost does not grow with the number of tasks.
        numbers = chosen.tolist()
        starts = np.array([self.starts[i] for i in numbers], dtype=np.int64)
        stops = [self.starts[i + 1] if i + 1 < len(self.starts) else self.store.length for i in numbers]
        counts = np.array(stops, dtype=np.int64) - starts
        picked = starts[:, None] + split(distinct(uniforms[:, 1:], counts, width), counts, support, query)
        picked = torch.from_numpy(picked.reshape(len(steps), tasks, width))
        return Draw(picked[..., :support], picked[..., support:]).to(self.device)

    def _weights(self, stop: int) -> np.ndarray | None:
        """Weights of the first `stop` tasks kept; None if they are uniform."""
        if self.weights is None:
            return None
        # Weights over all tasks seen, excluding the current task if it is not sampled.
        weights = checked_weights(self.weights, self.seen - (len(self.names) - stop))
        if self.seen > len(self.names):
            weights = weights[self.numbers[:stop]]
        return weights if weights.sum() > 0 else None

    def gather(self, draw: Draw) -> tuple[Batch, Batch]:
        """The support and query batches of a draw, each (..., tasks, datapoints, ...)."""
        return self.store.gather_draw(draw)

    def mark(self) -> tuple[Any, ...]:
        """A point to return to with `rollback`, until a task is dropped."""
        return self.store.length, len(self.names), self.seen, self._open

    def rollback(self, mark: tuple[Any, ...]) -> None:
        """Remove the datapoints appended after a mark."""
        length, num_tasks, self.seen, self._open = mark
        self.store.cut(length)
        del self.names[num_tasks:], self.starts[num_tasks:], self.numbers[num_tasks:]

    def state_dict(self, data: bool = True) -> dict[str, Any]:
        """Everything stored; with `data=False` only the bookkeeping, for streams that rebuild the data."""
        state = {"kind": self.kind, "names": list(self.names), "starts": list(self.starts), "open": self._open}
        if self.seen > len(self.names):
            state |= {"numbers": list(self.numbers), "seen": self.seen}
        return state | self.store.state_dict(data)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; if it has no data, the stored data must be that of the state."""
        names, starts = list(state["names"]), list(state["starts"])
        # A state lists them only if tasks were dropped.
        numbers, seen = list(state.get("numbers", range(len(names)))), state.get("seen", len(names))
        self.store.load_state_dict(state)
        if "data" not in state and (starts, numbers) != (self.starts, self.numbers):
            raise ValueError(
                f"the state was saved without its data, of tasks {numbers}, but tasks {self.numbers} are present;"
                " observe the same data (update=False) before loading"
            )
        self.names, self.starts, self.numbers, self.seen, self._open = names, starts, numbers, seen, state["open"]
