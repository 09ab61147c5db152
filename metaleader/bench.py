"""The benchmark: what an update costs, how exact it is, and what it needs, on random images of the paper's shapes.

A time is the median over rounds in which everything compared takes its turn, after a warm-up, the clock read when the
device is done. An error is the distance to the gradient in float64, relative, over all parameters; each draw has its
own initialisation and images. With ReLU the largest error of several draws says little: an activation within rounding
of zero can get another sign in float32, and that alone changes the gradient by up to some per cent, in any mode.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rich.console
import rich.table
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from metaleader import losses, machine, models
from metaleader.engine import Engine, Mode
from metaleader.evaluate import play
from metaleader.inner import Params
from metaleader.learners import FTML, TOE, Learner, update_together
from metaleader.learners.start import initial_module
from metaleader.losses import Loss
from metaleader.network import scale_uint8
from metaleader.precision import tf32
from metaleader.tasks import Batch, Task, rng

INNER_LR = 0.1


@dataclass(frozen=True)
class Work:
    """What is measured: the updates of one or more learners of one shape.

    Attributes:
        model: builds the network.
        image: the shape of an image, (channels, height, width).
        outputs: classes, or with `regression` the numbers to predict.
        support: datapoints a task that an update adapts on.
        query: datapoints a task that its loss is taken on.
        inner_steps: 0 is the update of the baselines (TOE, FTL).
        tasks: tasks an update.
        seeds: learners side by side.
        regression: squared error instead of cross-entropy.
    """

    model: Callable[[], nn.Module]
    image: tuple[int, int, int] = (3, 28, 28)
    outputs: int = 10
    support: int = 10
    query: int = 10
    inner_steps: int = 5
    tasks: int = 25
    seeds: int = 1
    regression: bool = False

    @property
    def loss(self) -> Loss:
        """The loss, with the paper's label smoothing."""
        return losses.squared_error if self.regression else functools.partial(losses.cross_entropy, smoothing=0.1)

    def datapoints(self, num: int, *key: int) -> Batch:
        """Random images, uint8 as a buffer keeps them, with random targets."""
        draw = rng("bench", *key)
        x = torch.from_numpy(draw.integers(256, size=(num, *self.image), dtype="uint8"))
        if self.regression:
            return Batch(x, torch.from_numpy(draw.uniform(-1, 1, (num, self.outputs)).astype("float32")))
        return Batch(x, torch.from_numpy(draw.integers(self.outputs, size=num)))

    def learners(self, engine: Engine, device: torch.device, num_tasks: int = 30) -> list[Learner]:
        """Learners that have seen some tasks and made no update."""
        found = []
        for seed in range(self.seeds):
            common: Any = {"query": self.query, "tasks_per_step": self.tasks, "seed": seed, "device": device}
            if self.inner_steps:
                common |= {"inner_lr": INNER_LR, "inner_steps": self.inner_steps, "support": self.support}
            learner = (FTML if self.inner_steps else TOE)(self.model, self.loss, engine=engine, **common)
            for t in range(num_tasks):
                learner.begin(f"task {t}")
                learner.observe(*self.datapoints(2 * (self.support + self.query), seed, t), update=False)
            found.append(learner)
        return found


RAINBOW = Work(functools.partial(models.conv_net, 10))
SEEDS = replace(RAINBOW, seeds=3)
CIFAR = Work(functools.partial(models.conv_net, 5, 32), (3, 32, 32), 5, 25, 25)
POSE = Work(models.pose_net, (3, 64, 64), 4, regression=True)
PLAIN = replace(RAINBOW, support=0, inner_steps=0)


# One update.


