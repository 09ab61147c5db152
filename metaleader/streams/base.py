"""The indexing that all streams share: rounds from either end, slices, and views of chosen rounds."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, SupportsIndex, overload

from metaleader.tasks import Task, TaskStream


class BaseStream(ABC):
    """A stream with negative rounds and slices: `stream[-1]`, `stream[:3]`, `stream[::-1]`.

    A subclass defines `__len__` and `task`, and may define `attributes`.

    Attributes:
        names: the names of classes, for figures.
        attributes: for each attribute its values, one per task: `{"colour": ["red", "blue"]}`. Orders refer to them.

    >>> class Squares(BaseStream):
    ...     def __len__(self):
    ...         return 9
    ...     def task(self, t):
    ...         x = torch.arange(6.0)[:, None]
    ...         return Task(f"{t} x squared", Batch(x[:4], t * x[:4] ** 2), Batch(x[4:], t * x[4:] ** 2))
    >>> import torch
    >>> from metaleader import Batch, Task
    >>> [task.name for task in Squares()[-2:]]
    ['7 x squared', '8 x squared']
    """

    names: Mapping[int, str] = MappingProxyType({})

    @property
    def attributes(self) -> Mapping[str, Sequence[Any]]:
        """No attributes, unless a subclass has them."""
        return {}

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def task(self, t: int) -> Task:
        """The task of round t, from 0 to below the length; the same task at every call."""

    def __iter__(self) -> Iterator[Task]:
        return (self.task(t) for t in range(len(self)))

    @overload
    def __getitem__(self, t: SupportsIndex, /) -> Task: ...

    @overload
    def __getitem__(self, t: slice, /) -> View: ...

    def __getitem__(self, t: SupportsIndex | slice, /) -> Task | View:
        if isinstance(t, slice):
            return View(self, range(len(self))[t])
        return self.task(check_round(self, t))


class View(BaseStream):
    """Chosen rounds of a stream, in a chosen order; a task is read when it is accessed.

    Args:
        stream: the stream.
        rounds: its rounds; one may occur several times, for tasks that recur.

    >>> from metaleader.streams import SinusoidStream
    >>> stream = SinusoidStream(tasks=9)
    >>> recurring = View(stream, [0, 1, 2, 0, 1, 2])
    >>> len(recurring), recurring[4].name == stream[1].name
    (6, True)
    """

    def __init__(self, stream: TaskStream | Sequence[Task], rounds: Iterable[SupportsIndex]) -> None:
        chosen = tuple(check_round(stream, t) for t in rounds)
        # A view of a view refers to the stream itself.
        self.stream = stream.stream if isinstance(stream, View) else stream
        self.rounds = tuple(stream.rounds[t] for t in chosen) if isinstance(stream, View) else chosen
        self.names = getattr(stream, "names", self.names)

    def __len__(self) -> int:
        return len(self.rounds)

    def task(self, t: int) -> Task:
        """The task of round t."""
        return self.stream[self.rounds[t]]

    @property
    def attributes(self) -> Mapping[str, Sequence[Any]]:
        """The attributes of the chosen tasks."""
        attributes = getattr(self.stream, "attributes", {})
        return {name: [values[t] for t in self.rounds] for name, values in attributes.items()}

    @property
    def camera(self) -> Any:
        """A function of t, for streams of poses: the camera of a task; None for other streams."""
        camera = getattr(self.stream, "camera", None)
        return None if camera is None else lambda t: camera(self.rounds[t])


def check_round(stream: TaskStream | Sequence[Task], t: SupportsIndex) -> int:
    """The round from 0 that an index refers to; raises IndexError if there is none."""
    index, num = operator.index(t), len(stream)
    if not -num <= index < num:
        raise IndexError(f"round {index} of a stream of {num} tasks")
    return index % num
