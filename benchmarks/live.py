"""Measures a session: `python benchmarks/live.py FOLDER [--customers 10000]`; prints the numbers of docs/live.md."""

from __future__ import annotations

import argparse
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import metaleader as ml

SHAPE, ROWS = 16, 5
BYTES = ROWS * (SHAPE + 1) * 4


def build() -> ml.FTML:
    """An MLP with two hidden layers of 64."""
    return ml.FTML(
        lambda: ml.models.mlp(SHAPE, 1, (64, 64)), ml.losses.squared_error, inner_lr=0.01, inner_steps=5, meta_steps=10
    )


def in_threads(count: int, seconds: float, call: Callable[[int, int], object]) -> np.ndarray:
    """Call from several threads for some seconds; returns the duration of each call."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    def work(thread: int) -> None:
        i = 0
        while (start := time.perf_counter()) < end:
            call(thread, i)
            times.append(time.perf_counter() - start)
            i += 1

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.array(times)


def report(name: str, times: np.ndarray, seconds: float, each: int = 1) -> None:
    """Print a rate and percentiles."""
    p50, p99 = (1e3 * np.percentile(times, q) for q in (50, 99))
    print(f"{name}: {each * len(times) / seconds:.0f} per second, p50 {p50:.1f} ms, p99 {p99:.1f} ms", flush=True)


def bytes_per_call(folder: Path) -> None:
    """Print the bytes on disk of calls of several sizes."""
    for rows in (ROWS, 16, 64, 1000):
        place, calls = folder / f"{rows} rows", 500
        ml.Session(place, build, updates="thread").close()
        before = (place / "journal.sqlite").stat().st_size
        with ml.Session(place, build, updates="thread") as session:
            for i in range(calls):
                x, y = torch.randn(rows, SHAPE), torch.randn(rows, 1)
                session.observe(x, y, task=f"customer {i}", key=f"event {i}", update=False)
        used = ((place / "journal.sqlite").stat().st_size - before) / calls
        data = rows * (SHAPE + 1) * 4
        print(f"bytes per call of {data} bytes of data: {used:.0f}, {used / data:.2f} times the data", flush=True)


def main() -> None:
    """Measure observations, predictions, recovery and bytes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--customers", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--updates", choices=["background", "process", "thread"], default="process")
    parser.add_argument("--bytes", action="store_true", help="only measure the bytes on disk")
    parser.add_argument("--recovery", action="store_true", help="only measure observations and recovery")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y, seconds = torch.randn(ROWS, SHAPE), torch.randn(ROWS, 1), options.seconds
    name = [f"customer {i}" for i in range(options.customers)]

    if options.bytes:
        bytes_per_call(options.folder)
        return
    with ml.Session(options.folder, build, updates="thread") as session:
        session.observe(x, y, task=name[0], update=False)  # loads modules
    before = (options.folder / "journal.sqlite").stat().st_size
    session = ml.Session(options.folder, build, updates="thread")
    counter, start = iter(range(10**9)), time.perf_counter()

    def load(thread: int) -> None:
        while (i := next(counter)) < options.customers:
            session.observe(x + 1e-4 * i, y, task=name[i], key=f"event {i}", update=False)

    threads = [threading.Thread(target=load, args=(thread,)) for thread in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - start
    print(
        f"observations of {options.customers} customers, 64 threads, no updates: {options.customers / taken:.0f} per s"
    )
    session.close()
    added = (options.folder / "journal.sqlite").stat().st_size - before
    print(f"bytes per call: {added / options.customers:.0f}, of which data {BYTES}", flush=True)

    for checkpoint in options.folder.glob("checkpoint-*"):
        checkpoint.unlink()
    start, processor = time.perf_counter(), time.process_time()
    ml.Session(options.folder, build, updates="thread").close()
    taken, processor = time.perf_counter() - start, time.process_time() - processor
    print(
        f"recovery of {options.customers} observations without a checkpoint: {taken:.2f} s"
        f" ({processor:.2f} s of processor time)",
        flush=True,
    )
    if options.recovery:
        return
    session = ml.Session(options.folder, build, updates=options.updates)

    def keep_updating(thread: int, i: int) -> None:
        session.observe(x, y, task=name[i % len(name)])
        time.sleep(0.02)

    def measure(title: str, count: int, call: Callable[[int, int], object], each: int = 1) -> None:
        step = session.learner.step
        busy = threading.Thread(target=lambda: in_threads(1, seconds, keep_updating))
        busy.start()
        report(title, in_threads(count, seconds, call), seconds, each)
        busy.join()
        print(f"  updates meanwhile: {(session.learner.step - step) / seconds:.0f} per second", flush=True)

    session.predict(x, name[0])
    for _ in range(3):  # the first updates load modules
        keep_updating(0, 0)
        session.wait()
    report("predict, idle", in_threads(1, seconds, lambda t, i: session.predict(x[:1], name[i])), seconds)
    measure("predict, 1 thread, updates running", 1, lambda t, i: session.predict(x[:1], name[i]))
    for count in (8, 32):
        measure(
            f"predict, {count} threads, updates running",
            count,
            lambda t, i, count=count: session.predict(x[:1], name[(count * i + t) % len(name)]),
        )
    for size in (16, 64, 256):
        many = [{name[(j + i * size) % len(name)]: x[:1] for j in range(size)} for i in range(20)]
        session.predict_many(many[0])
        measure(
            f"predict_many of {size}, updates running",
            1,
            lambda t, i, many=many: session.predict_many(many[i % 20]),
            size,
        )
    for count in (1, 16, 64):
        measure(
            f"observe, {count} threads, updates running",
            count,
            lambda t, i: session.observe(x, y, task=name[i % len(name)]),
        )
    print("status:", session.status())
    session.close()
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
