"""Attention whose second derivative exists, also if several threads ask for it at the same time."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from metaleader.system.settings import restoring

_lock = threading.Lock()
_users: set[object] = set()
_before: list[bool] = []  # the setting to restore
# Not sdpa_kernel: an interrupt at the end of that context would leave the setting changed.
_KERNELS = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
)


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
    user = object()
    with restoring(functools.partial(_leave, user)):
        with _lock:
            if not _users:
                _before[:] = [is_enabled() for is_enabled, _ in _KERNELS]
            _users.add(user)
            _enable([enable is cuda.enable_math_sdp for _, enable in _KERNELS])
        yield


def _leave(user: object) -> None:
    with _lock:
        _users.discard(user)
        if not _users and _before:
            _enable(_before)
            _before.clear()


def _enable(choice: Iterable[bool]) -> None:
    for (_, enable), is_enabled in zip(_KERNELS, choice, strict=True):
        enable(is_enabled)
