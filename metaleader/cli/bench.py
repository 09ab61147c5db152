"""`metaleader bench`: the time and the rounding error of an update on this machine."""

from __future__ import annotations


def bench(
    what: str = "meta-step",
    device: str = "auto",
    peers: tuple[str, ...] | None = None,
    out: str | None = None,
    networks: str | None = None,
    modes: str | None = None,
    limit: float = 600.0,
    jobs: int | None = None,
) -> None:
    """Measure the engine on random images of the paper's shapes; prints a table, then one line of JSON.

    Errors are those of the gradient of each task relative to float64, median over tasks. The largest error can reach
    several per cent where an activation close to zero has another sign in float32.

    Args:
        what: names separated by commas: meta-step (the update of Rainbow, also compared with a loop over tasks),
            networks (an MLP, conv nets, transformers, a ResNet, a GRU: each implementation in a process of its own),
            seeds (three, batched), cifar, pose, plain (TOE and FTL), generic (the update of Rainbow for a network that
            is not a chain of convolutions), tf32, memory, buffer, stream (slow), start.
        device: cpu, cuda, or auto for the GPU if there is one.
        peers: also measure these libraries, separated by commas: higher, torchopt, and in networks jax and torch-func,
            or one row of these such as jax-scan; without names, all. Needs metaleader[bench].
        out: a file to which each result is appended as a line of JSON.
        networks: of the measurement networks, separated by commas: mlp, digits, conv, transformer, resnet, vit, gru.
            Without it all, on the CPU without conv.
        modes: of the engine in the measurement networks, separated by commas; without it all of the device.
        limit: seconds that the first update of a network may take before its process is killed.
        jobs: processes that compile networks at the same time; by default one on the CPU, on a GPU all cores but two.
    """
    from metaleader.bench.report import named, run_bench

    run_bench(named(what), device, peers, out, networks, modes, limit, jobs)
