"""`metaleader join`: runs of single methods become one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def join(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")],
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="NEW")],
) -> int:
    """Join finished runs of one experiment, each of other methods, into one run, to verify and report them together.

    So methods can run as separate processes or on several machines: preset, schedule, seeds, tasks and settings must
    be the same.

    Args:
        folders: run folders, all finished; they are left as they are.
        out: the new run folder.

    Returns:
        The exit status.
    """
    from metaleader.experiment import join_experiments

    join_experiments(folders, out)
    return 0
