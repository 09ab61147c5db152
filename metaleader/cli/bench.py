"""`metaleader bench`: what an update costs on this machine, and how exact it is."""

from __future__ import annotations


def bench(what: str = "meta-step", device: str = "auto", peers: bool = False) -> int:
    """Measure the engine on random images of the paper's shapes: a table, then one line of JSON.

    Errors are relative to float64, the median over several draws; their maximum can reach some per cent wherever an
    activation within rounding of zero gets another sign in float32.

    Args:
        what: separated by commas: meta-step (Rainbow's update, also against the one-task-at-a-time loop), seeds (three
            side by side), cifar, pose, plain (TOE and FTL), tf32, memory, buffer, stream (long), start.
        device: cpu, cuda, or auto for the GPU where there is one.
        peers: time higher and torchopt on the work of meta-step too; pip install 'metaleader[bench]'.
    """
    from metaleader.bench import run_bench

    run_bench([name.strip() for name in what.split(",") if name.strip()], device, peers)
    return 0
