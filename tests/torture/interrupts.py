"""Raise KeyboardInterrupt at the lines that a call runs, those of libraries included.

Lines are reported by `sys.settrace`. One kind is left out: the end of a `with` statement, at which CPython delivers no
signal, and where a lock could not be released by any code.
"""

import contextlib
import dis
import functools
import os
import random
import signal
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_C: Any = torch._C


class Site(NamedTuple):
    """A moment in a call: the file, the line, and how often the line was reached, from 1."""

    file: str
    line: int
    occurrence: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.occurrence})"


def lines_of(call: Callable[[], object], inside: Sequence[str] = ("",)) -> list[Site]:
    """The lines that a call runs, each at its first and its last occurrence, in order of the first.

    Args:
        call: a function without arguments.
        inside: parts of paths; only lines of files with one of them are returned.
    """
    counts: dict[tuple[str, int], int] = {}

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        if event == "line" and not _ends_with(frame):
            key = frame.f_code.co_filename, frame.f_lineno
            counts[key] = counts.get(key, 0) + 1
        return trace

    _traced(call, trace)
    own = os.path.dirname(__file__)
    wanted = {
        key: count for key, count in counts.items() if not key[0].startswith(own) and any(p in key[0] for p in inside)
    }
    return [Site(*key, n) for key, count in wanted.items() for n in sorted({1, count})]


def interrupted_at(call: Callable[[], object], site: Site) -> bool:
    """Run a call and raise KeyboardInterrupt at a site, which the call passes on; returns whether it was reached."""
    left, raised = site.occurrence, False

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        nonlocal left, raised
        if event == "line" and not raised and frame.f_lineno == site.line and frame.f_code.co_filename == site.file:
            left -= not _ends_with(frame)
            if left == 0:
                raised = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace if frame.f_code.co_filename == site.file else None

    with contextlib.suppress(KeyboardInterrupt):
        _traced(call, trace)
    return raised


def signalled_after(call: Callable[[], object], seconds: float) -> bool:
    """Run a call and raise KeyboardInterrupt by a signal after some seconds; returns whether it came in time."""
    under_way = True

    def interrupt(*_: object) -> None:
        if under_way:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call()
        under_way = False
        return False
    except KeyboardInterrupt:
        return True
    finally:
        under_way = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _traced(call: Callable[[], object], trace: Any) -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


def _ends_with(frame: types.FrameType) -> bool:
    return frame.f_lasti in _with_exits(frame.f_code)


@functools.cache
def _with_exits(code: types.CodeType) -> frozenset[int]:
    """The offsets at which a block of `with` ends: `__exit__(None, None, None)` is called."""
    found, run = set(), []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_CONST" and instruction.argval is None:
            run.append(instruction.offset)
            continue
        if instruction.opname in ("PRECALL", "CALL") and len(run) >= 3:
            found.add(run[-3])
        run = []
    return frozenset(found)


def process_state() -> dict[str, Any]:
    """Settings of the process that a call must leave as they were."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "forward-mode gradients": _C._is_fwd_grad_enabled(),
        "dual level": forward_ad._current_level,
        "transforms": _C._functorch.get_dynamic_layer_stack_depth(),
        "function modes": _C._len_torch_function_stack(),
        "function overrides": str(_C._get_torch_function_state()),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "threads of backward": _C._is_multithreading_enabled(),
        "saved tensors": _C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        ),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "torch generator": torch.get_rng_state().numpy().tobytes(),
        "numpy generator": (numpy_state[1].tobytes(), *numpy_state[2:]),
        "python generator": random.getstate(),
        "warning filters": list(warnings.filters),
    }


def changes(before: dict[str, Any]) -> list[str]:
    """The names of the settings that differ from `process_state`."""
    now = process_state()
    return [name for name, value in before.items() if now[name] != value]


def repair(before: dict[str, Any]) -> None:
    """Restore the settings that would make later tries fail too."""
    _C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(before["transforms"])
    while forward_ad._current_level > before["dual level"]:
        forward_ad.exit_dual_level()
    while _C._len_torch_function_stack() > before["function modes"]:
        _C._pop_torch_function_stack()
    _C._set_grad_enabled(before["grad mode"])
    _C._set_fwd_grad_enabled(before["forward-mode gradients"])
    _C._set_multithreading_enabled(before["threads of backward"])
    _C._autograd._saved_tensors_hooks_enable()
    torch.set_default_dtype(before["dtype"])
    torch.set_float32_matmul_precision(before["precision"][0])
    torch.backends.cudnn.allow_tf32 = before["precision"][1]
    torch.set_rng_state(torch.frombuffer(bytearray(before["torch generator"]), dtype=torch.uint8))
    random.setstate(before["python generator"])
    torch.backends.cuda.enable_flash_sdp(before["attention"][0])
    torch.backends.cuda.enable_math_sdp(before["attention"][1])
    torch.backends.cuda.enable_mem_efficient_sdp(before["attention"][2])
    warnings.filters[:] = before["warning filters"]  # pyright: ignore[reportIndexIssue]
