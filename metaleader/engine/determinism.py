"""Global state that changes results: random generators, and on a GPU TF32 and the order of sums."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator

import numpy as np
import torch

from metaleader.system.settings import restoring


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

        def restore() -> None:
            cudnn.allow_tf32, cudnn.deterministic = before

        with restoring(restore), torch.cuda.device(device):
            cudnn.allow_tf32, cudnn.deterministic = torch.backends.cuda.matmul.allow_tf32, True
            yield


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch, and restore their states (on the CPU) afterwards.

    The library draws from generators of its own; a user's code may draw from the global ones.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002

    def restore() -> None:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])

    with restoring(restore):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Turn TF32 on or off, in matrix products and convolutions alike."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    def choose(precision: str, convolutions: bool) -> None:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions

    with restoring(functools.partial(choose, *before)):
        choose("high" if on else "highest", on)
        yield
