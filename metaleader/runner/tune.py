"""Tuning: a search for the settings of each method with Optuna, with the same number of trials for all methods.

A trial plays the streams of seeds that no result uses. The draws of a trial depend on the trials before it and on its
number alone, and each finished trial is a line of `trials.jsonl`: a search that is killed continues as if it had not
been.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from metaleader.engine.engine import Engine, Mode
from metaleader.experiments.ranges import Range, search_space
from metaleader.experiments.settings import with_settings
from metaleader.report.records import record_error
from metaleader.report.tune import print_choice
from metaleader.runner.experiment import check_code, experiment_file, play_round
from metaleader.runner.grid import locked
from metaleader.runner.plan import METHOD_NAMES, Plan, RunOptions, find_experiment, make_learner, planned
from metaleader.runner.trials import Trials, print_trial
from metaleader.runs.folder import Schedule
from metaleader.streams.base import View
from metaleader.system.builders import explained
from metaleader.system.files import make_folder, write_atomic
from metaleader.system.machine import set_threads
from metaleader.tasks import rng

_FORMAT = 1
# The first trials are drawn at random, and none is pruned before as many have finished.
_STARTUP = 4


def _no_default(metavar: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class TuneOptions:
    """The arguments of `metaleader tune`."""

    experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[EXPERIMENT]")] = "rainbow-digits"
    """An experiment file, or a preset."""
    search: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, _no_default("NAME=RANGE")] = ()
    """A range of a setting of a method: ftml.inner_lr=log:0.001..0.3, all.inner_steps=1..10, ftml.optimizer=adam,sgd;
    repeat it for several."""
    methods: Annotated[tuple[str, ...] | None, METHOD_NAMES, _no_default("METHOD,...")] = None
    """Names of methods; the default methods of the experiment if not given. Each needs a range."""
    trials: int = 20
    """Trials of each method."""
    seeds: int = 2
    """Number of seeds of a trial."""
    first_seed: int = 1000
    """The first seed; results should use others."""
    at: Annotated[int | None, _no_default("N")] = None
    """Compare the errors after N datapoints; the mean over all reveals if not given."""
    schedule: Schedule = "standard"
    """As in `metaleader run`."""
    tasks: Annotated[int | None, _no_default("INT")] = None
    """Play this many tasks in a trial."""
    device: str = "auto"
    """cpu, cuda, or auto for the GPU if there is one."""
    engine: Mode = "auto"
    """As in `metaleader run`; auto may compile anew for each number of inner steps."""
    data: Annotated[str | None, _no_default("DIR")] = None
    """The folder with data sets, if the experiment needs one."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, _no_default("NAME=VALUE")] = ()
    """Change a setting in all trials, and in the experiment that is written."""
    prune: bool = True
    """After half of the tasks, stop a trial whose error exceeds the median of the earlier trials of its method."""

    def run_options(self, methods: tuple[str, ...] | None, *settings: str) -> RunOptions:
        """The options of a run with these settings."""
        names = {field.name for field in dataclasses.fields(RunOptions)}
        shared = {name: value for name, value in vars(self).items() if name in names}
        return RunOptions(**{**shared, "methods": methods, "set": (*self.set, *settings)})


def run_tune(options: TuneOptions, folder: Path) -> Path:
    """Search for the best settings of each method in a new folder.

    Args:
        options: the experiment, the ranges, the budget and the seeds.
        folder: for the trials, and for `tuned.py`, an experiment with the chosen settings.

    Returns:
        The path of that experiment.

    Raises:
        ValueError: for an unknown setting, a range that is not valid, or if no trial of a method has finished.
        ImportError: if Optuna is not installed.
    """
    _optuna()
    if options.trials < 1:
        raise ValueError(f"--trials must be at least 1, got {options.trials}")
    plan = planned(options.run_options(options.methods))
    _check_values(options, plan, search_space(plan.experiment, options.search, plan.methods))
    _check_at(options.at, plan)
    if any((folder / name).exists() for name in ("tune.json", "config.json", "grid.json")):
        raise ValueError(
            f"{folder} is not empty: continue it with `metaleader resume {folder}`, or choose another with --out"
        )
    source = plan.source
    config = {
        "format": _FORMAT,
        "experiment": source.name,
        "file": None if source.file is None else str(source.file),
        "sha256": source.sha256,
        "imports": source.imports,
        "threads": torch.get_num_threads() if plan.experiment.threads is None else plan.experiment.threads,
        "options": dataclasses.asdict(dataclasses.replace(options, methods=plan.methods, data=plan.options.data)),
    }
    try:
        make_folder(folder)
    except OSError as error:
        raise OSError(f"cannot write the folder {folder}: {error.strerror}; choose another") from error
    with locked(folder):
        write_atomic(folder / "tune.json", json.dumps(config, indent=2).encode() + b"\n")
        return _search(folder, config, options)


