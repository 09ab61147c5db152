"""`metaleader report`: runs compared in one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def report(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")],
    *,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
) -> int:
    """Compare runs in one self-contained HTML page: figures, tables, checks, configuration.

    Args:
        folders: run folders, finished or not.
        out: the page to write; report.html in the first folder if not given.

    Returns:
        The exit status.
    """
    from metaleader.report import write_report

    print(write_report(folders, out).resolve())
    return 0
