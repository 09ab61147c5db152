"""The prequential error: each observation is predicted before it is stored. Kept in bounded memory.

Two errors are compared: that of the net adapted to the task's earlier data, and that of the initialisation without
adaptation. Both are averaged over blocks of observations, and over blocks of tasks in the order of their first data.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metaleader.system.files import write_atomic

_log = logging.getLogger("metaleader")
NAME, _FORMAT = "service.json", 1
_BLOCKS = 100
# Datapoints that the task had before the observation: the lower ends of the columns.
COLUMNS = (0, 1, 5, 20)
_RECENT = 50


class History:
    """Means of the prequential error, and the tasks observed last.

    The file holds means alone: neither data nor names of tasks.

    Args:
        folder: the folder of the file; None keeps it in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / NAME
        self._lock = threading.Lock()
        self._changed = False
        # A block of observations: datapoints, sum of losses, sum without adaptation, time of the last.
        self._size, self._count, self._blocks = 1, 0, list[list[float]]()
        # A block of tasks, by its number and column: the first three of these.
        self._tasks, self._cells = 1, dict[tuple[int, int], list[float]]()
        self._recent: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.skipped = 0
        if self._path is not None and self._path.is_file():
            self._load(self._path)

    def add(self, task: str, rows: int, loss: float, unadapted: float, datapoints: int, number: int) -> None:
        """Add an observation.

        Args:
            task: the name.
            rows: the datapoints of the observation.
            loss: their mean loss, by the net adapted to the earlier data.
            unadapted: their mean loss, by the initialisation.
            datapoints: the number of earlier datapoints of the task.
            number: the number of tasks seen before this one.
        """
        now = time.time()
        with self._lock:
            if not (math.isfinite(loss) and math.isfinite(unadapted)):
                self.skipped += 1
                return
            self._changed = True
            values = rows, rows * loss, rows * unadapted
            if self._count % self._size == 0:
                self._blocks.append([0, 0.0, 0.0, now])
            self._count += 1
            _add(self._blocks[-1], values)
            self._blocks[-1][3] = now
            column = max(i for i, low in enumerate(COLUMNS) if datapoints >= low)
            _add(self._cells.setdefault((number // self._tasks, column), [0, 0.0, 0.0]), values)
            self._recent[task] = {"loss": loss, "unadapted": unadapted, "time": now}
            self._recent.move_to_end(task)
            while len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
            self._merge()

    def forget(self, task: str) -> None:
        """Remove the name of a task."""
        with self._lock:
            self._recent.pop(task, None)

    def recent(self) -> list[tuple[str, dict[str, Any]]]:
        """The tasks observed last, the newest first."""
        with self._lock:
            return list(reversed(self._recent.items()))

    def totals(self) -> tuple[int, float, float]:
        """The number of datapoints, and the sums of their losses with and without adaptation."""
        with self._lock:
            return (int(sum(b[0] for b in self._blocks)), *(sum(b[i] for b in self._blocks) for i in (1, 2)))  # pyright: ignore[reportReturnType]

    def curves(self) -> dict[str, Any]:
        """Means for figures.

        Returns:
            `observations`: for each block the number of its last observation, the two mean losses, and the time;
            `tasks`: for each block of tasks the number of its first, and the mean loss of each column, or None;
            `columns`: the least number of earlier datapoints of each column; `skipped`, the observations without a
            finite loss.
        """
        with self._lock:
            observations = [
                [min((i + 1) * self._size, self._count), total / rows, unadapted / rows, when]
                for i, (rows, total, unadapted, when) in enumerate(self._blocks)
            ]
            blocks = sorted({block for block, _ in self._cells})
            tasks = [
                [block * self._tasks, *(_mean(self._cells.get((block, column))) for column in range(len(COLUMNS)))]
                for block in blocks
            ]
        return {"observations": observations, "tasks": tasks, "columns": list(COLUMNS), "skipped": self.skipped}

    def save(self) -> None:
        """Write the file, if anything has changed."""
        if self._path is None or not self._changed:
            return
        with self._lock:
            self._changed = False
            cells = [[*key, *values] for key, values in self._cells.items()]
            state = {"format": _FORMAT, "size": self._size, "count": self._count, "blocks": self._blocks}
            content = json.dumps(state | {"tasks": self._tasks, "cells": cells, "columns": list(COLUMNS)})
        write_atomic(self._path, content.encode())

    def _merge(self) -> None:
        """Halve the numbers of blocks that exceed the bound."""
        if len(self._blocks) > _BLOCKS:
            pairs = [self._blocks[i : i + 2] for i in range(0, len(self._blocks), 2)]
            self._blocks = [[*(sum(b[i] for b in pair) for i in range(3)), pair[-1][3]] for pair in pairs]
            self._size *= 2
        while max((block for block, _ in self._cells), default=0) >= _BLOCKS:
            cells, self._cells = self._cells, {}
            self._tasks *= 2
            for (block, column), values in cells.items():
                _add(self._cells.setdefault((block // 2, column), [0, 0.0, 0.0]), values)

    def _load(self, path: Path) -> None:
        try:
            state = json.loads(path.read_bytes())
            if state["format"] != _FORMAT or state["columns"] != list(COLUMNS):
                raise ValueError(f"it has format {state['format']}")
            blocks = [[float(value) for value in block] for block in state["blocks"]]
            cells = {(int(b), int(c)): [float(value) for value in rest] for b, c, *rest in state["cells"]}
            size, count, tasks = int(state["size"]), int(state["count"]), int(state["tasks"])
            if any(len(block) != 4 or block[0] <= 0 for block in blocks) or len(blocks) != -(-count // size):
                raise ValueError("its blocks do not fit its count")
            if any(len(values) != 3 or values[0] <= 0 for values in cells.values()) or tasks < 1 or size < 1:
                raise ValueError("its cells are damaged")
            if any(not 0 <= column < len(COLUMNS) or block < 0 for block, column in cells):
                raise ValueError("its cells are damaged")
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            _log.warning("%s is not read (%s): the figures of the status page begin anew", path, error)
            return
        self._size, self._count, self._blocks = size, count, blocks
        self._tasks, self._cells = tasks, cells


def _add(total: list[float], values: Sequence[float]) -> None:
    for i, value in enumerate(values):
        total[i] += value


def _mean(values: list[float] | None) -> float | None:
    return None if values is None else values[1] / values[0]
