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
    import sys

    from metaleader.report.page import write_report

    # Of several, as a shell's `runs/*` gives them, those that are no runs are left out; alone, one is an error.
    runs = [folder for folder in folders if (folder / "records.csv").is_file()] or list(folders)
    for folder in folders:
        if folder not in runs:
            print(f"note: {folder} holds no records and is left out", file=sys.stderr)
    print(write_report(runs, out).resolve())
    return 0
