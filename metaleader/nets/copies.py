"""Copies of a module that share its tensors, each for one call at a time.

`torch.func.functional_call` replaces the tensors of a module for the duration of the call. A module under such a call
must not be used by another thread, and an interrupted call may leave it changed.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterable, Iterator

from torch import nn


class Copies:
    """Copies of a module, made when they are needed: as many as there are calls at the same time.

    Args:
        original: the module, which is not called unless it is among `free`.
        free: modules to use first.

    Attributes:
        free: copies that nobody uses. After an exception in a call, its copy is not used again.
    """

    def __init__(self, original: nn.Module, free: Iterable[nn.Module] = ()) -> None:
        self.original = original
        self.free = deque(free)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[nn.Module]:
        """A copy that nobody else uses; after an exception it is not used again."""
        try:
            module = self.free.pop()  # atomic
        except IndexError:
            module = self.another()
        yield module
        self.free.append(module)

    def another(self) -> nn.Module:
        """A new copy, which shares the tensors of the module."""
        tensors = [*self.original.parameters(), *self.original.buffers()]
        return copy.deepcopy(self.original, {id(tensor): tensor for tensor in tensors})

    def __deepcopy__(self, memo: dict[int, object]) -> Copies:
        return Copies(copy.deepcopy(self.original, memo))

    def __reduce__(self) -> tuple[type[Copies], tuple[nn.Module]]:
        return Copies, (self.original,)
