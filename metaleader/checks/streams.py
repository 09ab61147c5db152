"""What every stream must satisfy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from metaleader.checks.trees import bits, copied, require, require_equal
from metaleader.tasks import Batch, Task, TaskStream, check_alike, check_batch, to_device

Stream = TaskStream | Sequence[Task]

# The rounds of a stream that are asked for again.
_ASKED_AGAIN = 8


def check_stream(stream: Stream) -> None:
    """Run all of `STREAM_CHECKS`.

    Raises:
        AssertionError: at the first check that fails.

    >>> from metaleader.streams import SinusoidStream
    >>> check_stream(SinusoidStream(tasks=3))
    """
    for check in STREAM_CHECKS:
        check(stream)


def length_is_known(stream: Stream) -> None:
    """`len(stream)` is the number of tasks, an IndexError lies beyond it, and plain iteration ends there."""
    length = len(stream)
    require(length >= 1, "the stream has no tasks")
    try:
        stream[length]
    except IndexError:
        pass
    else:
        raise AssertionError(f"stream[{length}] of a stream of {length} tasks gave a task; raise an IndexError")
    found = sum(1 for _ in stream)  # pyright: ignore[reportGeneralTypeIssues]
    require(found == length, f"len(stream) is {length}, iteration gave {found} tasks")


def tasks_are_valid(stream: Stream) -> None:
    """Every entry is a Task with a text for a name and finite datapoints, all of one shape and dtype."""
    first = stream[0].train if isinstance(stream[0], Task) else None
    for t in range(len(stream)):
        task: Any = stream[t]
        require(isinstance(task, Task), f"stream[{t}] is a {type(task).__name__}, not a Task")
        require(isinstance(task.name, str), f"stream[{t}].name is {task.name!r}, not text")
        assert first is not None
        for part in ("train", "test"):
            try:
                check_alike(check_batch(getattr(task, part), f"stream[{t}].{part}"), first, f"stream[{t}].{part}")
            except ValueError as error:
                raise AssertionError(str(error)) from error


def tasks_stay_the_same(stream: Stream) -> None:
    """`stream[t]` is the same task whenever it is asked for, in whatever order."""
    length = len(stream)
    asked = sorted({t * (length - 1) // (_ASKED_AGAIN - 1) for t in range(_ASKED_AGAIN)})
    first = {t: copied(_parts(stream[t])) for t in asked}
    for t in [*reversed(asked), *asked]:
        require_equal(first[t], _parts(stream[t]), f"stream[{t}] differs when asked again")


def train_and_test_are_disjoint(stream: Stream) -> None:
    """No datapoint of a task's training data is in its test data, as far as equal rows show."""
    for t in range(len(stream)):
        task = stream[t]
        shared = set(_row_bytes(task.train)) & set(_row_bytes(task.test))
        require(not shared, f"stream[{t}]: {len(shared)} datapoints of train are in test too")


STREAM_CHECKS: tuple[Callable[[Stream], None], ...] = (
    length_is_known,
    tasks_are_valid,
    tasks_stay_the_same,
    train_and_test_are_disjoint,
)


def _parts(task: Task) -> dict[str, Any]:
    return {"name": task.name, "train": task.train, "test": task.test, "classes": task.classes, "ids": task.ids}


def _row_bytes(batch: Batch) -> Iterator[bytes]:
    leaves = [bits(leaf).view(leaf.shape[0], -1) for leaf in tree_leaves(to_device(batch, "cpu"))]
    for row in torch.cat(leaves, 1).numpy():
        yield row.tobytes()
