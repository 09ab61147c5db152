"""Experiments as dataclasses: what `metaleader run` runs."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.progress
import rich.table
import torch
from torch import nn

from metaleader.curves import STYLES, record_error
from metaleader.engine import Engine, Mode
from metaleader.evaluate import play_together
from metaleader.learners import Learner
from metaleader.losses import takes_labels
from metaleader.plots import draw_figures
from metaleader.presets import PRESETS, Preset, Schedule
from metaleader.runs import Run, read_records
from metaleader.tasks import Task, TaskStream


@dataclass(frozen=True)
class Experiment:
    """What a run is asked to do; these fields are the head of its `config.json`."""

    preset: str
    methods: tuple[str, ...] | None = None
    seeds: int = 3
    schedule: Schedule = "standard"
    tasks: int | None = None
    device: str = "auto"
    engine: Mode = "auto"
    data: str | None = None


def run_experiment(experiment: Experiment, folder: Path) -> None:
    """Run every method of an experiment over the same streams, write records and a figure, print the table."""
    experiment, preset = checked(experiment)
    device = _device(experiment.device)
    if preset.threads is not None:
        torch.set_num_threads(preset.threads)
    console = rich.console.Console()
    streams = [First(preset.stream(seed, experiment.data), preset.tasks) for seed in range(experiment.seeds)]
    run = Run(folder, _config(experiment, preset, device), _more_columns(preset, streams[0]))
    timings: dict[str, float] = {}
    with _progress(console) as progress:
        for method in experiment.methods or ():
            started = time.perf_counter()
            learners = _learners(preset, method, experiment, device, console)
            bar = progress.add_task(STYLES[method][0], total=len(streams[0]), note="")
            for records in play_together(
                learners, streams, preset.reveal, reveals=preset.reveals, gamma=preset.gamma, steps=preset.steps
            ):
                run.append(method, enumerate(records))
                error = float(np.mean([record_error(vars(record)) for record in records]))
                progress.update(bar, completed=records[0].round + 1, note=f"{preset.error_name} {error:.3g}")
            timings[method] = time.perf_counter() - started
    records = read_records(folder)
    paths = draw_figures(records, preset.panels, folder, preset.error_name, preset.gamma)
    console.print(_table(records, preset, experiment.methods or (), timings))
    console.print(f"records: {run.records_path}", soft_wrap=True)
    print(paths[0].resolve())


def checked(experiment: Experiment) -> tuple[Experiment, Preset]:
    """An experiment with its methods filled in, and its preset; names and numbers are checked."""
    _check_names("preset", [experiment.preset], PRESETS)
    preset = PRESETS[experiment.preset](experiment.schedule)
    methods = tuple(preset.methods) if experiment.methods is None else experiment.methods
    _check_names("method", methods, preset.methods)
    if experiment.seeds < 1 or (experiment.tasks is not None and experiment.tasks < 1):
        raise ValueError(f"seeds and tasks must be at least 1, got {experiment.seeds} and {experiment.tasks}")
    preset = dataclasses.replace(preset, tasks=min(preset.tasks, experiment.tasks or preset.tasks))
    return dataclasses.replace(experiment, methods=methods), preset


class First:
    """The first tasks of a stream.

    >>> from metaleader.streams import SinusoidStream
    >>> stream = First(SinusoidStream(tasks=9), 3)
    >>> len(stream), len(list(stream))
    (3, 3)
    """

    def __init__(self, stream: TaskStream, num: int) -> None:
        self._stream, self._num = stream, min(num, len(stream))

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, t: int) -> Task:
        if not 0 <= t < self._num:
            raise IndexError(f"round {t} of a stream of {self._num} tasks")
        return self._stream[t]


def _learners(
    preset: Preset, method: str, experiment: Experiment, device: torch.device, console: rich.console.Console
) -> list[Learner]:
    updates = preset.tasks * preset.reveals * preset.meta_steps
    engine = Engine(experiment.engine, updates if method.startswith("ftml") else updates // 10, device)
    console.print(f"{STYLES[method][0]}: {updates} updates, engine {engine.mode}", highlight=False)
    return [
        preset.methods[method](
            preset.model, preset.loss, meta_steps=preset.meta_steps, seed=seed, device=device, engine=engine
        )
        for seed in range(experiment.seeds)
    ]


def _more_columns(preset: Preset, stream: TaskStream) -> list[str]:
    """The columns beyond those of every run, in the order of `Record.more`."""
    names = ["loss", "accuracy"] if takes_labels(preset.loss) else ["loss"]
    columns = [f"{name}_{number}" for number in preset.steps[1:] for name in names]
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in preset.model().modules()):
        columns += [f"{name}_task" for name in names]
    return columns + (["new_datapoints"] if stream[0].ids is not None else [])


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
    few, many = preset.panels[0], preset.panels[-1]
    table = rich.table.Table(title=f"{preset.error_name}, mean ± standard error over seeds")
    for column in (
        "method",
        f"last third, {few} datapoints",
        f"last third, {many}",
        f"first third, {few}",
    ):
        table.add_column(column)
    table.add_column("solved")
    table.add_column("seconds", justify="right")
    for method in methods:
        own = [r for r in records if r["method"] == method]
        late = [r for r in own if r["round"] > last * 2 / 3]
        early = [r for r in own if r["round"] < last / 3]
        solved = [r["needed"] is not None for r in late if r["datapoints"] == many]
        table.add_row(
            STYLES[method][0],
            _mean([r for r in late if r["datapoints"] == few]),
            _mean([r for r in late if r["datapoints"] == many]),
            _mean([r for r in early if r["datapoints"] == few]),
            f"{np.mean(solved):.0%}",
            f"{timings[method]:.0f}",
        )
    return table


def _mean(records: Sequence[dict[str, Any]]) -> str:
    by_seed: dict[int, list[float]] = {}
    for record in records:
        by_seed.setdefault(record["seed"], []).append(record_error(record))
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
