"""Measures `metaleader serve`: `python benchmarks/serve.py FOLDER [--customers 10000] [--seconds 10]`.

A server of its own on 127.0.0.1 is loaded by this process with a stated number of connections and, at a fixed rate or
as fast as it answers, for a stated time. Prints the numbers of docs/howto/serve.md.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import metaleader as ml

SHAPE, ROWS = 16, 5
MOST_CONNECTIONS, MOST_SECONDS = 64, 60.0


def learner() -> ml.FTML:
    """An MLP with two hidden layers of 64, as in benchmarks/live.py."""
    return ml.FTML(
        lambda: ml.models.mlp(SHAPE, 1, (64, 64)), ml.losses.squared_error, inner_lr=0.01, inner_steps=5, meta_steps=10
    )


def request(path: str, *tensors: tuple[str, np.ndarray]) -> bytes:
    """A POST request with tensors as JSON."""
    inputs = [
        {"name": name, "shape": list(value.shape), "datatype": "FP32", "data": value.reshape(-1).tolist()}
        for name, value in tensors
    ]
    body = json.dumps({"inputs": inputs}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


class Connection:
    """A connection that is kept open."""

    def __init__(self, port: int) -> None:
        self._port, self._streams = port, None

    async def call(self, content: bytes) -> None:
        """Send a request and read its response, which must have status 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(content)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head!r} {body!r}")


async def closed(port: int, connections: int, seconds: float, make: Callable[[int], bytes]) -> np.ndarray:
    """Each connection sends the next request when it has its answer; returns the times of the requests."""
    times: list[float] = []
    end, counter = time.perf_counter() + seconds, iter(range(10**9))

    async def work() -> None:
        connection = Connection(port)
        while time.perf_counter() < end:
            content = make(next(counter))
            start = time.perf_counter()
            await connection.call(content)
            times.append(time.perf_counter() - start)

    await asyncio.gather(*(work() for _ in range(connections)))
    return np.array(times)


async def at_rate(port: int, rate: float, seconds: float, make: Callable[[int], bytes]) -> np.ndarray:
    """Requests at a fixed rate, whatever the answers; times count from the moment at which each was due."""
    times: list[float] = []
    free = [Connection(port) for _ in range(MOST_CONNECTIONS)]
    waiting = asyncio.Semaphore(MOST_CONNECTIONS)
    start = time.perf_counter()

    async def one(i: int) -> None:
        due = start + i / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        async with waiting:
            connection = free.pop()
            await connection.call(make(i))
            free.append(connection)
        times.append(time.perf_counter() - due)

    await asyncio.gather(*(one(i) for i in range(int(rate * seconds))))
    return np.array(times)


class Meter:
    """Prints rates, percentiles, and the processor time that the server took meanwhile.

    Args:
        process: the number of the server process.
    """

    def __init__(self, process: int) -> None:
        self._path = Path(f"/proc/{process}/stat")
        self.start()

    def start(self) -> None:
        """Begin a measurement."""
        self._wall, self._processor = time.perf_counter(), self._seconds()

    def report(self, **found: np.ndarray) -> None:
        """Print the times of requests since `start`, by name."""
        wall, processor = time.perf_counter() - self._wall, self._seconds() - self._processor
        for name, times in found.items():
            p50, p99 = (1e3 * np.percentile(times, q) for q in (50, 99))
            print(f"  {name}: {len(times) / wall:.0f} per second, p50 {p50:.1f} ms, p99 {p99:.1f} ms")
        total = sum(len(times) for times in found.values())
        print(
            f"  processor time: {1e3 * processor / total:.2f} ms per request, {processor / wall:.2f} cores", flush=True
        )
        self.start()

    def _seconds(self) -> float:
        fields = self._path.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, process: int, customers: int, seconds: float) -> None:
    """All measurements."""
    meter = Meter(process)
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((ROWS, SHAPE)).astype("f"), draw.standard_normal((ROWS, 1)).astype("f")
    stride = 7919

    def infer(i: int) -> bytes:
        return request(f"/v2/models/customer-{i * stride % customers}/infer", ("x", x[:1]))

    def observe(i: int) -> bytes:
        return request(f"/tasks/customer-{i * stride % customers}/observe", ("x", x), ("y", y))

    await closed(port, 4, 3.0, infer)
    await closed(port, 1, 1.0, observe)
    await asyncio.sleep(1)
    for count in (1, 16):
        print(f"{count} connections, no updates")
        meter.start()
        meter.report(predictions=await closed(port, count, seconds, infer))
    print("16 connections, updates running")
    meter.start()
    meter.report(observations=await closed(port, 16, seconds, observe))
    for rate in (50, 100, 200, 300):
        print(f"{rate} predictions and {rate} observations per second, updates running")
        meter.start()
        calls = at_rate(port, rate, seconds, infer), at_rate(port, rate, seconds, observe)
        predictions, observations = await asyncio.gather(*calls)
        meter.report(predictions=predictions, observations=observations)


def main() -> None:
    """Fill a folder, start a server on it, and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--customers", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--options", default="", help="of metaleader serve")
    options = parser.parse_args()
    seconds = min(options.seconds, MOST_SECONDS)
    torch.set_num_threads(1)
    with ml.Session(options.folder, learner) as session:
        x, y = torch.randn(ROWS, SHAPE), torch.randn(ROWS, 1)
        with_data = session.learner.tasks
        for i in range(options.customers):
            if f"customer-{i}" not in with_data:
                session.observe(x, y, task=f"customer-{i}", update=False)
    print(f"load of the machine before: {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", flush=True)
    command = [
        sys.executable,
        "-m",
        "metaleader",
        "serve",
        str(options.folder),
        "--experiment",
        __file__,
        "--port",
        "0",
    ]
    server = subprocess.Popen([*command, *options.options.split()], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().rpartition(":")[2])
        gc.collect()
        gc.freeze()  # a full collection of this process would count as time of the server
        asyncio.run(measure(port, server.pid, options.customers, seconds))
    finally:
        server.send_signal(signal.SIGTERM)
        print(f"exit status of the server: {server.wait(60)}", flush=True)


if __name__ == "__main__":
    main()
