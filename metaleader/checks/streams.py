"""Requirements on streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from metaleader.checks.trees import bits, clone, require, require_equal
from metaleader.tasks import Batch, Task, TaskStream, check_alike, check_batch, to_device

Stream = TaskStream | Sequence[Task]

# The number of rounds that are read repeatedly.
_REREAD = 8


def check_stream(stream: Stream) -> None:
    """Run all of `STREAM_CHECKS`.

    Raises:
        AssertionError: if a check fails.

    >>> from metaleader.streams import SinusoidStream
    >>> check_stream(SinusoidStream(tasks=3))
    """
    for check in STREAM_CHECKS:
        check(stream)


def length_matches_iteration(stream: Stream) -> None:
    """`len(stream)` is the number of tasks: a larger index raises an IndexError, and iteration ends there."""
    length = len(stream)
    require(length >= 1, "the stream has no tasks")
    try:
        stream[length]
    except IndexError:
        pass
    else:
        raise AssertionError(f"stream[{length}] of a stream of {length} tasks returned a task; raise an IndexError")
    num_tasks = sum(1 for _ in stream)  # pyright: ignore[reportGeneralTypeIssues]
    require(num_tasks == length, f"len(stream) is {length}, iteration gave {num_tasks} tasks")


def tasks_are_valid(stream: Stream) -> None:
    """Every item is a Task with a string as name and finite datapoints; all tasks have the same shapes and dtypes."""
    first = stream[0].train if isinstance(stream[0], Task) else None
    for t in range(len(stream)):
        task: Any = stream[t]
        require(isinstance(task, Task), f"stream[{t}] is a {type(task).__name__}, not a Task")
        require(isinstance(task.name, str), f"stream[{t}].name is {task.name!r}, not a string")
        assert first is not None
        for split in ("train", "test"):
            where = f"stream[{t}].{split}"
            try:
                check_alike(check_batch(getattr(task, split), where), first, where)
            except ValueError as error:
                raise AssertionError(str(error)) from error


def tasks_stay_the_same(stream: Stream) -> None:
    """`stream[t]` is the same task at every access, in any order of accesses."""
    length = len(stream)
    rounds = sorted({t * (length - 1) // (_REREAD - 1) for t in range(_REREAD)})
    first = {t: clone(_fields(stream[t])) for t in rounds}
    for t in [*reversed(rounds), *rounds]:
        require_equal(first[t], _fields(stream[t]), f"stream[{t}] differs at a later access")


def train_and_test_are_disjoint(stream: Stream) -> None:
    """No row of a task's training data equals a row of its test data."""
    for t in range(len(stream)):
        task = stream[t]
        shared = set(_row_bytes(task.train)) & set(_row_bytes(task.test))
        require(not shared, f"stream[{t}]: {len(shared)} datapoints of train are also in test")


STREAM_CHECKS: tuple[Callable[[Stream], None], ...] = (
    length_matches_iteration,
    tasks_are_valid,
    tasks_stay_the_same,
    train_and_test_are_disjoint,
)


def _fields(task: Task) -> dict[str, Any]:
    return {"name": task.name, "train": task.train, "test": task.test, "classes": task.classes, "ids": task.ids}


def _row_bytes(batch: Batch) -> Iterator[bytes]:
    leaves = [bits(leaf).view(leaf.shape[0], -1) for leaf in tree_leaves(to_device(batch, "cpu"))]
    for row in torch.cat(leaves, 1).numpy():
        yield row.tobytes()