def resume_tune(folder: Path, file: Path | None = None) -> Path:
    """Continue a search; the result is the same as without the stop. Returns the path of the chosen experiment."""
    _optuna()
    path = folder / "tune.json"
    try:
        config = json.loads(path.read_bytes())
        if config["format"] != _FORMAT:
            raise ValueError(f"its format is {config['format']!r}, this release reads {_FORMAT}")
        given = config["options"]
        given |= {name: tuple(given[name]) for name in ("methods", "set", "search")}
        options = TuneOptions(**given)
        if not {"file", "sha256", "imports", "threads", "experiment"} <= config.keys():
            raise ValueError("a key is missing")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a search ({error!r}); use an intact copy") from error
    found = experiment_file(folder, config, file)
    if found is not None:
        options = dataclasses.replace(options, experiment=str(found.absolute()))
        config["file"] = options.experiment
    check_code(config["experiment"], config, find_experiment(options.experiment, options.schedule))
    with locked(folder):
        return _search(folder, config, options)


def is_tune(folder: Path) -> bool:
    """Whether a folder is that of a search."""
    return (folder / "tune.json").is_file()


def _search(folder: Path, config: dict[str, Any], options: TuneOptions) -> Path:
    """Play the trials that are missing, and write the experiment with the best settings."""
    set_threads(config["threads"])
    plan = planned(options.run_options(options.methods))
    space = search_space(plan.experiment, options.search, plan.methods)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    streams = [View(plan.stream(seed), range(plan.tasks)) for seed in seeds]
    trials = Trials(folder / "trials.jsonl")
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for method in plan.methods:
            for number in range(len(trials.of(method)), options.trials):
                play = functools.partial(_play, method, options, streams)
                trial = _trial(method, number, space[method], trials.of(method), options, plan.tasks, play)
                trials.append(trial)
                best = min((t["error"] for t in trials.of(method) if t["error"] is not None), default=None)
                print_trial(trial, options.trials, best)
    except KeyboardInterrupt:
        print(f"stopped; every finished trial is saved. Continue with: metaleader resume {folder}", flush=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    return _write_choice(folder, config, options, plan, trials)


def _trial(
    method: str,
    number: int,
    ranges: dict[str, tuple[Range, Any]],
    before: Sequence[dict[str, Any]],
    options: TuneOptions,
    rounds: int,
    play: Callable[[list[str]], Iterator[float]],
) -> dict[str, Any]:
    """Choose the settings of a trial from those before, and play it."""
    study = _study(method, number, ranges, before, rounds)
    if number == 0 and (present := {name: r.text_of(v) for name, (r, v) in ranges.items() if r.has(v)}):
        typed = {n: text if ranges[n][0].choices else float(text) for n, text in present.items()}
        study.enqueue_trial({n: int(v) if ranges[n][0].integer else v for n, v in typed.items()})
    trial = study.ask({name: _distribution(r) for name, (r, _) in ranges.items()})
    values = {name: v if ranges[name][0].choices else ranges[name][0].nearest(v) for name, v in trial.params.items()}
    found: dict[str, Any] = {"method": method, "trial": number, "settings": values, "state": "finished", "error": None}
    errors: list[float] = []
    try:
        for error in play([f"{method}.{name}={value}" for name, value in values.items()]):
            if not math.isfinite(error):
                raise ValueError(f"the error is {error}")
            errors.append(error)
            trial.report(error, len(errors))
            if options.prune and len(errors) < rounds and trial.should_prune():
                found["state"] = "pruned"
                break
    except ValueError as error:  # the loss diverges, or a setting is refused
        return {**found, "state": "failed", "errors": [], "reason": str(error)}
    return {**found, "error": errors[-1] if found["state"] == "finished" else None, "errors": errors}


def _study(
    method: str, number: int, ranges: dict[str, tuple[Range, Any]], before: Sequence[dict[str, Any]], rounds: int
) -> Any:
    """A study with the trials before; its draws depend on the number of the trial."""
    optuna = _optuna()
    seed = int(rng(f"tune {method}", number).integers(2**32))
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=_STARTUP, n_warmup_steps=rounds // 2)
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    states = optuna.trial.TrialState
    for trial in before:
        study.add_trial(
            optuna.trial.create_trial(
                # A trial that failed counts as one that was pruned at once, which the sampler takes for the worst.
                state=states.COMPLETE if trial["state"] == "finished" else states.PRUNED,
                value=trial["error"] if trial["state"] == "finished" else None,
                params=trial["settings"],
                distributions={name: _distribution(r) for name, (r, _) in ranges.items()},
                intermediate_values=dict(enumerate(trial["errors"], 1)),
            )
        )
    return study


def _distribution(values: Range) -> Any:
    optuna = _optuna()
    if values.choices:
        return optuna.distributions.CategoricalDistribution(values.choices)
    if values.integer:
        return optuna.distributions.IntDistribution(int(values.low), int(values.high), log=values.log)
    return optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)


