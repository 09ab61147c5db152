"""What a GPU may not do unasked: TF32, and sums in another order from run to run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """The same bits from run to run, and TF32 in convolutions only where it is in matrix products.

    torch has TF32 on for the ones and off for the others. It puts errors of many per cent into a meta-gradient of five
    steps, so it is for those who ask for it (`torch.set_float32_matmul_precision("high")`). Left to itself, cuDNN
    chooses algorithms that add up in any order. And autograd goes through a GPU's part of a graph in a thread of its
    own, in the order of counters that every thread keeps for itself: a gradient of a gradient is then summed up in an
    order that depends on all that the process has differentiated before. In one thread there is one counter.
    """
    with torch.autograd.set_multithreading_enabled(False):
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
