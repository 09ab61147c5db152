"""Global state that changes results: random generators, and on a GPU TF32 and the order of sums."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Make results repeat bit for bit; convolutions use TF32 only if matrix products do.

    torch enables TF32 for convolutions and disables it for matrix products. TF32 causes errors of many per cent in a
    meta-gradient of five steps, so it must be requested (`torch.set_float32_matmul_precision("high")`). By default
    cuDNN chooses algorithms whose order of summation varies. Autograd runs the GPU part of a graph in its own thread,
    ordered by counters of each thread: the order of sums in a second derivative then depends on everything that the
    process has differentiated before. With one thread there is one counter.
    """
    with torch.autograd.set_multithreading_enabled(False):
        if device.type != "cuda":
            yield
            return
        cudnn = torch.backends.cudnn
        before = cudnn.allow_tf32, cudnn.deterministic
        cudnn.allow_tf32, cudnn.deterministic = torch.backends.cuda.matmul.allow_tf32, True
        try:
            with torch.cuda.device(device):
                yield
        finally:
            cudnn.allow_tf32, cudnn.deterministic = before


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch, and restore their states (on the CPU) afterwards.

    The library draws from generators of its own; a user's code may draw from the global ones.
    """
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Turn TF32 on or off, in matrix products and convolutions alike."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
