"""The result of a search for settings, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table


def print_choice(chosen: Mapping[str, Mapping[str, Any]], trials: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print the best trial of each method, and the numbers of trials that finished, were pruned and failed."""
    table = Table(
        Column("method", no_wrap=True),
        *("finished", "pruned", "failed", "first trial", "best trial", "settings"),
        title="the error of the first trial, which has the present settings if they are in range, and of the best",
    )
    for method, best in chosen.items():
        states = Counter(trial["state"] for trial in trials[method])
        first = trials[method][0]["error"]
        settings = ", ".join(f"{name}={value}" for name, value in best["settings"].items())
        errors = ["–" if first is None else f"{first:.4g}", f"{best['error']:.4g}"]
        counts = [str(states[state]) for state in ("finished", "pruned", "failed")]
        table.add_row(escape(method), *counts, *errors, escape(settings))
    Console(width=None if Console().is_terminal else 140).print(table)
