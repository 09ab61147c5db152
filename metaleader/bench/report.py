"""Run measurements by name, and print the results as a table and as a line of JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import rich.console
import rich.table
import torch

from metaleader.bench.measures import measure_buffer, measure_memory, measure_start, measure_stream, measure_tf32
from metaleader.bench.networks.contenders import PEERS as NETWORK_PEERS
from metaleader.bench.networks.table import choose_cells, choose_networks, measure_networks, print_table
from metaleader.bench.peers import PEERS
from metaleader.bench.update import measure_update
from metaleader.bench.work import CIFAR, PLAIN, POSE, RAINBOW, SEEDS
from metaleader.engine.determinism import tf32
from metaleader.system import machine


class Settings(NamedTuple):
    """What the measurements are told.

    Attributes:
        peers: other libraries to measure; empty for none.
        networks: names of networks separated by commas, or None for all that suit the device.
        modes: modes of the engine separated by commas, or None for all of the device.
        limit: seconds that the first update of a network may take.
        jobs: processes that compile networks at the same time, or None for a number that suits the device.
        save: called with each result of a network as soon as it is known.
    """

    peers: tuple[str, ...] = ()
    networks: str | None = None
    modes: str | None = None
    limit: float = 600.0
    jobs: int | None = None
    save: Callable[[dict[str, Any]], None] | None = None


def _measure_networks(device: torch.device, settings: Settings) -> dict[str, Any]:
    networks, cells = choose_networks(settings.networks, device), choose_cells(settings.modes, settings.peers, device)

    def report(network: str, cell: str, values: dict[str, Any]) -> None:
        if settings.save:
            settings.save({"network": network, "cell": cell, **values})

    return measure_networks(networks, cells, device, settings.limit, settings.jobs, report=report)


def _peers(settings: Settings) -> list[str]:
    return [name for name in PEERS if name in settings.peers]


MEASUREMENTS: dict[str, Callable[[torch.device, Settings], dict[str, Any]]] = {
    "meta-step": lambda device, settings: measure_update(RAINBOW, device, compare=True, peers=_peers(settings)),
    "networks": _measure_networks,
    "seeds": lambda device, _: measure_update(SEEDS, device, draws=0),
    "cifar": lambda device, _: measure_update(CIFAR, device),
    "pose": lambda device, _: measure_update(POSE, device),
    "plain": lambda device, _: measure_update(PLAIN, device),
    "generic": lambda device, _: measure_update(RAINBOW.no_chain(), device, compare=True),
    "tf32": lambda device, _: measure_tf32(RAINBOW, device),
    "memory": lambda device, _: measure_memory(RAINBOW, device),
    "buffer": lambda device, _: measure_buffer(device),
    "stream": lambda device, _: measure_stream(RAINBOW, device),
    "start": lambda device, _: measure_start(device),
}
# The measurements that compare with other libraries, and the names of these.
_PEERS_OF = {
    "meta-step": tuple(PEERS),
    "networks": tuple(dict.fromkeys([*NETWORK_PEERS, *(cell for cells in NETWORK_PEERS.values() for cell in cells)])),
}
# Times by engine mode, for readers of the JSON; the table has the same times by program.
_NOT_IN_TABLE = ("eager_ms", "compiled_ms")


def named(what: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in what.split(",") if name.strip()]


def choose_peers(names: Sequence[str] | None, what: Sequence[str]) -> tuple[str, ...]:
    """The peers with these names, each of which may hold several separated by commas; none for None, all for no names.

    Raises:
        ValueError: for a name that none of the measurements compares with.
    """
    if names is None:
        return ()
    known = list(dict.fromkeys(peer for name in what for peer in _PEERS_OF.get(name, ())))
    chosen = [name for part in names for name in named(part)]
    unknown = [name for name in chosen if name not in known]
    if unknown or not known:
        there_are = ", ".join(known) or "none; only meta-step and networks have peers"
        raise ValueError(f"no peers {', '.join(unknown) or 'at all'} of {', '.join(what)}; there are {there_are}")
    return tuple(chosen or known)


def run_bench(
    what: Sequence[str] = ("meta-step",),
    device: str = "auto",
    peers: Sequence[str] | None = None,
    out: str | None = None,
    networks: str | None = None,
    modes: str | None = None,
    limit: float = 600.0,
    jobs: int | None = None,
) -> dict[str, Any]:
    """Run measurements with TF32 off; print tables, then one line of JSON.

    Each result is also printed to stderr as soon as it is measured, and if `out` is given, appended to that file as a
    line of JSON, so that a killed run keeps its finished measurements.
    """
    unknown = [name for name in what if name not in MEASUREMENTS]
    if unknown or not what:
        raise ValueError(f"cannot measure {', '.join(unknown) or 'nothing'}; there are {', '.join(MEASUREMENTS)}")
    target = machine.find_device(device)
    settings = Settings(choose_peers(peers, what), networks, modes, limit, jobs)
    _check(settings, what, target)
    if out is not None:
        open(out, "a").close()  # fail before the measurements if the file cannot be written
    environment: dict[str, Any] = {
        "device": machine.hardware(str(target)) if target.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "hardware": machine.hardware(str(target)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": machine.commit(),
        "date": time.strftime("%Y-%m-%d"),
        # The load average: if it exceeds the number of cores, the times are unreliable.
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }

    def save(values: dict[str, Any]) -> None:
        if out is not None:
            with open(out, "a") as file:
                file.write(json.dumps(environment | values) + "\n")

    settings = settings._replace(save=save)
    result = dict(environment)
    with tf32(False):
        for name in what:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            started = time.perf_counter()
            key = name.replace("-", "_")
            result[key] = MEASUREMENTS[name](target, settings)
            line = json.dumps({key: result[key]})
            print(f"{name} took {time.perf_counter() - started:.1f} s: {line}", file=sys.stderr, flush=True)
            save({key: result[key]})
    result["load_after"] = os.getloadavg()[0]
    others = {key: value for key, value in result.items() if key != "networks"}
    if any(isinstance(value, dict) for value in others.values()):
        rich.console.Console().print(_table(others))
    if "networks" in result:
        print_table(result["networks"], _title(result))
    print(json.dumps(result))
    return result


def _check(settings: Settings, what: Sequence[str], device: torch.device) -> None:
    """Reject settings of networks that have no effect, or a wrong value, before anything is measured."""
    if "networks" in what:
        choose_networks(settings.networks, device)
        choose_cells(settings.modes, (), device)
        if not settings.limit > 0:
            raise ValueError(f"limit must be a positive number of seconds, got {settings.limit}")
        if settings.jobs is not None and settings.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {settings.jobs}")
        return
    defaults = Settings()
    given = [
        name for name in ("networks", "modes", "limit", "jobs") if getattr(settings, name) != getattr(defaults, name)
    ]
    if given:
        raise ValueError(f"{', '.join(given)} concern the measurement networks; add it to what, or omit them")


def _title(result: dict[str, Any]) -> str:
    return f"{result['device']}, torch {result['torch']}, Python {result['python']}, {result['date']}"


def _table(result: dict[str, Any]) -> rich.table.Table:
    table = rich.table.Table("measurement", "value", title=_title(result))
    for name, measured in result.items():
        if isinstance(measured, dict):
            table.add_section()
            table.add_row(f"[bold]{name}[/bold]", "")
            for key, value in _flat(measured):
                if key not in _NOT_IN_TABLE:
                    table.add_row(f"  {key}", _shown(value))
    return table


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join(_shown(element) for element in value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
