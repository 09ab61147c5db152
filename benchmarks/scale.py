"""Measures shards and processes, for docs/scale.md: `python benchmarks/scale.py cost|processes|many|model`.

cost: an update of 100 tasks in 4 shards on one process, against undivided updates, in turns.
processes: on 1, 2 and 4 processes connected by gloo, the time of an update, and of sums of several sizes.
many: memory and time of one of 1,024 processes, whose messages go nowhere (the backend "fake").
model: the predicted time of an update of Rainbow on 1 to 1,024 GPUs, by the constants below.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing

import metaleader as ml
from metaleader.bench.timing import median_ms
from metaleader.bench.work import RAINBOW
from metaleader.distributed.group import current_group
from metaleader.distributed.reduction import sum_over_shards
from metaleader.system.machine import peak_mb

UPDATES = 10
# Rainbow on an H200: ms of an update, and of each of its tasks (benchmarks/README.md: 25 tasks 2.11, 75 tasks 4.21).
FIXED_MS, TASK_MS = 1.06, 0.042
PARAMETERS = 38_378
# Assumed, not measured: ms of a collective operation, ms of each message in it, and bytes per ms, within a machine of 8
# GPUs and between machines.
COLLECTIVE_MS, MESSAGE_MS, WITHIN, BETWEEN = 0.03, 0.001, 300e6, 50e6


def rainbow(shards: int, tasks_per_step: int, device: str, tasks: int, engine: Any) -> ml.FTML:
    """A learner of Rainbow's shape with some tasks of 20 images."""
    work = RAINBOW
    learner = ml.FTML(
        work.model, work.loss, inner_lr=0.1, inner_steps=5, support=10, query=10, meta_steps=UPDATES, device=device,
        engine=engine, tasks_per_step=tasks_per_step, shards=shards,
    )  # fmt: skip
    for t in range(tasks):
        learner.observe(*work.datapoints(20, t), task=str(t), update=False)
    return learner


def cost(device: str) -> dict[str, Any]:
    """Milliseconds per update of 100 tasks, by number of shards."""
    engine: Any = "captured" if device.startswith("cuda") else "eager"
    learners = {shards: rainbow(shards, 100, device, 200, engine) for shards in (1, 4)}
    times = median_ms({str(n): learner.update for n, learner in learners.items()}, torch.device(device))
    by_shards = {name: value / UPDATES for name, value in times.items()}
    modes = {str(n): learner.engine.mode for n, learner in learners.items()}
    return {"update_ms": by_shards, "ratio": by_shards["4"] / by_shards["1"], "engine": modes}


def in_processes(size: int, function: Callable[[], Any]) -> Any:
    """The result of a function on the first of several processes."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_child, (size, folder, function), size)  # pyright: ignore[reportPrivateImportUsage]
        with open(f"{folder}/result") as file:
            return json.load(file)


def _child(rank: int, size: int, folder: str, function: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    result = function()
    if rank == 0:
        with open(f"{folder}/result", "w") as file:
            json.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()


def shortest(function: Callable[[], Any], times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """The shortest of several calls, in seconds: other programs on the machine only lengthen them."""
    spent = []
    for _ in range(times):
        start = clock()
        function()
        spent.append(clock() - start)
    return min(spent)


def of_processes(tasks_per_step: int) -> dict[str, Any]:
    """Seconds of an update of 4 shards, of its computing on one process, and of sums of several sizes."""
    learner = rainbow(4, tasks_per_step, "cpu", 24, "eager")
    learner.update(1)
    found: dict[str, Any] = {"update_s": shortest(lambda: learner.update(1), 5)}
    found["computing_s"] = shortest(lambda: learner.update(1), 5, time.process_time)
    group = current_group()
    for kib in (4, 64, 512, 4096, 16384):
        parts = [torch.zeros(kib * 256) for _ in range(4 // group.size)]
        found[f"sum_{kib}_KiB_s"] = shortest(lambda: sum_over_shards(group, parts, "a sum"), 30)  # noqa: B023
    return found


def many(tasks: int, size: int) -> dict[str, Any]:
    """One of many processes: memory, the time to store a task, and that of an update without its messages."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    model = functools.partial(ml.models.mlp, 16, 1, (64, 64))
    settings: dict[str, Any] = {"tasks_per_step": 2 * size, "support": 10, "query": 10, "meta_steps": 1, "shards": size}
    learner = ml.FTML(model, ml.losses.squared_error, **settings)
    x, y = np.zeros((1000, 16), dtype=np.float32), np.zeros((1000, 1), dtype=np.float32)
    before, start = peak_mb("cpu"), time.perf_counter()
    for t in range(tasks):
        learner.observe(x, y, task=str(t), update=False)
    stored = time.perf_counter() - start
    learner.update(1)
    update = shortest(lambda: learner.update(1), 3)
    own = learner.memory.store.own  # pyright: ignore[reportAttributeAccessIssue]
    rows = own.length * (x.itemsize * 16 + y.itemsize)
    return {
        "tasks": tasks, "processes": size, "rows_mb": rows / 1e6, "memory_mb": peak_mb("cpu") - before,
        "store_task_us": 1e6 * stored / tasks, "update_ms": 1e3 * update,
    }  # fmt: skip


def predicted_ms(tasks: int, gpus: int) -> tuple[float, float]:
    """Milliseconds of computing and of communication of an update, with one shard per GPU."""
    size, speed = 4 * PARAMETERS, WITHIN if gpus <= 8 else BETWEEN
    if gpus == 1:
        return FIXED_MS + TASK_MS * tasks, 0.0
    if size * gpus < 2**20:
        return FIXED_MS + TASK_MS * tasks / gpus, COLLECTIVE_MS + (gpus - 1) * (MESSAGE_MS + size / speed)
    messages = 2 * (COLLECTIVE_MS + (gpus - 1) * MESSAGE_MS)
    return FIXED_MS + TASK_MS * tasks / gpus, messages + 2 * size / speed * (gpus - 1) / gpus


def main() -> None:
    """Run one of the measurements; prints one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("cost", "processes", "many", "model"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--tasks-per-step", type=int, default=24)
    given = parser.parse_args()
    print(json.dumps({"load": os.getloadavg()[0], "cores": os.cpu_count(), "torch": torch.__version__}))
    if given.what == "model":
        for tasks in (25, 100, 500, 2048, 8192):
            ways = [gpus for gpus in (1, 8, 64, 256, 1024) if gpus <= tasks]
            times = {gpus: tuple(round(ms, 2) for ms in predicted_ms(tasks, gpus)) for gpus in ways}
            print(json.dumps({"tasks_per_step": tasks, "computing_ms, communication_ms": times}))
    elif given.what == "cost":
        print(json.dumps(cost(given.device)))
    elif given.what == "many":
        torch.set_num_threads(1)
        print(json.dumps(many(given.tasks, 1024)))
    else:
        for size in (1, 2, 4):
            print(
                json.dumps(
                    {"processes": size} | in_processes(size, functools.partial(of_processes, given.tasks_per_step))
                )
            )


if __name__ == "__main__":
    main()
