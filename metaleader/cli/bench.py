"""`metaleader bench`: what an update costs on this machine, and how exact it is."""

from __future__ import annotations


def bench(what: str = "meta-step", device: str = "auto", peers: bool = False, out: str | None = None) -> int:
    """Measure the engine on random images of the paper's shapes: a table, then one line of JSON.

    Errors are relative to float64, of each task's gradient alone, the median over tasks; the largest can reach some
    per cent and more wherever an activation within rounding of zero gets another sign in float32.

    Args:
        what: separated by commas: meta-step (Rainbow's update, also against the one-task-at-a-time loop), seeds (three
            side by side), cifar, pose, plain (TOE and FTL), generic (Rainbow's update of a network that is no chain),
            tf32, memory, buffer, stream (long), start.
        device: cpu, cuda, or auto for the GPU where there is one.
        peers: time higher and torchopt on the work of meta-step too; pip install 'metaleader[bench]'.
        out: a file that gets each result as a line of JSON, as soon as it is there.
    """
    from metaleader.bench.report import named, run_bench

    run_bench(named(what), device, peers, out)
    return 0
