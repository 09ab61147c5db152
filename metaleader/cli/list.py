"""`metaleader list`: the presets, their sizes, times and methods."""

from __future__ import annotations

from typing import get_args

from rich.console import Console
from rich.table import Column, Table

from metaleader.methods import METHODS
from metaleader.presets import MACHINES, PRESETS, TIMES, Schedule


def list_presets() -> None:
    """List the presets: size and time under each schedule, and methods."""
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
            updates = preset.tasks * preset.reveals * preset.meta_steps
            numbers = (preset.tasks, preset.reveal * preset.reveals, updates)
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
