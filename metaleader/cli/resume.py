"""`metaleader resume`: go on with a run that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def resume(folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]) -> int:
    """Go on with a run that was stopped, by Ctrl-C, a kill or a power cut; records and weights are as without the stop.

    Args:
        folder: the run folder.

    Returns:
        The exit status.
    """
    from metaleader.experiment import resume_experiment

    resume_experiment(folder)
    return 0
