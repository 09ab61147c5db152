"""Experiments: running one, resuming one that was stopped, and joining runs of single methods."""

from __future__ import annotations

import dataclasses
import difflib
import json
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from torch import nn

from metaleader.engine.engine import Engine, Mode
from metaleader.evaluate import play_together, preload
from metaleader.learners import FTML, Learner
from metaleader.losses import takes_labels
from metaleader.presets import PRESETS, First, Preset, Schedule
from metaleader.report.figures import draw_figures
from metaleader.report.loaded import load_runs
from metaleader.report.page import write_report
from metaleader.report.progress import Display, result_table, summary_writer
from metaleader.runs.join import join_runs
from metaleader.runs.run import Run
from metaleader.streams.datasets.registry import data_folder
from metaleader.system import machine
from metaleader.tasks import TaskStream

# On the command line, names of methods are separated by commas.
_METHODS = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="METHOD,...",
    instance_from_str=lambda texts: tuple(name.strip() for name in texts[0].split(",") if name.strip()),
    is_instance=lambda value: value is None or isinstance(value, tuple),
    str_from_instance=lambda names: [",".join(names or ())],
)


def _no_default(metavar: str) -> Any:
    """An argument whose help text does not mention the default None."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class Experiment:
    """An experiment: its fields are the arguments of `metaleader run` and the first keys of `config.json`."""

    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET]")] = "rainbow-digits"
    """rainbow-digits, rainbow-mnist, cifar100, pose or sinusoid."""
    methods: Annotated[tuple[str, ...] | None, _METHODS, _no_default("METHOD,...")] = None
    """Names of methods; the default methods of the preset if not given. `metaleader list` shows all methods."""
    seeds: int = 3
    """Number of seeds, batched; each has its own initialisation, stream and draws."""
    schedule: Schedule = "standard"
    """Meta-updates per reveal: standard makes 10 (sinusoid: 50), paper as many as the authors, quick only a few."""
    tasks: Annotated[int | None, _no_default("INT")] = None
    """Stop after this many tasks."""
    device: str = "auto"
    """cpu, cuda, or auto for the GPU if there is one."""
    engine: Mode = "auto"
    """How updates run; auto compiles if the number of updates is worth it."""
    data: Annotated[str | None, _no_default("DIR")] = None
    """The folder with data sets, if the preset needs one."""
    tensorboard: bool = False
    """Also write event files for TensorBoard into the run folder; needs the extra tensorboard."""


def run_experiment(experiment: Experiment, folder: Path) -> None:
    """Run all methods of an experiment over the same streams into a new run folder; then print and draw the results."""
    experiment, preset = checked(experiment)
    if preset.threads is not None:
        torch.set_num_threads(preset.threads)
    with Run(folder, _config(experiment, preset)) as run:
        _play(run, experiment, preset)
    _finish(folder)


def resume_experiment(folder: Path) -> None:
    """Continue a run that was stopped; then print and draw the results, also those of a finished run."""
    with Run(folder) as run:
        given: dict[str, Any] = {field.name: run.config[field.name] for field in dataclasses.fields(Experiment)}
        given["methods"] = tuple(given["methods"])
        experiment, preset = checked(Experiment(**given))
        _check_unchanged(run.config, _config(experiment, preset))
        torch.set_num_threads(run.config["threads"])
        if run.finished():
            run.check_records()
            print(f"{folder} is finished: there is nothing to resume")
        else:
            _play(run, experiment, preset)
    _finish(folder)


def join_experiments(folders: Sequence[Path], folder: Path) -> None:
    """Join finished runs of different methods into a new run folder; then print and draw the results."""
    join_runs(folders, folder)
    _finish(folder)


def checked(experiment: Experiment) -> tuple[Experiment, Preset]:
    """The experiment with all defaults filled in, and its preset; raises ValueError for invalid fields."""
    _check_names("preset", [experiment.preset], PRESETS)
    preset = PRESETS[experiment.preset](experiment.schedule)
    methods = tuple(preset.methods) if experiment.methods is None else experiment.methods
    _check_names("method", methods, preset.all_methods)
    if experiment.seeds < 1 or (experiment.tasks is not None and experiment.tasks < 1):
        raise ValueError(f"seeds and tasks must be at least 1, got {experiment.seeds} and {experiment.tasks}")
    if experiment.tensorboard:
        summary_writer()
    preset = dataclasses.replace(preset, tasks=min(preset.tasks, experiment.tasks or preset.tasks))
    return dataclasses.replace(
        experiment,
        methods=tuple(dict.fromkeys(methods)),
        tasks=preset.tasks,
        device=str(machine.find_device(experiment.device)),
        data=str(data_folder(experiment.data).absolute()),
    ), preset


def planned_updates(preset: Preset, method: str) -> int:
    """The number of updates by which an engine chooses its mode; ten updates without an inner loop count as one."""
    learner = preset.all_methods[method](preset.model, preset.loss, meta_steps=preset.meta_steps)
    updates = preset.tasks * preset.reveals * preset.meta_steps
    return updates if isinstance(learner, FTML) else updates // 10


def _play(run: Run, experiment: Experiment, preset: Preset) -> None:
    """Play all rounds that the run has not played yet."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        streams = [First(preset.stream(seed, experiment.data), preset.tasks) for seed in range(experiment.seeds)]
        run.rewind(len(streams[0]), _more_columns(preset, streams[0]))
        tensorboard = run.folder / "tensorboard" if experiment.tensorboard else None
        with Display(Console(), preset.error_name, len(streams[0]), tensorboard) as display:
            for method in run.config["methods"]:
                _play_method(method, run, experiment, preset, streams, display)
    except KeyboardInterrupt:
        print(f"stopped; every finished round is saved. Continue with: metaleader resume {run.folder}", flush=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _play_method(
    method: str, run: Run, experiment: Experiment, preset: Preset, streams: Sequence[First], display: Display
) -> None:
    saved = run.checkpoint(method)
    played = 0 if saved is None else saved["rounds_played"]
    if played == len(streams[0]):
        return
    started = time.perf_counter()
    # The checkpoint has the mode in use: a compiled engine may have fallen back to eager.
    mode: Any = run.config["engines"][method] if saved is None else saved["state"]["engine"]
    engine = Engine(mode, device=experiment.device)
    make, options = preset.all_methods[method], {"device": experiment.device, "engine": engine}
    learners: list[Learner] = [
        make(preset.model, preset.loss, meta_steps=preset.meta_steps, seed=seed, **options)
        for seed in range(experiment.seeds)
    ]
    updates = preset.tasks * preset.reveals * learners[0].updates_per_reveal
    line = f"{updates} updates, engine {engine.mode}"
    display.begin(method, played, line if saved is None else f"{line}, from round {played + 1} on")
    if saved is not None:
        for learner, stream, state in zip(learners, streams, saved["state"]["learners"], strict=True):
            preload(learner, stream, played, preset.reveal * preset.reveals)
            learner.load_state_dict(state)
    for t in range(played, len(streams[0])):
        records = []
        for reveal in play_together(
            learners,
            [First(stream, t + 1) for stream in streams],
            preset.reveal,
            reveals=preset.reveals,
            gamma=preset.gamma,
            steps=preset.steps,
            parts=preset.parts,
            start=t,
        ):
            records.append(reveal)
            display.reveal(reveal, len(records) / preset.reveals)
        state = {"engine": engine.mode, "learners": [learner.state_dict(data=False) for learner in learners]}
        seconds = time.perf_counter() - started
        run.save(method, t + 1, records, state, seconds, machine.peak_mb(experiment.device))
        display.round_saved(seconds)
        started = time.perf_counter()


def _finish(folder: Path) -> None:
    """Draw the figures, print the table and, as the last line, the path of the report."""
    (run,) = load_runs([folder])
    draw_figures(run.records, run.sizes, folder, run.error_name, run.gamma)
    Console().print(result_table(run))
    print(f"records: {folder / 'records.csv'}")
    print(write_report([folder]).resolve())


def _more_columns(preset: Preset, stream: TaskStream | First) -> list[str]:
    """The columns that not every run has, in the order of `Record.more`."""
    names = ["loss", "accuracy"] if takes_labels(preset.loss) else ["loss"]
    columns = [f"loss_{name}" for name in preset.parts]
    columns += [f"{name}_{number}" for number in preset.steps[1:] for name in names]
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in preset.model().modules()):
        columns += [f"{name}_task" for name in names]
    return columns + (["new_datapoints"] if stream[0].ids is not None else [])


