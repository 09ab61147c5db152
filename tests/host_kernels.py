"""The GPU's kernels for multilayer perceptrons as a C++ library of one thread, compiled by g++."""

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from metaleader.engine.dense.plan import Plan

GUARD = 64


class HostKernels:
    """The kernels of a plan on the CPU; memory outside the arenas is checked.

    Args:
        plan: what they are compiled for.
        folder: for the libraries.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        source = plan.cuda_source(shared=False, threads=1)
        library = folder / f"{hashlib.sha256(source.encode()).hexdigest()}.so"
        if not library.exists():
            library.with_suffix(".cpp").write_text(source)
            command = ["g++", "-O0", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Werror"]
            subprocess.run([*command, str(library.with_suffix(".cpp")), "-o", str(library)], check=True)
        self._library, self._floats = ctypes.CDLL(str(library)), plan.arena() // 4

    def __call__(self, learners: int, tasks: int, arguments: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        *inputs, gradients, losses = arguments
        # NaN where nothing was written; the source begins with the zeros that it needs.
        memory = torch.full((learners * tasks * self._floats + 2 * GUARD,), float("nan"))
        memory[:GUARD] = memory[-GUARD:] = 7.0
        gradients.fill_(float("nan"))
        tensors = [*inputs, memory[GUARD:], gradients, losses, *means]
        self._library.run(learners, tasks, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors))
        assert (memory[:GUARD] == 7.0).all()
        assert (memory[-GUARD:] == 7.0).all()
