"""Experiments as dataclasses, presets as functions: what `metaleader run` runs."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import rich.console
import rich.progress
import rich.table
import torch
from torch import nn

from metaleader import losses, models
from metaleader.engine import Engine, Mode
from metaleader.evaluate import play_together
from metaleader.learners import FTL, FTML, TOE, Learner, Scratch
from metaleader.losses import Loss
from metaleader.plots import STYLES, stream_figure
from metaleader.runs import Run, read_records
from metaleader.streams import SinusoidStream
from metaleader.tasks import Task, TaskStream

Schedule = Literal["standard", "quick"]


@dataclass(frozen=True)
class Experiment:
    """What a run is asked to do; these fields are the head of its `config.json`."""

    preset: str
    methods: tuple[str, ...] = tuple(STYLES)
    seeds: int = 3
    schedule: Schedule = "standard"
    tasks: int | None = None
    device: str = "auto"
    engine: Mode = "auto"
    data: str | None = None


@dataclass(frozen=True)
class Preset:
    """What a preset fixes.

    Attributes:
        stream: makes the stream of a seed.
        model: builds the network.
        loss: what is learned.
        methods: for each method, the function that makes its learner, with the settings tuned for it.
        meta_steps: updates a reveal.
        reveal: datapoints revealed at a time.
        gamma: the threshold of proficiency.
        few: the size of D_t of the figure's middle panel.
        many: the size of D_t of its right panel.
        error_name: what the error is called.
        steps: numbers of adaptation steps measured; the first is the record's own.
    """

    stream: Callable[[int], TaskStream]
    model: Callable[[], nn.Module]
    loss: Loss
    methods: dict[str, Callable[..., Learner]]
    meta_steps: int
    reveal: int
    gamma: float
    few: int
    many: int
    error_name: str
    steps: tuple[int, ...] = (5, 1, 10)


def sinusoid(schedule: Schedule) -> Preset:
    """Sinusoid regression with an MLP: 40 tasks of 30 datapoints, 10 at a time."""
    num_tasks = {"standard": 40, "quick": 15}[schedule]
    return Preset(
        stream=lambda seed: SinusoidStream(tasks=num_tasks, train=30, seed=seed),
        model=lambda: models.mlp(1, 1),
        loss=losses.squared_error,
        # Tuned on seed 1000: see the log of experiments.
        methods={
            "ftml": functools.partial(FTML, inner_lr=0.01),
            "ftml-last": functools.partial(FTML, inner_lr=0.01, only="last"),
            "ftl": functools.partial(FTL, inner_lr=0.003),
            "toe": TOE,
            "scratch": functools.partial(Scratch, meta_lr=3e-3),
        },
        meta_steps=50,
        reveal=10,
        gamma=0.1,
        few=10,
        many=30,
        error_name="squared error",
    )


PRESETS: dict[str, Callable[[Schedule], Preset]] = {"sinusoid": sinusoid}


def run_experiment(experiment: Experiment, folder: Path) -> None:
    """Run every method of an experiment over the same streams, write records and a figure, print the table."""
    _check_names("preset", [experiment.preset], PRESETS)
    preset = PRESETS[experiment.preset](experiment.schedule)
    _check_names("method", experiment.methods, preset.methods)
    if experiment.seeds < 1 or (experiment.tasks is not None and experiment.tasks < 1):
        raise ValueError(f"seeds and tasks must be at least 1, got {experiment.seeds} and {experiment.tasks}")
    device = _device(experiment.device)
    console = rich.console.Console()
    streams = [_first(preset.stream(seed), experiment.tasks) for seed in range(experiment.seeds)]
    more = [f"loss_{number}" for number in preset.steps[1:]]
    run = Run(folder, _config(experiment, preset, device), more)
    timings: dict[str, float] = {}
    with _progress(console) as progress:
        for method in experiment.methods:
            started = time.perf_counter()
            learners = _learners(preset, method, experiment, device, streams[0], console)
            bar = progress.add_task(STYLES[method][0], total=len(streams[0]), note="")
            for records in play_together(learners, streams, preset.reveal, gamma=preset.gamma, steps=preset.steps):
                run.append(method, enumerate(records))
                error = float(np.mean([record.loss for record in records]))
                progress.update(bar, completed=records[0].round + 1, note=f"{preset.error_name} {error:.3g}")
            timings[method] = time.perf_counter() - started
    records = read_records(folder)
    paths = stream_figure(records, preset.few, preset.many, folder / "figure", preset.error_name)
    console.print(_table(records, preset, experiment.methods, timings))
    console.print(f"records: {run.records_path}", soft_wrap=True)
    print(paths[0].resolve())


def _learners(
    preset: Preset, method: str, experiment: Experiment, device: torch.device, stream: TaskStream, console: Any
) -> list[Learner]:
    reveals = sum(-(-len(stream[t].train.y) // preset.reveal) for t in range(len(stream)))
    engine = Engine(experiment.engine, reveals * preset.meta_steps, device)
    console.print(f"{STYLES[method][0]}: {reveals * preset.meta_steps} updates, engine {engine.mode}", highlight=False)
    return [
        preset.methods[method](
            preset.model, preset.loss, meta_steps=preset.meta_steps, seed=seed, device=device, engine=engine
        )
        for seed in range(experiment.seeds)
    ]


def _config(experiment: Experiment, preset: Preset, device: torch.device) -> dict[str, Any]:
    return {
        **dataclasses.asdict(experiment),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "meta_steps": preset.meta_steps,
        "reveal": preset.reveal,
        "gamma": preset.gamma,
        "statistics": "batch",
        "versions": {"metaleader": _version(), "torch": torch.__version__, "numpy": np.__version__}
        | {"python": platform.python_version()},
    }


def _version() -> str:
    try:
        return importlib.metadata.version("metaleader")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _table(records: Sequence[dict[str, Any]], preset: Preset, methods: Sequence[str], timings: dict[str, float]) -> Any:
    """Mean and standard error over seeds, over the last third of the tasks and the first."""
    last = max(r["round"] for r in records)
    table = rich.table.Table(title=f"{preset.error_name}, mean ± standard error over seeds")
    for column in (
        "method",
        f"last third, {preset.few} datapoints",
        f"last third, {preset.many}",
        f"first third, {preset.few}",
    ):
        table.add_column(column)
    table.add_column("solved")
    table.add_column("seconds", justify="right")
    for method in methods:
        own = [r for r in records if r["method"] == method]
        late = [r for r in own if r["round"] > last * 2 / 3]
        early = [r for r in own if r["round"] < last / 3]
        solved = [r["needed"] is not None for r in late if r["datapoints"] == preset.many]
        table.add_row(
            STYLES[method][0],
            _mean([r for r in late if r["datapoints"] == preset.few]),
            _mean([r for r in late if r["datapoints"] == preset.many]),
            _mean([r for r in early if r["datapoints"] == preset.few]),
            f"{np.mean(solved):.0%}",
            f"{timings[method]:.0f}",
        )
    return table


def _mean(records: Sequence[dict[str, Any]]) -> str:
    by_seed: dict[int, list[float]] = {}
    for record in records:
        by_seed.setdefault(record["seed"], []).append(
            record["loss"] if record["accuracy"] is None else 1 - record["accuracy"]
        )
    means = np.array([np.mean(values) for values in by_seed.values()])
    if len(means) < 2:
        return f"{means.mean():.3f}"
    return f"{means.mean():.3f} ± {means.std(ddof=1) / np.sqrt(len(means)):.3f}"


def _check_names(kind: str, names: Sequence[str], known: dict[str, Any]) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown {kind} {name!r}{hint} There are {', '.join(known)}")
    if not names:
        raise ValueError(f"name at least one {kind} of {', '.join(known)}")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; use cpu, cuda or auto") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} is not there: torch finds no CUDA device; use --device cpu")
    return device


def _first(stream: TaskStream, num: int | None) -> TaskStream | list[Task]:
    return stream if num is None else [stream[t] for t in range(min(num, len(stream)))]


def _progress(console: Any) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[note]}"),
        rich.progress.TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
