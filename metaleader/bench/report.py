"""Run measurements by name, and print the results as a table and as a line of JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.console
import rich.table
import torch

from metaleader.bench.measures import measure_buffer, measure_memory, measure_start, measure_stream, measure_tf32
from metaleader.bench.update import measure_update
from metaleader.bench.work import CIFAR, PLAIN, POSE, RAINBOW, SEEDS
from metaleader.engine.determinism import tf32
from metaleader.system import machine

MEASUREMENTS: dict[str, Callable[[torch.device, bool], dict[str, Any]]] = {
    "meta-step": lambda device, peers: measure_update(RAINBOW, device, compare=True, peers=peers),
    "seeds": lambda device, peers: measure_update(SEEDS, device, draws=0),
    "cifar": lambda device, peers: measure_update(CIFAR, device),
    "pose": lambda device, peers: measure_update(POSE, device),
    "plain": lambda device, peers: measure_update(PLAIN, device),
    "generic": lambda device, peers: measure_update(RAINBOW.no_chain(), device, compare=True),
    "tf32": lambda device, peers: measure_tf32(RAINBOW, device),
    "memory": lambda device, peers: measure_memory(RAINBOW, device),
    "buffer": lambda device, peers: measure_buffer(device),
    "stream": lambda device, peers: measure_stream(RAINBOW, device),
    "start": lambda device, peers: measure_start(device),
}
# Times by engine mode, for readers of the JSON; the table has the same times by program.
_NOT_IN_TABLE = ("eager_ms", "compiled_ms")


def named(what: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in what.split(",") if name.strip()]


def run_bench(
    what: Sequence[str] = ("meta-step",), device: str = "auto", peers: bool = False, out: str | None = None
) -> dict[str, Any]:
    """Run measurements with TF32 off; print a table, then one line of JSON.

    Each result is also printed to stderr as soon as it is measured, and if `out` is given, appended to that file as a
    line of JSON, so that a killed run keeps its finished measurements.
    """
    unknown = [name for name in what if name not in MEASUREMENTS]
    if unknown or not what:
        raise ValueError(f"cannot measure {', '.join(unknown) or 'nothing'}; there are {', '.join(MEASUREMENTS)}")
    if out is not None:
        open(out, "a").close()  # fail before the measurements if the file cannot be written
    target = machine.find_device(device)
    environment: dict[str, Any] = {
        "device": machine.hardware(str(target)) if target.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "hardware": machine.hardware(str(target)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        # The load average: if it exceeds the number of cores, the times are unreliable.
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    result = dict(environment)
    with tf32(False):
        for name in what:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            started = time.perf_counter()
            key = name.replace("-", "_")
            result[key] = MEASUREMENTS[name](target, peers)
            line = json.dumps({key: result[key]})
            print(f"{name} took {time.perf_counter() - started:.1f} s: {line}", file=sys.stderr, flush=True)
            if out is not None:
                with open(out, "a") as file:
                    file.write(json.dumps(environment | {key: result[key]}) + "\n")
    result["load_after"] = os.getloadavg()[0]
    rich.console.Console().print(_table(result))
    print(json.dumps(result))
    return result


def _table(result: dict[str, Any]) -> rich.table.Table:
    title = f"{result['device']}, torch {result['torch']}, Python {result['python']}, {result['date']}"
    table = rich.table.Table("measurement", "value", title=title)
    for name, measured in result.items():
        if isinstance(measured, dict):
            table.add_section()
            table.add_row(f"[bold]{name}[/bold]", "")
            for key, value in _flat(measured):
                if key not in _NOT_IN_TABLE:
                    table.add_row(f"  {key}", _shown(value))
    return table


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join(_shown(element) for element in value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
