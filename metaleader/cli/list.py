"""`metaleader list`: the presets, their sizes, times and methods; or the methods and settings of one experiment."""

from __future__ import annotations

import json
from typing import Annotated, get_args

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from metaleader.experiments.experiment import Experiment
from metaleader.experiments.settings import settings_of
from metaleader.methods import METHODS
from metaleader.presets import MACHINES, PRESETS, TIMES
from metaleader.runner.plan import find_experiment
from metaleader.runs.folder import Schedule
from metaleader.system.builders import name_of, plain


def list_experiments(
    experiment: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[EXPERIMENT]", help_behavior_hint="")
    ] = None,
) -> None:
    """List the presets: size and time under each schedule, and methods; or all settings of one experiment.

    Args:
        experiment: a preset or an experiment file: list its methods and settings, as --set changes them.
    """
    if experiment is None:
        _list_presets()
    else:
        _list_settings(find_experiment(experiment).experiment)


def _list_settings(experiment: Experiment) -> None:
    console = Console()
    if experiment.summary:
        print(experiment.summary)
    methods = Table("method", "label", "class", title="--methods: an extra method runs only if it is named")
    styles = experiment.styles(list(experiment.all_methods))
    for name, method in experiment.all_methods.items():
        extra = " (extra)" if name in experiment.extras else ""
        methods.add_row(name + extra, escape(styles[name]["label"]), escape(name_of(method.make)))
    console.print(methods)
    print("--set NAME=VALUE; a setting of several methods is also all.NAME, and that of the stream needs no `stream.`:")
    for path, value in settings_of(experiment, list(experiment.all_methods)).items():
        print(f"{path}={json.dumps(plain(value), ensure_ascii=False)}")


def _list_presets() -> None:
    console = Console()
    sizes = Table(
        Column("preset", no_wrap=True),
        Column("schedule", no_wrap=True),
        *(Column(header, justify="right") for header in ("tasks", "datapoints", "updates")),
        "time",
        title="metaleader run PRESET: datapoints per task, updates per method, time of all default methods",
    )
    for name, make in PRESETS.items():
        for schedule in get_args(Schedule):
            preset = make(schedule)
            updates = (preset.tasks or 0) * (preset.reveals or 0) * preset.meta_steps
            numbers = (preset.tasks or 0, preset.reveal * (preset.reveals or 0), updates)
            time = TIMES.get((name, schedule), "not measured")
            sizes.add_row(name if schedule == "standard" else "", schedule, *(f"{n:,}" for n in numbers), time)
        sizes.add_section()
    console.print(sizes)
    for name, machine in MACHINES.items():
        print(f"{name}: {machine}")
    presets = {name: make("standard") for name, make in PRESETS.items()}
    headers = ["method", *(name.replace("-", "-\n") for name in presets)]
    methods = Table(
        *(Column(header, no_wrap=True) for header in headers),
        title="--methods: an extra method runs only if it is named",
    )
    for name in dict.fromkeys([*METHODS, *(name for preset in presets.values() for name in preset.all_methods)]):
        cells = ["default" if name in p.methods else "extra" if name in p.extras else "–" for p in presets.values()]
        methods.add_row(name, *cells)
    console.print(methods)
    for name, preset in presets.items():
        print(f"{name}: {preset.summary}")
