"""`metaleader bench`: the time and the rounding error of an update on this machine."""

from __future__ import annotations


def bench(what: str = "meta-step", device: str = "auto", peers: bool = False, out: str | None = None) -> None:
    """Measure the engine on random images of the paper's shapes; prints a table, then one line of JSON.

    Errors are those of the gradient of each task relative to float64, median over tasks. The largest error can reach
    several per cent where an activation close to zero has another sign in float32.

    Args:
        what: names separated by commas: meta-step (the update of Rainbow, also compared with a loop over tasks), seeds
            (three, batched), cifar, pose, plain (TOE and FTL), generic (the update of Rainbow for a network that is not
            a chain of convolutions), tf32, memory, buffer, stream (slow), start.
        device: cpu, cuda, or auto for the GPU if there is one.
        peers: also time higher and torchopt on the work of meta-step; needs metaleader[bench].
        out: a file to which each result is appended as a line of JSON.
    """
    from metaleader.bench.report import named, run_bench

    run_bench(named(what), device, peers, out)
