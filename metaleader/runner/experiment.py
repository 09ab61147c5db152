"""Runs of experiments: running one, resuming one that was stopped, and joining runs of single methods."""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from metaleader.distributed.group import Group, current_group
from metaleader.engine.determinism import seeded
from metaleader.engine.engine import Engine
from metaleader.evaluate import Record, can_try, play_together, preload
from metaleader.experiments.description import changes
from metaleader.experiments.files import Source
from metaleader.learners import Learner
from metaleader.learners.measure import has_labels
from metaleader.losses import takes_labels, unsmoothed
from metaleader.report.figures import draw_figures
from metaleader.report.loaded import load_runs
from metaleader.report.page import report_runs
from metaleader.report.progress import Display, result_table
from metaleader.report.tensorboard import TensorBoard
from metaleader.runner.plan import Plan, RunOptions, planned
from metaleader.runner.processes import agree_on_run, check_same_options, output_of_first, was_restarted
from metaleader.runs.folder import Config
from metaleader.runs.join import join_runs
from metaleader.runs.run import Run
from metaleader.runs.shared import SharedRun, open_run
from metaleader.streams.base import View
from metaleader.system import machine
from metaleader.system.builders import located
from metaleader.tasks import TaskStream, rng

# Called with the method, the seed and the record.
OnRecord = Callable[[str, int, Record], object]


def run_experiment(options: RunOptions, folder: Path, on_record: OnRecord | None = None) -> None:
    """Run all methods of an experiment over the same streams into a new run folder; then print and draw the results.

    Args:
        options: the experiment and the other arguments of `metaleader run`.
        folder: the run folder.
        on_record: called with the method, the seed and the record, once for each record, when its round is saved.

    Raises:
        ValueError: for an unknown experiment, method or setting, or a value that is refused; nothing is then written.
    """
    group = current_group()
    with output_of_first(group):
        plan = planned(options)
        if plan.experiment.threads is not None or (plan.options.shards > 1 and plan.options.device == "cpu"):
            # One thread, so that the records do not depend on the number of processes.
            machine.set_threads(plan.experiment.threads or 1)
        agree_on_run(group, plan, _config(plan))
        if was_restarted(group, folder):
            with open_run(folder, None, group) as run:
                check_same_options(_options_of(run.config, plan.source.file), plan.options, folder)
            resume_experiment(folder, plan.source.file, on_record)
            return
        with open_run(folder, _config(plan), group) as run:
            _play(run, plan, on_record)
        _finish_first(group, folder)


def resume_experiment(folder: Path, file: Path | None = None, on_record: OnRecord | None = None) -> None:
    """Continue a run that was stopped; then print and draw the results, also those of a finished run.

    Args:
        folder: the run folder.
        file: the experiment file, if it has moved; it must be unchanged.
        on_record: as in `run_experiment`.
    """
    group = current_group()
    with output_of_first(group):
        with open_run(folder, None, group) as run:
            found = experiment_file(folder, run.config, file, run.finished)
            if found is not None and not found.exists() and run.finished():
                print(f"note: the experiment file {found} is missing")
            else:
                plan = resumed_plan(run.config, found)
                machine.set_threads(run.config["threads"])
                if not run.finished():
                    _play(run, plan, on_record)
                    _finish_first(group, folder)
                    return
            run.check_records()
            print(f"{folder} is finished: there is nothing to resume")
        _finish_first(group, folder)


def resumed_plan(config: Config, file: Path | None) -> Plan:
    """The plan of a run that exists; raises ValueError if its experiment has changed."""
    plan = planned(_options_of(config, file), config["settings"])
    _check_unchanged(config, plan)
    return plan


def join_experiments(folders: Sequence[Path], folder: Path) -> None:
    """Join finished runs of different methods into a new run folder; then print and draw the results."""
    join_runs(folders, folder)
    _finish(folder)


