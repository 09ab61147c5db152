"""`metaleader tune`: search for the settings of each method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from metaleader.runner.tune import TuneOptions, run_tune


def tune(
    options: Annotated[TuneOptions, tyro.conf.arg(name="")] = TuneOptions(),  # noqa: B008
    *,
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None,
) -> None:
    """Search for the settings of each method with Optuna, with equal numbers of trials, on seeds of their own.

    --search ftml.inner_lr=log:0.001..0.3 --search all.meta_lr=log:1e-4..1e-2 --search ftml.inner_steps=1,3,5. The best
    settings are written as an experiment, DIR/tuned.py. `metaleader resume DIR` continues a search.

    Args:
        options: the experiment, the ranges and the budget.
        out: The folder of the search; runs/NAME-tune if not given.
    """
    name = Path(options.experiment).name.removesuffix(".py")
    run_tune(options, out or Path("runs") / f"{name}-tune")
