"""One update: the time of its gradient by every program that the engine has for it, of the whole, and the error."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    peers: bool = False,
    rounds: int | None = None,
    draws: int = 5,
) -> dict[str, Any]:
    """Times, errors and, on CUDA, kernels of an update.

    Args:
        work: what is updated.
        device: where.
        compare: also time `meta_gradient` itself and the one-task-at-a-time loop, of one learner.
        peers: also time higher and torchopt.
        rounds: turns that everything measured takes; five on the CPU; three on a GPU, where a turn is many
            calls, and with peers, which are slow.
        draws: independent draws that the error is taken of.

    Returns:
        A time for each program, such as `eager_chain_ms`, and under the names of the engine's modes: `eager_ms` and, of
        its fastest mode on the device, `compiled_ms`. `programs` says which program a mode runs.
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
    # A reveal's worth of updates where the host runs ahead of the device.
    steps = 10 if device.type == "cuda" else 1
    functions["update_ms"] = functools.partial(update_together, learners, steps)
    first = tree_map(lambda leaf: leaf[0], inputs)
    if compare:
        inner = objective.inner
        functions["generic_eager_ms"] = functools.partial(
            meta_gradient, objective.network.loss_fn, *first, inner_lr=inner.lr, inner_steps=inner.steps
        )
        functions["loop_ms"] = functools.partial(loop_gradient, work, *first)
    found = find_peers(work, *first) if peers else {}
    timed = [name for name in found if "skipped" not in found[name]]
    functions |= {_key(name): functools.partial(PEERS[name], work, *first) for name in timed}
    times = median_ms(functions, device, rounds)
    times["update_ms"] /= steps
    for name in timed:
        found[name]["ms"] = times.pop(_key(name))
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
        result["peers"] = found
    return result


def fast_mode(device: torch.device) -> Mode:
    """The fastest mode of a device."""
    return "captured" if device.type == "cuda" else "compiled"


def program(network: Network, mode: Mode) -> str:
    """What the engine runs for a network in a mode: a chain, or the generic path."""
    return f"generic {mode}" if find_chain(network) is None else f"{mode} chain"


def _key(name: str) -> str:
    return f"{name.replace(' ', '_')}_ms"
