"""Measures a session with limits of memory over many observations: `python benchmarks/months.py FOLDER`.

Customers are drawn at random, more of them than are kept. After every 10,000 observations a row is added to
FOLDER/months.csv: latencies, memory, bytes on disk, and processor time. Stopped at any moment, it continues when it is
started again. `--limits none` keeps everything, for comparison. When all observations are made, the files are
compacted, with the time to open them before and after. `--figure FILE` draws the table.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import metaleader as ml

SHAPE, ROWS, CHUNK, PREDICT = 16, 5, 10_000, 20
CUSTOMERS = 20_000
LIMITS: dict[str, dict[str, Any]] = {
    "newest": {"max_tasks": 10_000, "max_datapoints": 20},
    "reservoir": {"max_tasks": 10_000, "max_datapoints": 20, "reservoir": True},
    "bytes": {"max_bytes": 10_000 * 20 * 4 * (SHAPE + 1), "max_datapoints": 20},
    "none": {},
}


def build(limits: str) -> ml.FTML:
    """An MLP with two hidden layers of 64."""
    model = ml.models.mlp(SHAPE, 1, (64, 64))
    torch.manual_seed(0)
    return ml.FTML(model, ml.losses.squared_error, inner_lr=0.01, inner_steps=5, meta_steps=10, **LIMITS[limits])


def of_process(name: str, pid: int | None = None) -> int:
    """A field of /proc/PID/status in kB; 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def processor_time(pid: int) -> float:
    """Seconds of processor time of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def chunk_of(session: ml.Session, first: int, num: int) -> dict[str, Any]:
    """Make observations `first` .. `first + num - 1`, and predictions in between; returns a row of numbers."""
    draw = np.random.default_rng(first)
    customers = draw.integers(CUSTOMERS, size=num).tolist()
    x, y = torch.from_numpy(draw.normal(size=(num, ROWS, SHAPE)).astype(np.float32)), torch.zeros(num, ROWS, 1)
    observed, predicted, start = [], [], time.perf_counter()
    for i, customer in enumerate(customers):
        name = f"customer {customer}"
        before = time.perf_counter()
        session.observe(x[i], x[i, :, :1] + y[i] + customer % 7, task=name, key=f"event {first + i}")
        after = time.perf_counter()
        observed.append(after - before)
        if i % PREDICT == 0:
            session.predict(x[i], task=name)
            predicted.append(time.perf_counter() - after)
    status, files = session.status(), session.folder
    updates = status.get("update_process")
    milliseconds = {
        f"{name} {label} ms": round(1e3 * float(np.percentile(times, q)), 3)
        for name, times in (("observe", observed), ("predict", predicted))
        for label, q in (("p50", 50), ("p99", 99), ("max", 100))
    }
    return {
        "observations": first + num,
        "seconds": round(time.perf_counter() - start, 2),
        **milliseconds,
        "RSS MB": round(of_process("VmRSS") / 1024, 1),
        "RSS of updates MB": round(of_process("VmRSS", updates) / 1024, 1) if updates else 0,
        "data MB": round(status["memory_bytes"] / 2**20, 2),
        "tasks": status["tasks"],
        "step": status["step"],
        "journal MB": round((files / "journal.sqlite").stat().st_size / 2**20, 1),
        "processor s": round(processor_time(os.getpid()), 1),
        "processor of updates s": round(processor_time(updates), 1) if updates else 0,
    }


def compact(folder: Path, limits: str) -> dict[str, Any]:
    """Compact the files of a session; seconds, and the bytes and the seconds to open before and after."""
    found: dict[str, Any] = {}
    for moment in ("before", "after"):
        start = time.perf_counter()
        with ml.Session(folder, functools.partial(build, limits)) as session:
            found[f"opened {moment} s"] = round(time.perf_counter() - start, 2)
            found[f"MB {moment}"] = round(session.status()["bytes"] / 2**20, 1)
            start = time.perf_counter()
            if moment == "before":
                session.compact()
                found["compacted s"] = round(time.perf_counter() - start, 2)
    return found


def draw(table: Path, file: Path) -> None:
    """Draw latencies and memory over the observations."""
    from matplotlib.figure import Figure

    rows = list(csv.DictReader(table.open()))
    observations = np.array([int(row["observations"]) for row in rows])
    figure = Figure(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, style in (("observe p50 ms", "-"), ("observe p99 ms", ":"), ("predict p50 ms", "--")):
        left.plot(observations, [float(row[name]) for row in rows], style, color="black", lw=1, label=name[:-3])
    left.set(xlabel="observations", ylabel="milliseconds", yscale="log")
    left.set_ylim(0.2, 500)
    left.legend(fontsize=8, loc="upper center", ncols=3, columnspacing=1, handlelength=1.5)
    for name, style in (("RSS MB", "-"), ("journal MB", ":"), ("data MB", "--")):
        label = {"RSS MB": "resident memory", "journal MB": "journal on disk", "data MB": "datapoints kept"}[name]
        right.plot(observations, [float(row[name]) for row in rows], style, color="black", lw=1, label=label)
    right.set(xlabel="observations", ylabel="MB", ylim=(0, None))
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.0f}k" if value else "0")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def main() -> None:
    """Observe up to the number asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--observations", type=int, default=1_000_000)
    parser.add_argument("--limits", choices=list(LIMITS), default="newest")
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    table = options.folder / "months.csv"
    if options.figure is not None:
        draw(table, options.figure)
        return
    rows = list(csv.DictReader(table.open())) if table.exists() else []
    first = int(rows[-1]["observations"]) if rows else 0
    start = time.perf_counter()
    session = ml.Session(options.folder / "session", functools.partial(build, options.limits), share=options.share)
    print(f"opened after {first} observations: {time.perf_counter() - start:.1f} s", flush=True)
    with session, table.open("a", newline="") as file:
        for start_of_chunk in range(first, options.observations, CHUNK):
            row = chunk_of(session, start_of_chunk, CHUNK)
            writer = csv.DictWriter(file, list(row))
            if start_of_chunk == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            print(row, flush=True)
    print(compact(options.folder / "session", options.limits))


if __name__ == "__main__":
    main()
