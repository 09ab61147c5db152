"""`metaleader run`: an experiment from stream to figure."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def run(
    preset: str = "rainbow-digits",
    /,
    methods: str | None = None,
    seeds: int = 3,
    schedule: Literal["standard", "paper", "quick"] = "standard",
    tasks: int | None = None,
    out: Path | None = None,
    device: str = "auto",
    engine: Literal["auto", "eager", "compiled", "captured"] = "auto",
    data: Path | None = None,
    tensorboard: bool = False,
) -> int:
    """Run an experiment: every method over the same streams, records and a figure into a folder.

    Args:
        preset: rainbow-digits, rainbow-mnist, cifar100, pose or sinusoid.
        methods: which of ftml, ftml-last, ftl, toe and scratch, separated by commas; all of the preset if not given.
            `metaleader list` names the extra ones, such as ftml-first.
        seeds: how many seeds, run side by side; each has its own initialisation, stream and draws.
        schedule: how many updates a reveal: 10, as many as the authors, or few for a first look.
        tasks: stop after this many tasks.
        out: the run folder; runs/PRESET if not given.
        device: cpu, cuda, or auto for the GPU where there is one.
        engine: how updates are run; auto compiles where the number of updates pays for it.
        data: the folder with data sets, where the preset needs one.
        tensorboard: also write event files for TensorBoard into the run folder; needs the extra of that name.

    Returns:
        The exit status.
    """
    from metaleader.experiment import Experiment, run_experiment

    experiment = Experiment(
        preset=preset,
        methods=None if methods is None else tuple(name.strip() for name in methods.split(",") if name.strip()),
        seeds=seeds,
        schedule=schedule,
        tasks=tasks,
        device=device,
        engine=engine,
        data=None if data is None else str(data),
        tensorboard=tensorboard,
    )
    run_experiment(experiment, out or Path("runs") / preset)
    return 0