def measure_update(
    work: Work, device: torch.device, loop: bool = False, rounds: int = 5, draws: int = 5, peers: Sequence[str] = ()
) -> dict[str, Any]:
    """Times, errors and, on CUDA, kernels of an update: its gradient in every mode, and the whole of it.

    Args:
        work: what is updated.
        device: where.
        loop: also time the one-task-at-a-time loop.
        rounds: turns that everything measured takes.
        draws: independent draws that the error is taken of.
        peers: names of libraries to time on the same work.
    """
    engines = {"eager": Engine("eager", device=device), "compiled": Engine(fast_mode(device), device=device)}
    learners = {name: work.learners(engine, device) for name, engine in engines.items()}
    inputs = _inputs(learners["eager"], 0)

    def gradient(name: str, params: Params, support: Batch, query: Batch) -> Params:
        return engines[name].gradient(learners[name][0]._objective, params, support, query, None)[1]

    started = time.perf_counter()
    gradient("compiled", *inputs)
    _wait(device)
    compile_s = time.perf_counter() - started
    if engines["compiled"].mode == "eager":
        del engines["compiled"], learners["compiled"]
    result: dict[str, Any] = {
        "tasks": work.tasks * work.seeds,
        "shape": f"{work.seeds} x {work.tasks} tasks, {work.support} + {work.query} of {work.image}",
        "inner_steps": work.inner_steps,
        "fast_path": engines["compiled"].mode if "compiled" in engines else "eager: it does not compile",
        "first_compiled_s": compile_s,
    }
    functions: dict[str, Callable[[], Any]] = {
        f"{name}_ms": functools.partial(gradient, name, *inputs) for name in engines
    }
    # A reveal's worth of updates where the host runs ahead of the device.
    steps = 10 if device.type == "cuda" else 1
    functions["update_ms"] = functools.partial(update_together, list(learners.values())[-1], steps)
    if loop:
        alone = tree_map(lambda leaf: leaf[0], inputs)
        functions["loop_ms"] = functools.partial(loop_gradient, work, *alone)
    if draws:
        result |= _errors(work, device, gradient, learners, list(engines), draws)
    result |= median_ms(functions, device, rounds)
    result["update_ms"] /= steps
    result.setdefault("compiled_ms", None)
    if loop:
        result["times_faster_eager"] = result["loop_ms"] / result["eager_ms"]
        result["times_faster_compiled"] = result["compiled_ms"] and result["loop_ms"] / result["compiled_ms"]
    if peers:
        result["peers"] = measure_peers(work, device, tree_map(lambda leaf: leaf[0], inputs), peers)
    if device.type == "cuda":
        result["kernels"] = {name: count_kernels(functions[f"{name}_ms"]) for name in engines}
    return result


def fast_mode(device: torch.device) -> Mode:
    """The fastest mode of a device."""
    return "captured" if device.type == "cuda" else "compiled"


