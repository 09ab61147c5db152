"""Whether torch operations are being recorded for a compiler, in which case other operations may be faster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_state = threading.local()


def is_traced() -> bool:
    """Whether operations are recorded for a compiler, by dynamo or in the context `tracing`."""
    return torch.compiler.is_compiling() or getattr(_state, "tracing", False)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Announce to layers and losses that the current thread records operations for a compiler."""
    before = getattr(_state, "tracing", False)
    _state.tracing = True
    try:
        yield
    finally:
        _state.tracing = before
