"""`metaleader list`: the presets, their sizes and how long they took."""

from __future__ import annotations

from typing import get_args

from rich.console import Console
from rich.table import Table


def list_presets() -> int:
    """List the presets: what each is, its methods, and its size and time under each schedule.

    Returns:
        The exit status.
    """
    from metaleader.presets import MACHINES, PRESETS, TIMES, Schedule

    table = Table(title="metaleader run PRESET: datapoints a task, updates a method, time of all methods")
    for head in ("preset", "schedule"):
        table.add_column(head, no_wrap=True)
    for head in ("tasks", "datapoints", "updates"):
        table.add_column(head, justify="right")
    table.add_column("time")
    for name, make in PRESETS.items():
        for schedule in get_args(Schedule):
            preset = make(schedule)
            updates = preset.tasks * preset.reveals * preset.meta_steps
            sizes = (preset.tasks, preset.reveal * preset.reveals, updates)
            measured = TIMES.get((name, schedule), "not measured")
            table.add_row(name if schedule == "standard" else "", schedule, *(f"{size:,}" for size in sizes), measured)
        table.add_section()
    Console().print(table)
    for name, machine in MACHINES.items():
        print(f"{name}: {machine}")
    for name, make in PRESETS.items():
        preset = make("standard")
        extras = f"; when named: {', '.join(preset.extras)}" if preset.extras else ""
        print(f"{name}: {preset.summary}. Methods: {', '.join(preset.methods)}{extras}")
    return 0
