"""`metaleader theory`: check the paper's theory numerically, and draw it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from metaleader.runs.folder import csv_lines
from metaleader.system.files import write_atomic
from metaleader.theory import figures
from metaleader.theory.checks import (
    Check,
    logistic_example,
    logistic_scan,
    newton_checks,
    quadratic_checks,
    regret_checks,
    theorem_checks,
)
from metaleader.theory.convexity import Constants, StepSizeWarning, quadratic_constants
from metaleader.theory.families import BETA, FAMILIES, draw
from metaleader.theory.online import Simulation, simulate
from metaleader.theory.quadratics import Quadratics


def theory(out: Path = Path("runs/theory"), *, rounds: int = 2000, seeds: int = 5, alpha_factor: float = 1.0) -> int:
    """Check the closed forms of appendix A, Theorem 1, corollaries 1 and 2 and the regret of Eq. 2, and draw them.

    Args:
        out: The folder for regret.csv and the figures; created if missing.
        rounds: T, the number of rounds, at least 32; checks of growth are designed for 1,000 or more, and may fail
            with fewer.
        seeds: Number of streams of each family.
        alpha_factor: The inner step size as a multiple of the bound of Theorem 1. Above 1 the theorem does not apply,
            and checks may fail.

    Returns:
        The exit status: 1 if a check fails.
    """
    if rounds < 32 or seeds < 1:
        raise ValueError(f"rounds (T) must be at least 32 and seeds at least 1, got {rounds} and {seeds}")
    if not 0 < alpha_factor < float("inf"):
        raise ValueError(f"alpha_factor must be a positive number, got {alpha_factor}")
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise PermissionError(f"cannot write into {out}; choose another folder with --out")
    console = Console()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StepSizeWarning)
        simulations = {name: _play(name, rounds, seeds, alpha_factor) for name in FAMILIES}
        sections = [list(quadratic_checks(alpha_factor)), list(theorem_checks(alpha_factor))]
        sections += [list(regret_checks({name: played})) for name, played in simulations.items()]
        sections += [list(newton_checks(alpha_factor, max(32, min(256, rounds // 8))))]
    for message in sorted({str(warning.message) for warning in caught}):
        console.print(f"warning: {message}", style="yellow", soft_wrap=True)
    written = [out / "regret.csv"]
    write_atomic(written[0], _csv(simulations))
    *_, logistic_constants = logistic_example()
    for name, figure in (
        ("regret", figures.regret_figure(simulations)),
        ("minimisers", figures.minimiser_figure()),
        ("convexity", figures.convexity_figure(*logistic_scan(), logistic_constants)),
    ):
        written += figures.save(figure, out, name)
    constants = {name: played.constants for name, played in simulations.items()}
    console.print(_constants_table(constants | {"logistic (Theorem 1)": logistic_constants}))
    console.print(_regret_table(simulations))
    console.print(_check_table(sections))
    for path in written:
        print(path)
    checks = [check for section in sections for check in section]
    failed = [check for check in checks if not check.passed]
    print(f"{len(checks) - len(failed)} of {len(checks)} checks passed")
    return 1 if failed else 0


def _play(family: str, rounds: int, seeds: int, alpha_factor: float) -> Simulation:
    pairs = draw(family, rounds, seeds, alpha_factor / (2 * BETA))
    both = Quadratics.stack([pairs.query, pairs.support])
    return simulate(pairs, alpha_factor * quadratic_constants(both, radius=1.0).alpha)


def _csv(simulations: Mapping[str, Simulation]) -> bytes:
    names = list(next(iter(simulations.values())).regret)
    lines: list[list[Any]] = [["family", "seed", "T", *names, "bound", "gradient bound"]]
    for family, played in simulations.items():
        bound = played.bound.tolist()
        for seed in range(played.telescoped.shape[0]):
            curves = [played.regret[name][seed].tolist() for name in names]
            for t, row in enumerate(zip(*curves, bound, played.gradient_bound[seed].tolist(), strict=True), 1):
                lines.append([family, seed, t, *(f"{value:.8g}" for value in row)])
    return csv_lines(lines)


def _constants_table(constants: Mapping[str, Constants]) -> Table:
    table = _table("constants of assumptions 1 and 2 over W", "family", "G", "beta", "rho", "mu", "radius", "alpha")
    for family, c in constants.items():
        table.add_row(family, *(f"{value:.4g}" for value in (c.G, c.beta, c.rho, c.mu, c.radius, c.alpha)))
    return table


def _regret_table(simulations: Mapping[str, Simulation]) -> Table:
    first = next(iter(simulations.values()))
    table = _table(
        f"R(T) at T = {first.telescoped.shape[1]}, mean over seeds", "family", *first.regret, "gradient bound", "bound"
    )
    for family, played in simulations.items():
        last = [regret[:, -1].mean() for regret in (*played.regret.values(), played.gradient_bound)]
        table.add_row(family, *(f"{float(value):.4g}" for value in last), f"{float(played.bound[-1]):.3g}")
    return table


def _check_table(sections: Sequence[Sequence[Check]]) -> Table:
    right = (Column(header, no_wrap=True, justify="right") for header in ("measured", "required", ""))
    table = Table("source", "claim", *right, title="checks")
    for section in sections:
        for check in section:
            verdict = "[green]pass[/]" if check.passed else "[bold red]FAIL[/]"
            table.add_row(check.source, check.claim, check.measured, check.required, verdict)
        table.add_section()
    return table


def _table(title: str, first: str, *others: str) -> Table:
    return Table(first, *(Column(header, justify="right") for header in others), title=title)