def _play(run: Run | SharedRun, plan: Plan, on_record: OnRecord | None) -> None:
    """Play all rounds that the run has not played yet."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        seeds = range(plan.options.first_seed, plan.options.first_seed + plan.options.seeds)
        streams = [View(plan.stream(seed), range(plan.tasks)) for seed in seeds]
        run.rewind(len(streams[0]), _more_columns(plan, streams[0]))
        labels = {name: style["label"] for name, style in plan.experiment.styles(plan.methods).items()}
        folder = run.folder / "tensorboard" if plan.options.tensorboard else None
        with (
            Display(Console(), plan.experiment.error_name, len(streams[0]), labels) as display,
            TensorBoard(folder, plan.experiment.error_name, len(seeds)) as tensorboard,
        ):
            for method in run.config["methods"]:
                for seed, record in _play_method(method, run, plan, streams, display):
                    tensorboard(method, seed, record)
                    if on_record is not None:
                        on_record(method, seed, record)
    except KeyboardInterrupt:
        print(f"stopped; every finished round is saved. Continue with: metaleader resume {run.folder}", flush=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _play_method(
    method: str, run: Run | SharedRun, plan: Plan, streams: Sequence[View], display: Display
) -> Iterator[tuple[int, Record]]:
    """Play the rounds of a method; yields the seed and the record of each that has been saved."""
    saved = run.checkpoint(method)
    played = 0 if saved is None else saved["rounds_played"]
    if played == len(streams[0]):
        return
    experiment, started = plan.experiment, time.perf_counter()
    # The checkpoint has the mode in use: a compiled engine may have fallen back to eager.
    mode: Any = run.config["engines"][method] if saved is None else saved["state"]["engine"]
    engine = Engine(mode, device=plan.options.device)
    first = plan.options.first_seed
    learners = [
        plan.learner(method, seed, device=plan.options.device, engine=engine)
        for seed in range(first, first + len(streams))
    ]
    has_state = all(isinstance(learner, Learner) for learner in learners)
    line = f"engine {engine.mode}"
    if has_state:
        updates = plan.tasks * (experiment.reveals or 0) * learners[0].updates_per_reveal
        line = f"{updates} updates, {line}"
    display.begin(method, played, line if saved is None else f"{line}, from round {played + 1} on")
    play = functools.partial(play_round, method, plan, learners, streams)
    if saved is not None and has_state:
        for learner, stream, state in zip(learners, streams, saved["state"]["learners"], strict=True):
            preload(learner, stream, played, experiment.reveal * (experiment.reveals or 1))
            learner.load_state_dict(state)
    elif saved is not None:
        # The state of other objects is not saved: play the saved rounds again, which draws the same.
        for t in range(played):
            for _ in play(t):
                pass
    for t in range(played, len(streams[0])):
        records: list[list[Record]] = []
        for reveal in play(t):
            records.append(reveal)
            display.reveal(reveal, len(records) / len(experiment.measured()))
        states = [learner.state_dict(data=False) for learner in learners] if has_state else []
        state = {"engine": engine.mode, "learners": states}
        seconds = time.perf_counter() - started
        run.save(method, t + 1, records, state, seconds, machine.peak_mb(plan.options.device))
        display.round_saved(seconds)
        yield from ((first + r, record) for reveal in records for r, record in enumerate(reveal))
        started = time.perf_counter()


def play_round(
    method: str, plan: Plan, learners: Sequence[Any], streams: Sequence[View], t: int
) -> Iterator[list[Record]]:
    """Play one round. A user's code that draws from global generators draws the same in a run that is resumed."""
    experiment = plan.experiment
    start = int(rng(f"round of {method}", plan.options.first_seed, t).integers(2**62))
    with seeded(start), located(f"method {method!r} fails in round {t}"):
        yield from play_together(
            learners,
            [stream[: t + 1] for stream in streams],
            experiment.reveal,
            reveals=experiment.reveals,
            gamma=experiment.gamma,
            steps=experiment.steps,
            measure_at=experiment.measure_at or None,
            before_at=experiment.sizes_before() if all(map(can_try, learners)) else (),
            regret=plan.options.regret,
            loss=unsmoothed(experiment.loss),
            parts=experiment.parts,
            start=t,
        )


def _finish_first(group: Group, folder: Path) -> None:
    if group.rank == 0:
        _finish(folder)


def _finish(folder: Path) -> None:
    """Draw the figures, print the table and, as the last line, the path of the report."""
    (run,) = load_runs([folder])
    draw_figures(run.records, run.sizes, folder, run.error_name, run.gamma, run.config["styles"])
    Console().print(result_table(run))
    rounds = {record["round"] for record in run.records}
    for size in run.sizes:
        if absent := len(rounds - {record["round"] for record in run.records if record["datapoints"] == size}):
            print(
                f"note: {absent} of {len(rounds)} tasks were not measured after {size} datapoints, and are left out"
                " there; tasks of unequal sizes are compared at the sizes that all have: set reveals"
            )
    if run.config["regret"] and not (folder / "regret.csv").exists():
        print(f"regret, which needs comparators in hindsight: metaleader regret {folder}")
    print(f"records: {folder / 'records.csv'}")
    print(report_runs([folder]).resolve())


