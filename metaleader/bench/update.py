"""Measure an update: the time of its gradient by each of the engine's programs, of the whole update, and the error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from metaleader.bench.errors import gradient, measure_errors
from metaleader.bench.peers import PEERS, find_peers, loop_gradient
from metaleader.bench.timing import count_kernels, median_ms, seconds
from metaleader.bench.work import Work
from metaleader.engine.conv.trace import find_chain
from metaleader.engine.engine import Engine, Mode
from metaleader.gradient.meta import meta_gradient
from metaleader.learners import update_together
from metaleader.nets.functional import Network


def measure_update(
    work: Work,
    device: torch.device,
    compare: bool = False,
    peers: Sequence[str] = (),
    rounds: int | None = None,
    draws: int = 5,
) -> dict[str, Any]:
    """Measure the times, the errors and, on CUDA, the number of kernels of an update.

    Args:
        work: the updates to measure.
        device: where they run.
        compare: also time `meta_gradient` and the loop over tasks, for one learner.
        peers: also time these libraries, of higher and torchopt.
        rounds: rounds of timing. If None, three on a GPU, where a round is many calls, and with peers, which are slow;
            otherwise five.
        draws: independent draws for the error; 0 skips it.

    Returns:
        The time of each program, such as `eager_chain_ms`, and the same by mode: `eager_ms`, and `compiled_ms` for the
        fastest mode of the device. `programs` names the program of each mode.
    """
    rounds = rounds or (3 if device.type == "cuda" or peers else 5)
    inputs = work.inputs(device)
    modes: dict[str, Mode] = {"eager": "eager", "compiled": fast_mode(device)}
    network = Network(work.model(), work.loss)
    programs = {name: program(network, mode) for name, mode in modes.items()}
    engines = {programs[name]: Engine(mode, device=device) for name, mode in modes.items()}
    fast = engines[programs["compiled"]]
    learners = work.learners(fast, device)
    objective = learners[0].definition.objective
    result: dict[str, Any] = {
        "tasks": work.tasks * work.seeds,
        "shape": f"{work.seeds} x {work.tasks} tasks, {work.support} + {work.query} of {work.image}",
        "inner_steps": work.inner_steps,
        "programs": programs,
        "first_gradient_s": seconds(functools.partial(gradient, fast, objective, *inputs), device),
    }
    if fast.mode == "eager":
        del engines[programs["compiled"]]
        programs["compiled"] = "none: it does not compile"
    functions: dict[str, Callable[[], Any]] = {
        _key(name): functools.partial(gradient, engine, objective, *inputs) for name, engine in engines.items()
    }
    # On CUDA the host runs ahead of the device: time as many updates as one reveal has.
    steps = 10 if device.type == "cuda" else 1
    functions["update_ms"] = functools.partial(update_together, learners, steps)
    first = tree_map(lambda leaf: leaf[0], inputs)
    if compare:
        inner = objective.inner
        functions["generic_eager_ms"] = functools.partial(
            meta_gradient, objective.network.loss_fn, *first, inner_lr=inner.lr, inner_steps=inner.steps
        )
        functions["loop_ms"] = functools.partial(loop_gradient, work, *first)
    peer_results = find_peers(work, *first, names=peers) if peers else {}
    timed_peers = [name for name in peer_results if "skipped" not in peer_results[name]]
    functions |= {_key(name): functools.partial(PEERS[name], work, *first) for name in timed_peers}
    times = median_ms(functions, device, rounds)
    times["update_ms"] /= steps
    for name in timed_peers:
        peer_results[name]["ms"] = times.pop(_key(name))
    result |= times
    result |= {f"{name}_ms": times.get(_key(ran)) for name, ran in programs.items()}
    if compare:
        result["times_faster"] = {
            key.removesuffix("_ms"): times["loop_ms"] / value for key, value in times.items() if key != "loop_ms"
        }
    if device.type == "cuda":
        result["kernels"] = {name: count_kernels(functions[_key(name)]) for name in engines}
    if draws:
        result |= measure_errors(work, fast, objective, device, draws)
    if peers:
        result["peers"] = peer_results
    return result


def fast_mode(device: torch.device) -> Mode:
    """The fastest mode of a device."""
    return "captured" if device.type == "cuda" else "compiled"


def program(network: Network, mode: Mode) -> str:
    """The name of the program that the engine runs for a network in a mode: a chain, or the generic one."""
    return f"generic {mode}" if find_chain(network) is None else f"{mode} chain"


def _key(name: str) -> str:
    return f"{name.replace(' ', '_')}_ms"
