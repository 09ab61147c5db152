"""Runs on several processes: what they must agree on, and how they go on after torchrun has restarted them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metaleader.distributed.agreement import agree
from metaleader.distributed.group import Group, restarts
from metaleader.runner.plan import Plan, RunOptions

# What may differ between processes
_OWN = ("data", "file", "hardware", "experiment")


@contextlib.contextmanager
def output_of_first(group: Group) -> Iterator[None]:
    """Let only the first process print."""
    if group.rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def agree_on_run(group: Group, plan: Plan, config: dict[str, Any]) -> None:
    """Raise ValueError on all processes if their settings, versions or code differ, or do not fit their number."""
    agree(group, {name: value for name, value in config.items() if name not in _OWN}, "the run")
    shards, size = plan.options.shards, group.size
    if shards % size:
        raise ValueError(
            f"--shards {shards}: the number of processes must divide it, and there are {size}; use --shards"
            f" {-(-shards // size) * size}, or another number of processes"
        )


def was_restarted(group: Group, folder: Path) -> bool:
    """Whether torchrun has restarted the processes of a run that has begun."""
    return group.exchange(restarts() > 0 and (folder / "records.csv").exists(), "the run folder")[0]


def check_same_options(then: RunOptions, now: RunOptions, folder: Path) -> None:
    """Refuse to continue a run of other options."""
    for field in dataclasses.fields(RunOptions):
        before, after = getattr(then, field.name), getattr(now, field.name)
        if before != after and field.name not in _OWN:
            raise ValueError(
                f"{folder} already holds another run: its {field.name} is {before!r}, not {after!r}; choose another"
                " folder with --out"
            )
