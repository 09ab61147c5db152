"""Attention whose second derivative exists, also if several threads ask for it at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_lock = threading.Lock()
_users = 0
_setting = ExitStack()


def plain_attention() -> AbstractContextManager[object]:
    """A context in which torch uses its plain implementation of attention: the fused ones have no second derivative.

    The choice is a global setting of torch. The first thread that enters makes it, and the last one that leaves
    restores the setting before.
    """
    if torch.compiler.is_compiling():
        return sdpa_kernel(SDPBackend.MATH)  # traced
    return _counted()


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    global _users
    with _lock:
        if _users == 0:
            _setting.enter_context(sdpa_kernel(SDPBackend.MATH))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _setting.close()
