"""Timing: the functions compared alternate in every round, and the device is synchronised before reading the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def median_ms(functions: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int = 5) -> dict[str, float]:
    """The median time of each function, in milliseconds.

    Each function is called once untimed, then in every round for a tenth of a second, at least once.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            spent = 0.0
            while spent < 0.1:
                samples[name].append(seconds(function, device))
                spent += samples[name][-1]
    return {name: 1000 * statistics.median(values) for name, values in samples.items()}


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """The time of one call, in seconds."""
    wait(device)
    started = time.perf_counter()
    function()
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_kernels(function: Callable[[], Any]) -> int:
    """The number of kernels that a call launches on the GPU, without copies."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() or () if str(event.device_type).endswith("CUDA")]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)