def _config(experiment: Experiment, preset: Preset) -> dict[str, Any]:
    """Everything that determines a run."""
    methods = experiment.methods or ()
    return {
        **dataclasses.asdict(experiment),
        "engines": {
            method: Engine(experiment.engine, planned_updates(preset, method), experiment.device).mode
            for method in methods
        },
        "threads": torch.get_num_threads(),
        "settings": {
            **{name: getattr(preset, name) for name in ("meta_steps", "reveal", "reveals", "gamma", "steps")},
            "loss": getattr(preset.loss, "keywords", {}),
            "learners": {name: getattr(preset.all_methods[name], "keywords", {}) for name in methods},
            **({"parts": {name: str(columns) for name, columns in preset.parts.items()}} if preset.parts else {}),
        },
        "panels": preset.panels,
        "error_name": preset.error_name,
        "statistics": "batch",
        "hardware": machine.hardware(experiment.device),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }


def _check_unchanged(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if the settings have changed; print a note if the machine or the software has."""
    now = json.loads(json.dumps(now))
    for name in ("settings", "tasks"):
        if then[name] != now[name]:
            raise ValueError(
                f"the preset {then['preset']!r} has changed since the run began: its {name} were {then[name]}, now"
                f" {now[name]}; start a new run"
            )
    for name in ("hardware", "versions", "commit"):
        if then[name] != now[name]:
            print(f"note: {name} was {then[name]}, now {now[name]}: numbers may differ in the last bits")


def _check_names(kind: str, names: Sequence[str], valid: Collection[str]) -> None:
    for name in names:
        if name not in valid:
            close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"unknown {kind} {name!r}{hint} There are {', '.join(valid)}")
    if not names:
        raise ValueError(f"name at least one {kind} of {', '.join(valid)}")
