"""Where TF32 is used: nowhere, unless asked for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def convolutions_as_matmul() -> Iterator[None]:
    """Let convolutions use TF32 only where matrix products do: torch has it on for the ones and off for the others.

    TF32 puts errors of many per cent into a meta-gradient of five steps, so it is for those who ask for it
    (`torch.set_float32_matmul_precision("high")`).
    """
    if not _has_cuda():
        yield
        return
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """TF32 on or off, in matrix products and convolutions alike."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()
