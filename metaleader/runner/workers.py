"""Where the cells of a grid run: in processes of this machine, or on Ray."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from metaleader.runner.cell import Cell, logged_cell
from metaleader.system.files import make_folder

# Seconds between two looks at the cells, and for a process to end after it was asked to.
_PAUSE, _GRACE = 0.2, 30.0

# What happened to a cell: it began, again after its worker had died, it ended, or it failed with a message. None means
# that nothing did.
Event = tuple[Cell, str, str] | None


def play_local(cells: Sequence[Cell], jobs: int, retries: int) -> Generator[Event]:
    """Play cells in processes of this machine, `jobs` at a time; yields events, and None several times per second.

    A cell whose process was killed is continued, at most `retries` times.
    """
    waiting, attempts = deque(cells), Counter[str]()
    running: dict[Cell, subprocess.Popen] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.popleft()
                running[cell] = _start(cell)
                yield cell, "began" if attempts[cell.name] == 0 else "again", ""
            for cell, process in list(running.items()):
                if (status := process.poll()) is None:
                    continue
                del running[cell]
                _close(process)
                attempts[cell.name] += 1
                if status == 0:
                    yield cell, "ended", ""
                elif status < 0 and attempts[cell.name] <= retries:
                    waiting.appendleft(cell)
                elif status < 0:
                    name, count = signal.Signals(-status).name, attempts[cell.name]
                    yield cell, "failed", f"its process was killed by {name}{f' {count} times' * (count > 1)}"
                else:
                    yield cell, "failed", _last_line(cell)
            yield None
            time.sleep(_PAUSE)
    finally:
        for process in running.values():
            process.terminate()
        deadline = time.monotonic() + _GRACE
        for process in running.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close(process)


def _start(cell: Cell) -> subprocess.Popen:
    make_folder(cell.log.parent)
    command = [sys.executable, "-c", "from metaleader.runner.cell import main; main()", json.dumps(cell.plain())]
    with open(cell.log, "ab") as log:
        # In a session of its own: Ctrl-C reaches this process alone, which then ends the others.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)


def _close(process: subprocess.Popen) -> None:
    assert process.stdin is not None
    process.stdin.close()


def _last_line(cell: Cell) -> str:
    lines = cell.log.read_text(errors="replace").split("\n")
    return next((line.removeprefix("metaleader: ") for line in reversed(lines) if line.strip()), "no output")


def play_on_ray(cells: Sequence[Cell], gpus: float | None, retries: int) -> Generator[Event]:
    """Play cells as tasks of Ray, on the cluster of RAY_ADDRESS or else on this machine; yields as `play_local`.

    Args:
        cells: the cells; their folders must be on a file system that all nodes share.
        gpus: GPUs per cell; None asks for one if the device is cuda, or auto and the cluster has GPUs.
        retries: how often a cell is continued after its worker or its node has died.
    """
    ray = import_ray()
    started = not ray.is_initialized()
    if started:
        # Without an address, RAY_ADDRESS is used if it is set; else a cluster on this machine is started.
        given = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
        with _explained_start():
            ray.init(log_to_driver=False, logging_level="ERROR", **given)
    pending: dict[Any, Cell] = {}
    try:
        needs = [_resources(cell, gpus, ray.nodes()) for cell in cells]
        # One process per cell, because the number of threads and random generators belong to a process.
        task = ray.remote(max_calls=1)(logged_cell)
        for cell, resources in zip(cells, needs, strict=True):
            pending[task.options(max_retries=retries, **resources).remote(cell)] = cell
        begun: set[str] = set()
        while pending:
            done, _ = ray.wait(list(pending), timeout=_PAUSE)
            for cell in pending.values():
                if cell.name not in begun and cell.log.exists():
                    begun.add(cell.name)
                    yield cell, "began", ""
            for reference in done:
                cell = pending.pop(reference)
                try:
                    message = ray.get(reference)
                except ray.exceptions.RayError as error:
                    message = f"its worker died: {' '.join(str(error).split())}"
                yield cell, "ended" if message is None else "failed", message or ""
            yield None
    finally:
        for reference in pending:
            with contextlib.suppress(Exception):
                ray.cancel(reference)
        if pending:
            ray.wait(list(pending), num_returns=len(pending), timeout=_GRACE)
        if started:
            ray.shutdown()


def import_ray() -> Any:
    """The module ray, or an error that says how to install it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError("--on ray needs Ray; install metaleader[ray], or leave it out") from error


@contextlib.contextmanager
def _explained_start() -> Iterator[None]:
    try:
        yield
    except (ConnectionError, RuntimeError, ValueError) as error:
        address = os.environ.get("RAY_ADDRESS")
        where = f"the cluster {address} of RAY_ADDRESS" if address else "a Ray cluster on this machine"
        raise ConnectionError(f"cannot reach {where}: {' '.join(str(error).split())}") from error


def _resources(cell: Cell, gpus: float | None, nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The CPUs and GPUs of a cell; raises ValueError if no node has as many."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if gpus is None:
        device, most = cell.options.device, max(node.get("GPU", 0) for node in alive)
        gpus = 1 if device.startswith("cuda") or (device == "auto" and most >= 1) else 0
    if not any(node.get("CPU", 0) >= cell.threads and node.get("GPU", 0) >= gpus for node in alive):
        have = "; ".join(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in alive)
        raise ValueError(
            f"no node of the Ray cluster has {cell.threads} CPUs and {gpus:g} GPUs for {cell.name}: they have {have};"
            " change --set threads=1, --gpus or --device"
        )
    return {"num_cpus": cell.threads, "num_gpus": gpus}
