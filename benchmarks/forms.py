"""Compare the forms of an update of a small network: `python benchmarks/forms.py --network mlp --out DIR`.

Forms: `graphed` and `captured` as the engine runs them, several updates per CUDA graph; `-single` with one update per
graph; `captured-whole` with the gradient compiled as one program, also on a GPU; rows of JAX such as `jax-loop`. Each
form is a process of its own; all start together, and take turns when they are timed. A line of JSON per form.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from metaleader.bench.networks.cases import CASES, make_inputs
from metaleader.bench.networks.contenders import Contender, build
from metaleader.engine import whole
from metaleader.engine.determinism import tf32
from metaleader.engine.engine import Engine

FORMS = ("graphed", "graphed-single", "captured", "captured-single", "captured-whole", "jax-loop", "jax-scan")
UPDATES, ROUNDS = 10, 30


def measure(network: str, form: str, device: torch.device, folder: Path) -> dict[str, Any]:
    """The first update in seconds, then the median time of an update in ms, and the number of its kernels."""
    if form.endswith("-whole"):
        whole.DEVICES = ("cpu", "cuda")
    if form.endswith("-single"):
        Engine.runs_updates_together = lambda self, objective: False
    case = CASES[network].on(device)
    cell = form if form.startswith("jax") else f"ours-{form.partition('-')[0]}"
    contender = build(cell, network, case, make_inputs(case, device, 1), device)
    start = time.perf_counter()
    contender.update(UPDATES)
    first = time.perf_counter() - start
    with (folder / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            contender.update(UPDATES)
            times.append((time.perf_counter() - start) / UPDATES * 1000)
        kernels = None if form.startswith("jax") or device.type == "cpu" else count_kernels(contender)
    low, middle, high = statistics.quantiles(times)
    return {
        "form": form,
        "first_s": first,
        "update_ms": middle,
        "quartiles_ms": [low, high],
        "kernels": kernels,
        "notes": contender.notes(),
    }


def count_kernels(contender: Contender) -> dict[str, Any]:
    """The number of kernels per update and their total time, in ms."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        contender.update(UPDATES)
    events = [event for event in profile.events() or [] if str(event.device_type).endswith("CUDA")]
    total = sum(event.device_time_total for event in events)
    return {"number": len(events) / UPDATES, "ms": total / UPDATES / 1000}


def main() -> None:
    """Start a process per form and print their lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="mlp", choices=CASES)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=120, help="seconds until a form is ended")
    parser.add_argument("--one", action="store_true", help="measure one form in this process")
    args = parser.parse_args()
    if args.one:
        with tf32(False):
            found = measure(args.network, args.forms, torch.device(args.device), args.out)
        print(json.dumps(found), flush=True)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    given = ["--network", args.network, "--device", args.device, "--out", str(args.out), "--one"]
    processes = {
        form: subprocess.Popen(
            [sys.executable, __file__, *given, "--forms", form],
            stdout=(args.out / f"{args.network}-{form}.json").open("w"),
            stderr=(args.out / f"{args.network}-{form}.log").open("w"),
        )
        for form in args.forms.split(",")
    }
    end = time.monotonic() + args.limit
    for form, process in processes.items():
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
        lines = (args.out / f"{args.network}-{form}.json").read_text().splitlines()
        print(lines[-1] if lines else json.dumps({"form": form, "failed": process.poll()}), flush=True)


if __name__ == "__main__":
    main()
