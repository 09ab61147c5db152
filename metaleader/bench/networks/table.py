"""The table: compile in parallel, then time network by network, all implementations taking turns.

1. Every implementation that compiles makes its first update with empty caches, in a process that then ends.
2. For each network, all implementations start with the caches of the first step and make an update. Then only one of
   them runs at a time: in every round each is timed for a fraction of a second.

A process that exceeds the limit is killed, and its cell says so.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rich.console
import rich.markup
import rich.table
import torch

from metaleader.bench.networks.cases import CASES, Case, make_inputs, save_inputs
from metaleader.bench.networks.contenders import PEERS, modes
from metaleader.bench.networks.process import CellProcess, Setting

# (network, cell, result so far): called as soon as a result is known
Report = Callable[[str, str, dict[str, Any]], None]
_NO_COMPILER = ("ours-eager", "ours-graphed", "torch-func-eager", "torchopt", "higher")
# A cell with three samples that took longer takes part in no more rounds.
_ENOUGH_MS = 5000
_HAS_CONVOLUTION = ("digits", "conv", "resnet")


def choose_networks(names: str | None, device: torch.device) -> dict[str, Case]:
    """The cases with these names, separated by commas; None for all that suit the device."""
    if names is None:
        return {name: case for name, case in CASES.items() if device.type == "cuda" or not case.gpu_only}
    return {name: CASES[name] for name in _chosen("networks", names, list(CASES))}


def choose_cells(modes_chosen: str | None, peers: Sequence[str], device: torch.device) -> list[str]:
    """The implementations to compare.

    Args:
        modes_chosen: modes of the engine separated by commas; None for all of the device.
        peers: names of peers, or of one of their implementations.
        device: where the work runs.
    """
    if modes_chosen is None:
        names = [mode for mode in modes() if device.type == "cuda" or not _needs_cuda(mode)]
    else:
        names = _chosen("modes", modes_chosen, modes())
        if device.type != "cuda" and any(_needs_cuda(mode) for mode in names):
            raise ValueError(f"modes {modes_chosen!r} need a CUDA device; use eager,compiled")
    cells = [f"ours-{mode}" for mode in names]
    return cells + [cell for group, of_group in PEERS.items() for cell in of_group if {group, cell} & set(peers)]


def measure_networks(
    networks: dict[str, Case],
    cells: Sequence[str],
    device: torch.device,
    limit: float,
    jobs: int | None = None,
    rounds: int | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Measure the updates of networks by all implementations.

    Args:
        networks: by name, of `CASES`.
        cells: the implementations, of `choose_cells`.
        device: where the work runs.
        limit: seconds that a first update may take, and later each answer of a cell.
        jobs: processes that run at the same time while nothing is timed; None takes one on the CPU, and on a GPU all
            cores but two.
        rounds: rounds of timing; None takes five on the CPU and three on a GPU.
        report: called with each result as soon as it is known.

    Returns:
        By network its size and, under `cells`, by implementation: `update_ms` (median), `quartiles_ms`, `cpu_ms` (the
        processor time of the host, which other programs on the machine disturb less), `gathered_ms` (ours, with
        datapoints that were gathered before, as the others have them), `first_update_cold_s` and
        `_warm_s`, the processor time of the same (`first_update_cold_cpu_s`), the same from the start of the process
        (`from_start_*`), `peak_mib`,
        `error_vs_float64`, `ratio_to_jax` (to the fastest of JAX), or `failed` with the reason.
    """
    cores = torch.multiprocessing.cpu_count()
    rounds = rounds or (3 if device.type == "cuda" else 5)
    jobs = jobs or (max(1, cores - 2) if device.type == "cuda" else 1)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="metaleader-bench-") as folder:
        setting = Setting(str(device), torch.get_num_threads(), Path(folder), limit, jobs)
        for name, case in networks.items():
            result[name] = _prepare(name, case.on(device), cells, setting, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        started = time.perf_counter()
        compiled = [
            (setting, name, cell, values, report)
            for name in networks
            for cell, values in result[name]["cells"].items()
            if cell not in _NO_COMPILER
        ]
        _in_parallel(jobs, _compile, compiled)
        _say(f"compiled with empty caches in {time.perf_counter() - started:.0f} s")
        for name in networks:
            started = time.perf_counter()
            _time(setting, name, result[name]["cells"], rounds)
            _compare(result[name]["cells"])
            for cell, values in result[name]["cells"].items():
                if report:
                    report(name, cell, values)
            _say(f"timed {name} in {time.perf_counter() - started:.0f} s")
    return result


def _prepare(name: str, case: Case, cells: Sequence[str], setting: Setting, device: torch.device) -> dict[str, Any]:
    inputs = make_inputs(case, device)
    save_inputs(inputs, setting.folder / f"{name}.safetensors")
    return {
        "network": case.title,
        "parameters": sum(value.numel() for value in inputs.params.values()),
        "tasks": case.tasks,
        "support": case.support,
        "query": case.query,
        "inner_steps": case.inner_steps,
        "cells": {cell: {} for cell in cells if cell != "jax-grouped" or name in _HAS_CONVOLUTION},
    }


def _compile(setting: Setting, name: str, cell: str, values: dict[str, Any], report: Report | None) -> None:
    process = CellProcess(setting, name, cell, "cold")
    process.start()
    values |= process.result
    seconds = values.get("first_update_cold_s")
    _say(f"{name} {cell}: " + (values["failed"] if seconds is None else f"first update {seconds:.1f} s"))
    if report:
        report(name, cell, values)


def _time(setting: Setting, name: str, cells: dict[str, dict[str, Any]], rounds: int) -> None:
    """Start the cells that have not failed, and let them take turns."""
    processes: dict[str, CellProcess] = {}

    def start(cell: str) -> None:
        process = CellProcess(setting, name, cell, "warm")
        if process.start():
            processes[cell] = process
        cells[cell] |= process.result

    try:
        _in_parallel(setting.jobs, start, [(cell,) for cell, values in cells.items() if "failed" not in values])
        samples: dict[str, list[float]] = {cell: [] for cell in cells if cell in processes}
        cpu: dict[str, list[float]] = {cell: [] for cell in samples}
        gathered: dict[str, list[float]] = {cell: [] for cell in samples}
        for _ in range(rounds):
            for cell in list(samples):
                if len(samples[cell]) >= 3 and sum(samples[cell]) > _ENOUGH_MS:
                    continue
                times = processes[cell].times(0.2)
                if times is None:
                    cells[cell] |= processes.pop(cell).result
                    del samples[cell]
                else:
                    samples[cell] += times.ms
                    cpu[cell].append(times.cpu_ms)
                    gathered[cell] += times.gathered_ms
        for cell, values in samples.items():
            quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
            cells[cell] |= {"update_ms": quartiles[1], "quartiles_ms": [quartiles[0], quartiles[2]]}
            cells[cell]["cpu_ms"] = statistics.median(cpu[cell])
            if gathered[cell]:
                cells[cell]["gathered_ms"] = statistics.median(gathered[cell])
        _in_parallel(setting.jobs, lambda cell: processes[cell].finish(), [(cell,) for cell in samples])
        for cell in samples:
            cells[cell] |= processes[cell].result
    finally:
        for process in processes.values():
            process.close()


def _in_parallel(jobs: int, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Call a function with each of the arguments, in several threads; on an error all processes end."""
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in [pool.submit(function, *values) for values in arguments]:
            future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(CellProcess.alive):
            process.close()
        raise
    pool.shutdown()


def _compare(cells: dict[str, dict[str, Any]]) -> None:
    """Add each time relative to the fastest of JAX."""
    by_jax = [cells[cell]["update_ms"] for cell in PEERS["jax"] if "update_ms" in cells.get(cell, {})]
    for values in cells.values():
        if by_jax and "update_ms" in values:
            values["ratio_to_jax"] = values["update_ms"] / min(by_jax)


def print_table(result: dict[str, Any], title: str) -> None:
    """Print the results of `measure_networks`."""
    columns = [
        "",
        "ms per update",
        "gathered",
        "to JAX",
        "CPU ms",
        "first update (s): cold",
        "warm",
        "peak MiB",
        "error",
        "",
    ]
    table = rich.table.Table(*columns, title=title)
    for entry in result.values():
        table.add_section()
        size = f"{entry['parameters']:,} parameters, {entry['tasks']} tasks"
        table.add_row(f"[bold]{entry['network']}[/bold]", *[""] * 8, size)
        for cell, values in entry["cells"].items():
            notes = [values["failed"]] if "failed" in values else []
            notes += [f"{values['graph_breaks']} graph breaks"] if "graph_breaks" in values else []
            notes += ["fell back to " + values["ran"]] if values.get("fell_back") else []
            table.add_row(
                f"  {cell}",
                _number(values.get("update_ms")),
                _number(values.get("gathered_ms")),
                _number(values.get("ratio_to_jax"), 2),
                _number(values.get("cpu_ms")),
                _number(values.get("first_update_cold_s"), 2),
                _number(values.get("first_update_warm_s"), 2),
                _number(values.get("peak_mib")),
                f"{values['error_vs_float64']:.0e}" if "error_vs_float64" in values else "",
                rich.markup.escape("; ".join(notes)),
            )
    console = rich.console.Console()
    rich.console.Console(width=max(console.width, 140)).print(table)


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.{digits}g}".rstrip(".")


def _needs_cuda(mode: str) -> bool:
    from metaleader.engine.engine import Engine

    try:
        Engine(mode, device="cpu")  # pyright: ignore[reportArgumentType]
    except ValueError:
        return True
    return False


def _chosen(kind: str, names: str, known: list[str]) -> list[str]:
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise ValueError(f"unknown {kind} {', '.join(unknown) or repr(names)}; there are {', '.join(known)}")
    return chosen


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
