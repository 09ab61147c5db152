"""What a GPU may not do unasked: TF32, and sums in any order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """Let convolutions use TF32 only where matrix products do, and the same algorithm from run to run.

    torch has TF32 on for the ones and off for the others. It puts errors of many per cent into a meta-gradient of five
    steps, so it is for those who ask for it (`torch.set_float32_matmul_precision("high")`). Left to itself, cuDNN also
    chooses algorithms that add up in any order, so that a resumed run would end elsewhere.
    """
    if not _has_cuda():
        yield
        return
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = torch.backends.cuda.matmul.allow_tf32, True
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before


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
