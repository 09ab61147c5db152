"""One cell of the table, in a process of its own: `python -m metaleader.bench.networks.cell SPECIFICATION`.

The process writes one line of JSON per event on stdout: `ready`, `first` (the first update is done), `error` (the
distance to the exact gradient), `times`, `memory`, or `failed` with the reason. Then it reads commands from stdin:
`times SECONDS`, and `end`.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from metaleader.bench.errors import distance
from metaleader.bench.networks.cases import CASES, Inputs, load_inputs, one_task
from metaleader.bench.networks.contenders import Contender, build, version
from metaleader.engine.determinism import tf32
from metaleader.system.machine import keep_memory

# An update shorter than this is timed ten at a time, as in one reveal of a stream.
_SHORT = 0.05


def main(specification: str) -> int:
    """Run a cell; the exit status is 1 if it failed."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log

    def send(event: str, **values: Any) -> None:
        print(json.dumps({"event": event, **values}), file=channel, flush=True)

    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        with tf32(False):
            _run(json.loads(specification), send)
    except ImportError as error:
        send("failed", reason=f"not installed ({error})")
        return 1
    except Exception as error:
        import traceback

        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        send("failed", reason=f"{type(error).__name__}: {(lines or ['no message'])[0][:200]}")
        return 1
    return 0


def _end_with_parent(parent: int) -> None:
    """A killed parent cannot end its cells, some of which compile for minutes."""
    while os.getppid() == parent:
        time.sleep(2)
    os._exit(1)


def _run(spec: dict[str, Any], send: Any) -> None:
    keep_memory()
    device = torch.device(spec["device"])
    case = CASES[spec["network"]].on(device)
    inputs = load_inputs(Path(spec["inputs"]))
    contender = build(spec["cell"], spec["network"], case, inputs, device)
    before = _resident("VmRSS")
    send("ready", seconds=time.time() - spec["started"], version=version(spec["cell"]))
    updates = contender.first_updates
    cpu_before = _session_cpu()
    first = _seconds(contender, updates)
    cpu = _session_cpu() - cpu_before
    cpu_before = time.process_time()
    since_start = time.time() - spec["started"]
    second = _seconds(contender, updates) / updates
    # The first call may take several updates; all but one took the time of a later update.
    extra = min((updates - 1) * second, first - second)
    cpu -= (updates - 1) * (time.process_time() - cpu_before) / updates
    values = {"seconds": first - extra, "cpu_seconds": cpu, "since_start": since_start - extra}
    send("first", **values, **contender.notes())
    if spec["phase"] == "cold":
        return
    _pin(spec["threads"] if device.type == "cpu" else None)
    measurable = _reset_peak()
    # Times come first: an update by other shapes, as in the error, would not be part of a user's loop.
    if second < _SHORT and updates < 10:
        updates = 10
        _seconds(contender, updates)
    _serve(contender, updates, send)
    memory = contender.device_memory()
    peak = _resident("VmHWM") - before if memory is None and measurable else memory
    send("memory", bytes=peak, **contender.notes())
    send("error", median=measure_error(contender, inputs, case.tasks), tasks=len(next(iter(inputs.exact.values()))))


def _serve(contender: Contender, updates: int, send: Any) -> None:
    for line in sys.stdin:
        command, _, seconds = line.strip().partition(" ")
        if command != "times":
            return
        samples: list[float] = []
        cpu_started = time.process_time()
        while sum(samples) < float(seconds):
            samples.append(_seconds(contender, updates))
        cpu_ms = 1000 * (time.process_time() - cpu_started) / (len(samples) * updates)
        gathered: list[float] = []
        update_gathered = getattr(contender, "update_gathered", None)
        while update_gathered is not None and sum(gathered) < float(seconds) / 2:
            gathered.append(_seconds(contender, updates, update_gathered))
        in_ms = lambda samples: [1000 * sample / updates for sample in samples]  # noqa: E731
        send("times", ms=in_ms(samples), cpu_ms=cpu_ms, gathered_ms=in_ms(gathered))


def _seconds(contender: Contender, updates: int, update: Callable[[int], None] | None = None) -> float:
    started = time.perf_counter()
    (update or contender.update)(updates)
    return time.perf_counter() - started


def measure_error(contender: Contender, inputs: Inputs, num_tasks: int) -> float:
    """The median distance of the gradient of one task to the exact one.

    A program for a fixed number of tasks gets the same task in every place; its mean gradient is that task's.
    """
    distances = []
    for i in range(len(next(iter(inputs.exact.values())))):
        batches = one_task((inputs.support, inputs.query), i, num_tasks if contender.fixed_tasks else 1)
        like = next(iter(getattr(contender, "initial", inputs.params).values()))
        device = like.device if isinstance(like, torch.Tensor) else "cpu"
        gradient = contender.gradient(*(type(b)(*(leaf.to(device) for leaf in b)) for b in batches))
        exact = {name: value[i] for name, value in inputs.exact.items()}
        distances.append(distance({name: value.detach().cpu() for name, value in gradient.items()}, exact))
    return statistics.median(distances)


def _pin(threads: int | None) -> None:
    """Confine all threads of this process to as many cores: libraries differ in how they count threads."""
    if threads is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), cores)


def _resident(field: str) -> int:
    """Resident memory of this process in bytes: VmRSS now, VmHWM its peak."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(field))


def _session_cpu() -> float:
    """Processor seconds of this process and the compilers that it started, also those that have ended."""
    session, ticks = os.getsid(0), 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _reset_peak() -> bool:
    """Set the peak to the memory of now; whether the system allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
