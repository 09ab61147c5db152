"""The regret of the methods of a run: comparators in hindsight for its streams, one optimisation per seed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from metaleader.engine.objective import GradientSteps
from metaleader.experiments.experiment import Experiment
from metaleader.learners import Learner
from metaleader.regret import Hindsight, UnconvergedWarning, hindsight
from metaleader.report.loaded import load_runs
from metaleader.report.page import report_runs
from metaleader.report.records import Records, where
from metaleader.report.regret import COLUMNS, regret_table
from metaleader.runner.experiment import experiment_file, resumed_plan
from metaleader.runner.plan import Plan
from metaleader.runs.folder import csv_lines, read_records
from metaleader.runs.run import Run
from metaleader.streams.base import View
from metaleader.system.files import write_atomic
from metaleader.system.machine import set_threads
from metaleader.tasks import num_rows

# What a comparator depends on: step sizes, number of steps and adapted parameters, and the method if it has a network
# of its own.
_Key = tuple[Any, int, str | None, str | None]


def regret_of_run(
    folder: Path,
    file: Path | None = None,
    *,
    at: int | None = None,
    dynamic: bool = False,
    tolerance: float = 0.01,
    max_evaluations: int = 20_000,
) -> Path:
    """Estimate the regret of each method of a finished run; write `regret.csv` and the report.

    The losses are those before training on a task: the column `loss_before`, or `loss` in a run with `--regret`.
    Methods that adapt in the same way have the same comparator, whose optimisation starts from the parameters of the
    best of them. Each method is compared with the best initialisation for its own adaptation.

    Args:
        folder: the run folder.
        file: the experiment file, if it has moved; it must be unchanged.
        at: the size of D_t; the largest with such losses if None.
        dynamic: also estimate the dynamic regret, with one comparator per round.
        tolerance: the tolerance of the optimisation, see `metaleader.regret.hindsight`.
        max_evaluations: the number of meta-gradients, per optimisation, after which to stop without convergence.

    Returns:
        The path of `regret.csv`.

    Raises:
        ValueError: if the run has no such losses or is not finished, or if no method has a comparator.
    """
    with Run(folder) as run:
        column = "loss" if run.config["regret"] else "loss_before"
        if not run.finished():
            raise ValueError(f"{folder} is not finished: continue it with `metaleader resume {folder}`")
        plan = resumed_plan(run.config, experiment_file(folder, run.config, file))
        set_threads(run.config["threads"])
        records = [
            {**record, "loss": record[column]} for record in read_records(folder) if record.get(column) is not None
        ]
        sizes = sorted({record["datapoints"] for record in records})
        if not sizes:
            raise ValueError(
                f"{folder} has no losses from before training on a task, of which the regret is made; run again with"
                " before_at, or with --regret and learners of this library"
            )
        size = sizes[-1] if at is None else at
        if size not in sizes:
            raise ValueError(
                f"the run has no measurements before training at {size} datapoints, but at {', '.join(map(str, sizes))}"
            )
        limits = {"tolerance": tolerance, "max_evaluations": max_evaluations}
        rows = _regrets(
            run, plan, where(records, datapoints=size), functools.partial(_compare, plan, size, dynamic, limits)
        )
        path = folder / "regret.csv"
        write_atomic(path, csv_lines([COLUMNS, *rows]))
    (loaded,) = load_runs([folder])
    Console(width=None if Console().is_terminal else 140).print(regret_table(loaded))
    print(f"regret: {path}")
    print(report_runs([folder]).resolve())
    return path


def _regrets(run: Run, plan: Plan, records: Records, compare: Any) -> list[list[Any]]:
    """The rows of `regret.csv`."""
    groups: dict[_Key, list[str]] = {}
    for method in plan.methods:
        try:
            if not where(records, method=method):
                raise ValueError("it was not measured before training on a task")
            groups.setdefault(_key(plan.experiment, method, plan.samples[method]), []).append(method)
        except ValueError as error:
            print(f"note: {method} has no comparator: {error}")
    if not groups:
        raise ValueError("no method of the run has a comparator in hindsight")
    by_method: dict[str, list[list[Any]]] = {method: [] for method in plan.methods}
    first = plan.options.first_seed
    for seed in range(first, first + plan.options.seeds):
        stream = View(plan.stream(seed), range(plan.tasks))
        for key, methods in groups.items():
            losses = {m: [r["loss"] for r in where(records, method=m, seed=seed)] for m in methods}
            best = min(methods, key=lambda method: sum(losses[method]))
            comparator = compare(key, stream, _final_params(run, best, seed - first))
            static = comparator if comparator.static is None else comparator.static
            for method in methods:
                by_method[method] += _rows(method, seed, comparator, static, losses[method])
            print(f"seed {seed}, {', '.join(methods)}: comparator after {comparator.evaluations} gradients", flush=True)
    return [row for rows in by_method.values() for row in rows]


def _rows(method: str, seed: int, best: Hindsight, static: Hindsight, losses: Sequence[float]) -> list[list[Any]]:
    rows, sums = [], [0.0, 0.0]
    for t, loss in enumerate(losses):
        sums[0] += loss - static.losses[t]
        sums[1] += loss - best.losses[t]
        row = [method, seed, t, best.datapoints, loss, float(static.losses[t]), sums[0], int(static.converged)]
        dynamic = [None] * 3 if best is static else [float(best.losses[t]), sums[1], int(t not in best.unconverged)]
        rows.append([*row, *dynamic])
    return rows


def _compare(
    plan: Plan, at: int, dynamic: bool, limits: Mapping[str, Any], key: _Key, stream: View, start: dict[str, Any]
) -> Hindsight:
    inner_lr, inner_steps, only, method = key
    experiment = plan.experiment
    options = {} if method is None else experiment.all_methods[method].options
    full = num_rows(stream[0].train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnconvergedWarning)  # it is a column of the file and of the table
        return hindsight(
            options.get("model", experiment.network),
            options.get("loss", experiment.loss),
            stream,
            datapoints=min(at, full),
            inner_lr=dict(inner_lr) if isinstance(inner_lr, tuple) else inner_lr,
            inner_steps=inner_steps,
            only=only,
            start=start,
            dynamic=dynamic,
            device=plan.options.device,
            **limits,
        )


def _key(experiment: Experiment, method: str, learner: Any) -> _Key:
    """What the comparator of a method depends on; raises ValueError if it has none."""
    if not isinstance(learner, Learner):
        raise ValueError("it is not a metaleader.Learner, so its adaptation is unknown")
    adaptation = learner.definition.adaptation
    own = method if {"model", "loss"} & experiment.all_methods[method].options.keys() else None
    if type(learner).adapt is not Learner.adapt:
        raise ValueError(f"{type(learner).__name__} overrides adapt")
    if learner.restarts:
        raise ValueError("it begins every round with a new network, so it has no w_t")
    if adaptation is None:
        return 0.0, 0, None, own
    if not isinstance(adaptation, GradientSteps):
        raise ValueError("it does not adapt by gradient steps")
    if adaptation.lr is None:
        raise ValueError("its step sizes are learned, so the adaptation differs between rounds")
    return adaptation.lr, experiment.steps[0], adaptation.only, own


def _final_params(run: Run, method: str, index: int) -> dict[str, Any]:
    checkpoint = run.checkpoint(method)
    assert checkpoint is not None
    return checkpoint["state"]["learners"][index]["params"]