def _more_columns(plan: Plan, stream: TaskStream) -> list[str]:
    """The columns that not every run has, in the order of `Record.more`."""
    experiment, first = plan.experiment, stream[0]
    has_accuracy = takes_labels(experiment.loss) or has_labels(first.test)
    names = ["loss", "accuracy"] if has_accuracy else ["loss"]
    columns = [f"loss_{name}" for name in experiment.parts]
    columns += [f"{name}_{number}" for number in experiment.steps[1:] for name in names]
    if experiment.sizes_before():  # whatever the methods, so that runs of single methods can be joined
        columns += [f"{name}_before" for name in names]
    if any(getattr(learner, "has_batch_norm", False) for learner in plan.samples.values()):
        columns += [f"{name}_task" for name in names]
    return columns + (["new_datapoints"] if first.ids is not None else [])


def _config(plan: Plan) -> dict[str, Any]:
    """Everything that determines a run."""
    options, experiment, source = plan.options, plan.experiment, plan.source
    return {
        **dataclasses.asdict(options),
        "experiment": source.name,
        "file": None if source.file is None else str(source.file),
        "sha256": source.sha256,
        "imports": source.imports,
        "engines": {method: plan.mode(method) for method in plan.methods},
        "threads": torch.get_num_threads(),
        "settings": plan.description,
        "styles": experiment.styles(plan.methods),
        "panels": list(experiment.sizes()),
        "error_name": experiment.error_name,
        "claims": [claim.plain() for claim in experiment.claims],
        "statistics": "batch",
        "hardware": machine.hardware(options.device),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }


def _options_of(config: Config, file: Path | None) -> RunOptions:
    given: dict[str, Any] = {field.name: config[field.name] for field in dataclasses.fields(RunOptions)}
    given |= {"methods": tuple(given["methods"]), "set": tuple(given["set"])}
    if file is not None:
        given["experiment"] = str(file)
    return RunOptions(**given)


def experiment_file(
    folder: Path, config: Mapping[str, Any], given: Path | None, finished: Callable[[], bool] = lambda: False
) -> Path | None:
    """The experiment file of a folder: the one named, or where it was; None for a preset.

    Args:
        folder: a folder of a run, or of a grid.
        config: its configuration.
        given: the file that was named.
        finished: whether it is finished; the file may then be missing.
    """
    was = config["file"]
    if was is None:
        if given is not None:
            raise ValueError(f"{folder} is a run of the preset {config['experiment']!r}; leave --experiment out")
        return None
    if given is not None:
        return given
    file = Path(was)
    if not file.is_absolute() or folder.resolve() in file.resolve().parents:
        raise ValueError(
            f"{was}, the experiment of {folder}, is in the run folder, from which nothing is executed unless it is"
            f" named: metaleader resume {folder} --experiment {was}"
        )
    if not file.exists() and not finished():
        raise FileNotFoundError(
            f"{was}, the experiment of {folder}, is missing; name it with"
            f" `metaleader resume {folder} --experiment FILE`"
        )
    return file


def _check_unchanged(then: Config, plan: Plan) -> None:
    """Raise ValueError if the experiment has changed; print a note if the machine or the software has."""
    what = f"the preset {then['experiment']!r}" if then["file"] is None else str(plan.source.file)
    versions = then["versions"] if isinstance(then["versions"], dict) else {}
    same_torch = versions.get("torch") == machine.versions()["torch"]
    changed = changes(then, plan.description, plan.tasks, plan.experiment, plan.methods, same_torch)
    if changed:
        raise ValueError(f"{what} has changed since the run began: {'; '.join(changed)}; start a new run")
    check_code(what, then, plan.source)
    now = json.loads(json.dumps(_place(plan)))
    for name in ("hardware", "versions", "commit"):
        if then[name] != now[name]:
            print(f"note: {name} was {then[name]}, now {now[name]}: numbers may differ in the last bits")


def check_code(what: str, then: Mapping[str, Any], source: Source) -> None:
    """Raise ValueError if an experiment file, or a module beside it, has another hash than in a configuration."""
    hashes = {} if source.file is None else {source.file.name: (then["sha256"], source.sha256)}
    names = sorted({*then["imports"], *source.imports})
    hashes |= {name: (then["imports"].get(name), source.imports.get(name)) for name in names}
    for name, (before, now) in hashes.items():
        if before != now:
            raise ValueError(
                f"{what} has changed since the run began: no setting differs, but the code of {name} does (SHA-256"
                f" {str(before)[:12]}, now {str(now)[:12]}); restore it, or start a new run"
            )


def _place(plan: Plan) -> dict[str, Any]:
    return {
        "hardware": machine.hardware(plan.options.device),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }
