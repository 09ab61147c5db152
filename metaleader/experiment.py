"""Experiments as dataclasses: what `metaleader run` runs and `metaleader resume` goes on with."""

from __future__ import annotations

import dataclasses
import difflib
import json
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from metaleader.engine.engine import Engine, Mode
from metaleader.evaluate import play_together, preload
from metaleader.learners import Learner
from metaleader.losses import takes_labels
from metaleader.presets import PRESETS, Preset, Schedule
from metaleader.report.curves import STYLES
from metaleader.report.figures import draw_figures
from metaleader.report.page import write_report
from metaleader.report.progress import Display, result_table, summary_writer
from metaleader.runs.folder import Run, read_config, read_records, read_times
from metaleader.runs.join import join_runs
from metaleader.streams.datasets.registry import data_folder
from metaleader.system import machine
from metaleader.tasks import Task, TaskStream


@dataclass(frozen=True)
class Experiment:
    """What a run is asked to do; these fields are the head of its `config.json`, with every choice made."""

    preset: str
    methods: tuple[str, ...] | None = None
    seeds: int = 3
    schedule: Schedule = "standard"
    tasks: int | None = None
    device: str = "auto"
    engine: Mode = "auto"
    data: str | None = None
    tensorboard: bool = False


def run_experiment(experiment: Experiment, folder: Path) -> None:
    """Run every method of an experiment over the same streams, into a new run folder; end with table and figure."""
    experiment, preset = checked(experiment)
    if preset.threads is not None:
        torch.set_num_threads(preset.threads)
    with Run(folder, _config(experiment, preset)) as run:
        _go_on(run, experiment, preset)
    _finish(folder)