def loop_gradient(work: Work, params: Params, support: Batch, query: Batch) -> Params:
    """The meta-gradient as it is commonly written: torch's own layers, one task at a time, autograd through it all."""
    module = _module(work, params)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for i in range(len(query.y)):
        adapted = dict(leaves)
        for _ in range(work.inner_steps):
            loss = _task_loss(work, functools.partial(functional_call, module, adapted), support, i)
            gradients = torch.autograd.grad(loss, list(adapted.values()), create_graph=True)
            adapted = {n: adapted[n] - INNER_LR * g for n, g in zip(adapted, gradients, strict=True)}
        loss = _task_loss(work, functools.partial(functional_call, module, adapted), query, i)
        for name, value in zip(total, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            total[name] += value / len(query.y)
    return total


def _errors(
    work: Work,
    device: torch.device,
    gradient: Callable[..., Params],
    learners: dict[str, list[Learner]],
    names: Sequence[str],
    draws: int,
) -> dict[str, Any]:
    """Errors against float64, median and maximum over draws; the float64 gradient is the eager one."""
    errors: dict[str, list[float]] = {name: [] for name in names}
    for d in range(draws):
        params, support, query = _inputs(learners["eager"], d)
        for r in range(work.seeds):
            module = initial_module(work.model, 1000 + d, r).to(device)
            for name, value in module.named_parameters():
                params[name][r] = value.detach()
        exact = gradient("eager", *_doubled((params, support, query)))
        for name in names:
            errors[name].append(distance(gradient(name, params, support, query), exact))
    fast = errors.get("compiled", errors["eager"])
    return {
        "error_vs_float64": statistics.median(fast),
        "error_vs_float64_max": max(fast),
        "eager_error_vs_float64": statistics.median(errors["eager"]),
        "eager_error_vs_float64_max": max(errors["eager"]),
        "error_draws": draws,
    }


def distance(found: Params, exact: Params) -> float:
    """The relative distance of two gradients, over all parameters."""
    apart = torch.stack([(found[name].double() - exact[name].double()).norm() for name in exact]).norm()
    return float(apart / torch.stack([value.double().norm() for value in exact.values()]).norm())


def count_kernels(function: Callable[[], Any]) -> int:
    """How many kernels a call launches on the GPU, copies not counted."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() or () if str(event.device_type).endswith("CUDA")]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


# Peers, on the same work.


def measure_peers(work: Work, device: torch.device, inputs: Any, names: Sequence[str], rounds: int = 3) -> Any:
    """Milliseconds and the distance to the loop's gradient for each peer, or why it is skipped."""
    expected = loop_gradient(work, *inputs)
    found: dict[str, Any] = {}
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            found[name] = {"skipped": f"not installed ({error}); pip install 'metaleader[bench]'"}
            continue
        try:
            gradient = functools.partial(_PEERS[name], work, *inputs)
            error = distance(gradient(), expected)
            (milliseconds,) = median_ms({name: gradient}, device, rounds).values()
        except Exception as error:
            found[name] = {"skipped": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
            continue
        version = importlib.metadata.version(name)
        found[name] = {"version": version, "ms": milliseconds, "distance_to_loop": error}
    return found


def _higher_gradient(work: Work, params: Params, support: Batch, query: Batch) -> Params:
    import higher  # pyright: ignore[reportMissingImports]

    module = _module(work, params)
    optimizer = torch.optim.SGD(module.parameters(), lr=INNER_LR)
    for i in range(len(query.y)):
        with higher.innerloop_ctx(module, optimizer, copy_initial_weights=False) as (net, steps):
            for _ in range(work.inner_steps):
                steps.step(_task_loss(work, net, support, i))
            (_task_loss(work, net, query, i) / len(query.y)).backward()
    return _gradients(module)


def _torchopt_gradient(work: Work, params: Params, support: Batch, query: Batch) -> Params:
    import torchopt  # pyright: ignore[reportMissingImports]

    module = _module(work, params)
    initial = dict(module.named_parameters())
    optimizer = torchopt.MetaSGD(module, lr=INNER_LR)
    net_state = torchopt.extract_state_dict(module, by="reference")
    optimizer_state = torchopt.extract_state_dict(optimizer, by="reference")
    for i in range(len(query.y)):
        for _ in range(work.inner_steps):
            optimizer.step(_task_loss(work, module, support, i))
        (_task_loss(work, module, query, i) / len(query.y)).backward()
        torchopt.recover_state_dict(module, net_state)
        torchopt.recover_state_dict(optimizer, optimizer_state)
    return {name: value.grad for name, value in initial.items() if value.grad is not None}


_PEERS: dict[str, Callable[..., Params]] = {"higher": _higher_gradient, "torchopt": _torchopt_gradient}


def _module(work: Work, params: Params) -> nn.Module:
    module = work.model()
    for name, value in module.named_parameters():
        value.data = params[name].detach().clone()
    return module


def _gradients(module: nn.Module) -> Params:
    return {name: value.grad for name, value in module.named_parameters() if value.grad is not None}


def _task_loss(work: Work, net: Callable[[Tensor], Tensor], batch: Batch, i: int) -> Tensor:
    return work.loss(net(scale_uint8(batch.x[i])), batch.y[i]).mean()


# The rest.


def measure_tf32(work: Work, device: torch.device, draws: int = 5) -> dict[str, Any]:
    """The error of the gradient with TF32 on, which it never is unless asked for."""
    if device.type != "cuda":
        return {"skipped": "TF32 is of CUDA devices"}
    with tf32(True):
        found = measure_update(work, device, rounds=5, draws=draws)
    return {name: found[name] for name in ("error_vs_float64", "error_vs_float64_max", "compiled_ms", "fast_path")}


def measure_memory(work: Work, device: torch.device, few: int = 2, many: int = 20) -> dict[str, Any]:
    """Peak GPU memory of a gradient with many inner steps and with few, what is held before it included."""
    if device.type != "cuda":
        return {"skipped": "only the CUDA allocator tells its peak"}
    found: dict[str, Any] = {"inner_steps": [few, many]}
    ways: dict[str, tuple[Mode, bool]] = {
        "eager": ("eager", True),
        "kept": ("compiled", True),
        "recomputed": ("compiled", False),
    }
    for name, (mode, keep) in ways.items():
        peaks = [_peak(replace(work, inner_steps=steps), device, mode, keep) for steps in (few, many)]
        found[name] = {"peak_mib": [peak / 2**20 for peak in peaks], "ratio": peaks[1] / peaks[0]}
    return found


def _peak(work: Work, device: torch.device, mode: Mode, keep: bool) -> int:
    engine = Engine(mode, device=device, keep_linearisations=keep)
    learners = work.learners(engine, device)
    inputs = _inputs(learners, 0)
    run = functools.partial(engine.gradient, learners[0]._objective, *inputs, None)
    run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def measure_buffer(
    device: torch.device, few: int = 10, many: int = 10_000, datapoints: int = 1000, rounds: int = 15
) -> dict[str, Any]:
    """What drawing, gathering and a whole update cost after many tasks of small datapoints, and after few."""
    functions: dict[str, Callable[[], Any]] = {}
    bytes_held: list[float] = []
    for name, num_tasks in (("few", few), ("many", many)):
        learner = FTML(functools.partial(models.mlp, 1, 1), losses.squared_error, device=device, inner_lr=0.01)
        batch = Batch(torch.rand(datapoints, 1), torch.rand(datapoints, 1))
        for t in range(num_tasks):
            learner.begin(f"task {t}")
            learner.observe(*batch, update=False)
        assert learner._buffer.store.data is not None
        held = sum(leaf.nbytes for leaf in learner._buffer.store.data)
        bytes_held.append(held / (num_tasks * sum(leaf.nbytes for leaf in batch)))
        functions[f"draw_{name}_ms"] = functools.partial(_draw_and_gather, learner, 10)
        functions[f"update_{name}_ms"] = functools.partial(learner.update, 10)
    found = {key: value / 10 for key, value in median_ms(functions, device, rounds).items()}
    ratios = {f"{kind}_ratio": found[f"{kind}_many_ms"] / found[f"{kind}_few_ms"] for kind in ("draw", "update")}
    return {"tasks": [few, many], "datapoints": datapoints, **found, **ratios, "bytes_of_data": max(bytes_held)}


def _draw_and_gather(learner: Learner, steps: int) -> None:
    draw = learner._draw(range(steps))
    assert draw is not None
    for i in range(steps):
        learner._buffer.gather(draw.at(i))


def measure_stream(
    work: Work, device: torch.device, tasks: int = 56, datapoints: int = 900, reveal: int = 20, meta_steps: int = 10
) -> dict[str, Any]:
    """A whole stream of Rainbow's shape with FTML, measured at every reveal; compiling is timed apart."""
    stream = [Task(f"task {t}", work.datapoints(datapoints, 0, t), work.datapoints(500, 1, t)) for t in range(tasks)]
    engine = Engine(fast_mode(device), device=device)
    learner = FTML(work.model, work.loss, meta_steps=meta_steps, device=device, engine=engine)
    observe, observing = learner.observe, []

    def timed(*args: Any, **options: Any) -> None:
        started = time.perf_counter()
        observe(*args, **options)  # waits for the device
        observing.append(time.perf_counter() - started)

    learner.observe = timed
    started = time.perf_counter()
    num_records = sum(1 for _ in play(learner, stream, reveal))
    total = time.perf_counter() - started - observing[0]
    updating = sum(observing[1:])
    return {
        "tasks": tasks,
        "reveals": num_records,
        "meta_steps": meta_steps,
        "fast_path": engine.mode,
        "first_reveal_s": observing[0],
        "total_s": total,
        "updating_s": updating,
        "measuring_s": total - updating,
        "measuring_part": 1 - updating / total,
    }


def measure_start(device: torch.device) -> dict[str, Any]:
    """Seconds from the start of a process to its first compiled update, with an empty compile cache and a warm one."""
    code = f"from metaleader import bench; bench.first_update({str(device)!r})"
    root = str(Path(__file__).parents[1])
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        folders = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        path = {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        for name in ("cold", "warm"):
            started = time.time()
            done = subprocess.run(
                [sys.executable, "-c", code], env=os.environ | folders | path, capture_output=True, text=True
            )
            if done.returncode:
                return {"skipped": f"the process failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"}
            mode, finished = done.stdout.split()[-2:]
            found |= {f"{name}_s": float(finished) - started, "fast_path": mode}
    return found


def first_update(device: str) -> None:
    """Make one update of Rainbow's shape in the fastest mode; print that mode and the time of day when it is done."""
    engine = Engine(fast_mode(torch.device(device)), device=device)
    update_together(RAINBOW.learners(engine, torch.device(device)), 1)
    print(engine.mode, time.time())


def median_ms(functions: dict[str, Callable[[], Any]], device: torch.device, rounds: int = 5) -> dict[str, float]:
    """The median time of each function, in milliseconds: in every round each is called for a tenth of a second."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            spent = 0.0
            while spent < 0.1:
                _wait(device)
                started = time.perf_counter()
                function()
                _wait(device)
                samples[name].append(time.perf_counter() - started)
                spent += samples[name][-1]
    return {name: 1000 * statistics.median(values) for name, values in samples.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _inputs(learners: Sequence[Learner], number: int) -> tuple[Params, Batch, Batch]:
    """What the update with a number takes, learners in front."""
    found = []
    for learner in learners:
        draw = learner._draw([number])
        assert draw is not None
        found.append((dict(learner.params), *learner._buffer.gather(draw.at(0))))
    return tree_map(lambda *leaves: torch.stack(leaves), *found)


def _doubled(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, scale_uint8(tree))


# The report.


MEASUREMENTS: dict[str, Callable[[torch.device, Sequence[str]], dict[str, Any]]] = {
    "meta-step": lambda device, peers: measure_update(RAINBOW, device, loop=True, peers=peers),
    "seeds": lambda device, peers: measure_update(SEEDS, device),
    "cifar": lambda device, peers: measure_update(CIFAR, device),
    "pose": lambda device, peers: measure_update(POSE, device),
    "plain": lambda device, peers: measure_update(PLAIN, device),
    "tf32": lambda device, peers: measure_tf32(RAINBOW, device),
    "memory": lambda device, peers: measure_memory(RAINBOW, device),
    "buffer": lambda device, peers: measure_buffer(device),
    "stream": lambda device, peers: measure_stream(RAINBOW, device),
    "start": lambda device, peers: measure_start(device),
}


def run_bench(what: Sequence[str] = ("meta-step",), device: str = "auto", peers: bool = False) -> dict[str, Any]:
    """Measure, print a table, then one line of JSON; TF32 is off."""
    unknown = [name for name in what if name not in MEASUREMENTS]
    if unknown or not what:
        raise ValueError(f"cannot measure {', '.join(unknown) or 'nothing'}; there are {', '.join(MEASUREMENTS)}")
    place = machine.find_device(device)
    on_cuda = place.type == "cuda"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(place) if on_cuda else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        # Processes that want a core: more than there are cores means times that say little.
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    console = rich.console.Console(stderr=True)
    with tf32(False):
        for name in what:
            console.print(f"measuring {name} ...", highlight=False)
            result[name.replace("-", "_")] = MEASUREMENTS[name](place, list(_PEERS) if peers else [])
    rich.console.Console().print(_table(result))
    print(json.dumps(result))
    return result


def _table(result: dict[str, Any]) -> rich.table.Table:
    title = f"{result['device']}, torch {result['torch']}, Python {result['python']}, {result['date']}"
    table = rich.table.Table("measurement", "value", title=title)
    for name, measured in result.items():
        if isinstance(measured, dict):
            table.add_section()
            table.add_row(f"[bold]{name}[/bold]", "")
            for key, value in _flat(measured):
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
        return " / ".join(_shown(part) for part in value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m metaleader.bench`: `metaleader bench` where tyro is not installed."""
    parser = argparse.ArgumentParser(prog="python -m metaleader.bench", description=__doc__)
    parser.add_argument("--what", default="meta-step", help=f"separated by commas, of {','.join(MEASUREMENTS)}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--peers", action="store_true")
    given = parser.parse_args(arguments)
    run_bench([name.strip() for name in given.what.split(",") if name.strip()], given.device, given.peers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
