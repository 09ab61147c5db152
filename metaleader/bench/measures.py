"""Measurements other than an update: TF32, memory, the buffer, a whole stream, the start of a process."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from metaleader import losses, models
from metaleader.bench.errors import gradient, measure_errors
from metaleader.bench.timing import median_ms
from metaleader.bench.update import fast_mode, program
from metaleader.bench.work import INNER_LR, RAINBOW, Work
from metaleader.engine.determinism import tf32
from metaleader.engine.engine import Engine, Mode
from metaleader.engine.objective import Objective
from metaleader.evaluate import play
from metaleader.gradient.meta import Inner
from metaleader.learners import FTML, update_together
from metaleader.memory.by_task import TaskBuffer
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, Task, rng


def measure_tf32(work: Work, device: torch.device, draws: int = 5) -> dict[str, Any]:
    """The error of the eager gradient with TF32 on; TF32 is off by default."""
    if device.type != "cuda":
        return {"skipped": "TF32 needs a CUDA device"}
    objective = _objective(work, device)
    with tf32(True):
        errors = measure_errors(work, Engine("eager", device=device), objective, device, draws)
    return {"program": program(objective.network, "eager"), **errors}


def measure_memory(work: Work, device: torch.device, few: int = 2, many: int = 20) -> dict[str, Any]:
    """Peak GPU memory of a gradient with many inner steps and with few, including the memory held before it."""
    if device.type != "cuda":
        return {"skipped": "only the CUDA allocator reports its peak memory"}
    result: dict[str, Any] = {"inner_steps": [few, many]}
    modes: tuple[Mode, ...] = ("eager", "compiled")
    for mode in modes:
        peaks = [_peak(replace(work, inner_steps=steps), device, mode) for steps in (few, many)]
        result[mode] = {"peak_mib": [peak / 2**20 for peak in peaks], "ratio": peaks[1] / peaks[0]}
    return result


def _peak(work: Work, device: torch.device, mode: Mode) -> int:
    engine = Engine(mode, device=device)
    run = functools.partial(gradient, engine, _objective(work, device), *work.inputs(device))
    run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _objective(work: Work, device: torch.device) -> Objective:
    return Objective(Network(work.model(), work.loss, device=device), Inner(INNER_LR, work.inner_steps))


def measure_buffer(
    device: torch.device, few: int = 10, many: int = 10_000, datapoints: int = 1000, rounds: int = 15
) -> dict[str, Any]:
    """The time of a draw, ten gathered at once, and of an update, with few and with many small tasks in memory."""
    functions: dict[str, Callable[[], Any]] = {}
    bytes_held: list[float] = []
    numbers = rng("bench", 0).random((2, datapoints, 1), dtype="float32")
    batch = Batch(*torch.from_numpy(numbers))
    for name, num_tasks in (("few", few), ("many", many)):
        learner = FTML(functools.partial(models.mlp, 1, 1), losses.squared_error, device=device, inner_lr=0.01)
        buffer = TaskBuffer(device)
        for t in range(num_tasks):
            learner.begin(f"task {t}")
            learner.observe(*batch, update=False)
            buffer.begin(f"task {t}")
            buffer.append(batch)
        assert buffer.store.data is not None
        held = sum(leaf.nbytes for leaf in buffer.store.data)
        bytes_held.append(held / (num_tasks * sum(leaf.nbytes for leaf in batch)))
        functions[f"draw_{name}_ms"] = functools.partial(_draw_and_gather, buffer)
        functions[f"update_{name}_ms"] = functools.partial(learner.update, 10)
    times = {key: value / 10 for key, value in median_ms(functions, device, rounds).items()}
    ratios = {f"{kind}_ratio": times[f"{kind}_many_ms"] / times[f"{kind}_few_ms"] for kind in ("draw", "update")}
    return {"tasks": [few, many], "datapoints": datapoints, **times, **ratios, "bytes_of_data": max(bytes_held)}


def _draw_and_gather(buffer: TaskBuffer) -> None:
    draw = buffer.draw(0, range(10), 25, 10, 10)
    assert draw is not None
    buffer.gather(draw)


def measure_stream(
    work: Work, device: torch.device, tasks: int = 56, datapoints: int = 900, reveal: int = 20, meta_steps: int = 10
) -> dict[str, Any]:
    """The time of a whole stream with FTML, measured at every reveal.

    The stream has one additional first task, during which all programs are compiled.

    Returns:
        The one-time costs: the seconds of the first reveal, and of the first task, which include that reveal and the
        measuring programs for every size of D_t. For the later tasks: the seconds in total, in updates and in
        measuring, and the fraction spent in measuring.
    """
    clock = time.perf_counter
    engine = Engine(fast_mode(device), device=device)
    learner = work.learner(engine, device, meta_steps=meta_steps)
    observe = learner.observe
    began: list[float] = []
    observed: list[float] = []
    measured: list[float] = []

    def timed(*args: Any, **options: Any) -> None:
        began.append(clock())
        observe(*args, **options)  # synchronises with the device
        observed.append(clock())

    learner.observe = timed
    data = lambda t: (work.datapoints(datapoints, 0, t), work.datapoints(500, 1, t))  # noqa: E731
    stream = [Task(f"task {t}", *data(t)) for t in range(tasks + 1)]
    started = clock()
    for _ in play(learner, stream, reveal):
        measured.append(clock())  # measuring ends with a transfer, which synchronises with the device
    once = len(measured) // len(stream)
    total = measured[-1] - measured[once - 1]
    updating = sum(end - start for start, end in zip(began[once:], observed[once:], strict=True))
    measuring = sum(end - start for start, end in zip(observed[once:], measured[once:], strict=True))
    return {
        "tasks": tasks,
        "reveals": len(measured) - once,
        "meta_steps": meta_steps,
        "program": program(Network(work.model(), work.loss), engine.mode),
        "first_reveal_s": observed[0] - began[0],
        "first_task_s": measured[once - 1] - started,
        "total_s": total,
        "updating_s": updating,
        "measuring_s": measuring,
        "measuring_part": measuring / total,
    }


def measure_start(device: torch.device) -> dict[str, Any]:
    """Seconds from the start of a process to its first update, with empty compile caches and with warm ones."""
    code = f"from metaleader.bench.measures import first_update; first_update({str(device)!r})"
    root = str(Path(__file__).parents[2])
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        folders = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        path = {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        for name in ("cold", "warm"):
            started = time.time()
            done = subprocess.run(
                [sys.executable, "-c", code], env=os.environ | folders | path, capture_output=True, text=True
            )
            if done.returncode:
                return {"skipped": f"the process failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"}
            ran, _, finished = done.stdout.strip().rpartition(" ")
            result |= {f"{name}_s": float(finished) - started, "program": ran}
    return result


def first_update(device: str) -> None:
    """Make one update of Rainbow's shape in the fastest mode; then print the program and the time of day."""
    target = torch.device(device)
    engine = Engine(fast_mode(target), device=target)
    update_together(RAINBOW.learners(engine, target), 1)
    print(program(Network(RAINBOW.model(), RAINBOW.loss), engine.mode), time.time())