def resume_experiment(folder: Path) -> None:
    """Go on with a run that was stopped, however it was; a finished one only ends again with table and figure."""
    with Run(folder) as run:
        try:
            given: dict[str, Any] = {field.name: run.config[field.name] for field in dataclasses.fields(Experiment)}
            given["methods"] = tuple(given["methods"])
            experiment, preset = checked(Experiment(**given))
            _check_unchanged(run.config, _config(experiment, preset))
            torch.set_num_threads(int(run.config["threads"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder}/config.json is damaged ({error!r}); use an intact copy") from error
        if run.finished():
            run.check_records()
            print(f"{folder} is finished: there is nothing to resume")
        else:
            _go_on(run, experiment, preset)
    _finish(folder)


def join_experiments(folders: Sequence[Path], folder: Path) -> None:
    """Join finished runs of one experiment, each of other methods, into a new run folder; end with table and figure."""
    join_runs(folders, folder, tuple(STYLES))
    _finish(folder)


def checked(experiment: Experiment) -> tuple[Experiment, Preset]:
    """An experiment with every choice made, and its preset; names, numbers and the device are checked."""
    _check_names("preset", [experiment.preset], PRESETS)
    preset = PRESETS[experiment.preset](experiment.schedule)
    methods = tuple(preset.methods) if experiment.methods is None else experiment.methods
    _check_names("method", methods, preset.known)
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


def _go_on(run: Run, experiment: Experiment, preset: Preset) -> None:
    """Play what the run has not played yet."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        streams = [First(preset.stream(seed, experiment.data), preset.tasks) for seed in range(experiment.seeds)]
        run.rewind(len(streams[0]), _more_columns(preset, streams[0]))
        tensorboard = run.folder / "tensorboard" if experiment.tensorboard else None
        with Display(Console(), preset.error_name, len(streams[0]), tensorboard) as display:
            for method in run.config["methods"]:
                _play_method(method, run, experiment, preset, streams, display)
    except KeyboardInterrupt:
        print(f"stopped; every finished round is saved. Go on with: metaleader resume {run.folder}", flush=True)
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
    # The mode in use: a compiled one may have fallen back to eager on the way.
    mode = run.config["engines"][method] if saved is None else saved["state"]["engine"]
    engine = Engine(mode, device=experiment.device)
    learners = _learners(preset, method, experiment, engine)
    updates = preset.tasks * preset.reveals * learners[0].updates_per_reveal
    line = f"{updates} updates, engine {engine.mode}"
    display.begin(method, played, line if saved is None else f"{line}, from round {played + 1} on")
    if saved is not None:
        for learner, stream, state in zip(learners, streams, saved["state"]["learners"], strict=True):
            preload(learner, stream, played, preset.reveal * preset.reveals)
            learner.load_state_dict(state)
    for t in range(played, len(streams[0])):
        this_round = [First(stream, t + 1) for stream in streams]
        records = []
        for reveal in play_together(
            learners,
            this_round,
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
    """The end of a run: figures, the table, and alone on the last line the path of the report."""
    config, records = read_config(folder), read_records(folder)
    seconds: dict[str, float] = {}
    for row in read_times(folder):
        seconds[row["method"]] = seconds.get(row["method"], 0.0) + row["seconds"]
    panels, error_name = config["panels"], config["error_name"]
    draw_figures(records, panels, folder, error_name, config["settings"]["gamma"])
    Console().print(result_table(records, config["methods"], panels, error_name, seconds))
    print(f"records: {folder / 'records.csv'}")
    print(write_report([folder]).resolve())


def _learners(preset: Preset, method: str, experiment: Experiment, engine: Engine) -> list[Learner]:
    return [
        preset.known[method](
            preset.model, preset.loss, meta_steps=preset.meta_steps, seed=seed, device=experiment.device, engine=engine
        )
        for seed in range(experiment.seeds)
    ]


def planned_updates(preset: Preset, method: str) -> int:
    """What an engine decides by: the updates of a method, of which those without an inner loop are a tenth of one."""
    return preset.tasks * preset.reveals * preset.meta_steps // (1 if method.startswith("ftml") else 10)


def _more_columns(preset: Preset, stream: TaskStream | First) -> list[str]:
    """The columns beyond those of every run, in the order of `Record.more`."""
    names = ["loss", "accuracy"] if takes_labels(preset.loss) else ["loss"]
    columns = [f"loss_{part}" for part in preset.parts]
    columns += [f"{name}_{number}" for number in preset.steps[1:] for name in names]
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in preset.model().modules()):
        columns += [f"{name}_task" for name in names]
    return columns + (["new_datapoints"] if stream[0].ids is not None else [])


def _config(experiment: Experiment, preset: Preset) -> dict[str, Any]:
    """Everything that determines a run."""
    engines = {}
    for method in experiment.methods or ():
        engines[method] = Engine(experiment.engine, planned_updates(preset, method), experiment.device).mode
    return {
        **dataclasses.asdict(experiment),
        "engines": engines,
        "threads": torch.get_num_threads(),
        "settings": _settings(preset, experiment.methods or ()),
        "panels": preset.panels,
        "error_name": preset.error_name,
        "statistics": "batch",
        "hardware": machine.hardware(experiment.device),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }


def _settings(preset: Preset, methods: Iterable[str]) -> dict[str, Any]:
    """What the preset fixes."""
    fields = ("meta_steps", "reveal", "reveals", "gamma", "steps")
    return {
        **{name: getattr(preset, name) for name in fields},
        "loss": getattr(preset.loss, "keywords", {}),
        "learners": {name: getattr(preset.known[name], "keywords", {}) for name in methods},
        **({"parts": {name: str(of) for name, of in preset.parts.items()}} if preset.parts else {}),
    }


def _check_unchanged(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with other settings, and say where the machine or the software is another."""
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


def _check_names(kind: str, names: Sequence[str], known: dict[str, Any]) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"unknown {kind} {name!r}{hint} There are {', '.join(known)}")
    if not names:
        raise ValueError(f"name at least one {kind} of {', '.join(known)}")