def _play(method: str, options: TuneOptions, streams: Sequence[View], settings: list[str]) -> Iterator[float]:
    """Play a trial; yields after each round the mean error over seeds and the last third of the rounds so far."""
    plan = planned(options.run_options(options.methods, *settings))
    engine = Engine(options.engine, plan.updates(method), plan.options.device)
    first = options.first_seed
    learners = [
        plan.learner(method, seed, device=plan.options.device, engine=engine)
        for seed in range(first, first + len(streams))
    ]
    means: list[float] = []
    for t in range(len(streams[0])):
        reveals = list(play_round(method, plan, learners, streams, t))
        records = [record for reveal in reveals for record in reveal if options.at in (None, record.datapoints)]
        means.append(float(np.mean([record_error(vars(record)) for record in records])))
        yield float(np.mean(means[-math.ceil(len(means) / 3) :]))


def _write_choice(folder: Path, config: dict[str, Any], options: TuneOptions, plan: Plan, trials: Trials) -> Path:
    """Write the experiment with the best settings of each method, and print them."""
    chosen = {}
    for method in plan.methods:
        finished = [trial for trial in trials.of(method) if trial["state"] == "finished"]
        if not finished:
            reason = trials.of(method)[-1].get("reason", "pruned")
            raise ValueError(f"no trial of {method} has finished; the last one: {reason}; change --search or --set")
        chosen[method] = min(finished, key=lambda trial: trial["error"])
    settings = [*options.set]
    settings += [f"{method}.{name}={value}" for method, t in chosen.items() for name, value in t["settings"].items()]
    seeds = f"seeds {options.first_seed} to {options.first_seed + options.seeds - 1}"
    lines = [
        f'"""The experiment {config["experiment"]} with settings chosen by `metaleader tune`.',
        "",
        f"{options.trials} trials per method, {plan.tasks} tasks, {seeds}. The trials are in trials.jsonl.",
        '"""',
        "",
        "from metaleader.runner.tuned import tuned_experiment",
        "",
        "",
        'def experiment(schedule="standard"):' if config["file"] is None else "def experiment():",
        "    return tuned_experiment(",
        f"        {_quoted(config['file'] or config['experiment'])},",
        "        settings=[",
        *(f"            {_quoted(text)}," for text in settings),
        "        ],",
        f"        methods={_quoted(plan.methods)},",
        *(["        schedule=schedule,"] if config["file"] is None else []),
        *([f"        sha256={_quoted(config['sha256'])},"] if config["sha256"] else []),
        *([f"        imports={_quoted(config['imports'])},"] if config["imports"] else []),
        "    )",
    ]
    path = folder / "tuned.py"
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    print_choice(chosen, {method: trials.of(method) for method in plan.methods})
    print(f"trials: {trials.path}")
    schedule = "" if options.schedule == "standard" else f" --schedule {options.schedule}"
    print(f"run it with: metaleader run {path}{schedule} --seeds 10")
    print(path.resolve())
    return path


def _quoted(value: Any) -> str:
    """A text, or a list or dictionary of texts, as Python source."""
    return json.dumps(value, ensure_ascii=False)


def _check_values(options: TuneOptions, plan: Plan, space: Mapping[str, Mapping[str, tuple[Range, Any]]]) -> None:
    """Reject settings that are also given by --set, and ranges of numbers of which a method refuses some."""
    for method, ranges in space.items():
        for name, (values, _) in ranges.items():
            with explained(f"--search {method}.{name}"):
                for value in values.examples():
                    texts = [*options.set, f"{method}.{name}={value}"]
                    experiment = with_settings(plan.source.experiment, texts, plan.methods)
                    if not values.choices:  # a choice that is refused is a trial that fails
                        make_learner(experiment, method, seed=options.first_seed)


def _check_at(at: int | None, plan: Plan) -> None:
    reveals, reveal = plan.experiment.reveals or 1, plan.experiment.reveal
    if at is not None and at not in (*range(reveal, reveal * reveals + 1, reveal), *plan.experiment.sizes()):
        raise ValueError(
            f"--at must be a number of datapoints that is measured, {reveal} to {reveal * reveals}, got {at}"
        )


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise ImportError("metaleader tune needs Optuna; install metaleader[tune]") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
