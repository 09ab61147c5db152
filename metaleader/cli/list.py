"""`metaleader list`: the presets and their sizes."""

from __future__ import annotations

from typing import get_args

from rich.console import Console
from rich.table import Table


def list_presets() -> int:
    """List the presets: what each is, its methods, and its size under each schedule.

    Returns:
        The exit status.
    """
    from metaleader.presets import PRESETS, Schedule

    table = Table("preset", "schedule", "tasks", "datapoints a task", "updates a method", title="metaleader run PRESET")
    for name, make in PRESETS.items():
        for schedule in get_args(Schedule):
            preset = make(schedule)
            updates = preset.tasks * preset.reveals * preset.meta_steps
            sizes = (preset.tasks, preset.reveal * preset.reveals, updates)
            table.add_row(name if schedule == "standard" else "", schedule, *(f"{size:,}" for size in sizes))
        table.add_section()
    Console().print(table)
    for name, make in PRESETS.items():
        preset = make("standard")
        print(f"{name}: {preset.summary}. Methods: {', '.join(preset.methods)}")
    return 0
