"""The front desk: the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import tyro

from metaleader.cli.bench import bench as _bench
from metaleader.cli.data import data as _data
from metaleader.cli.join import join as _join
from metaleader.cli.list import list_presets as _list
from metaleader.cli.report import report as _report
from metaleader.cli.resume import resume as _resume
from metaleader.cli.run import run as _run
from metaleader.cli.show import show as _show
from metaleader.cli.theory import theory as _theory
from metaleader.cli.verify import verify as _verify
from metaleader.system.machine import keep_memory

# Imported under other names, so that the modules keep theirs.
COMMANDS: dict[str, Callable[..., Any]] = {
    "run": _run,
    "resume": _resume,
    "join": _join,
    "report": _report,
    "verify": _verify,
    "list": _list,
    "theory": _theory,
    "bench": _bench,
    "data": _data,
    "show": _show,
}


def main(arguments: list[str] | None = None) -> None:
    """Online meta-learning: follow the meta leader.

    Exits with 0, with 1 where a check fails or the reader of the output has gone (`| head -1`), and with 2 for bad
    input, whose message then says what to do.
    """
    keep_memory()
    try:
        try:
            status = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="metaleader", args=arguments)
        finally:
            sys.stdout.flush()  # here, because what fails when Python ends cannot be caught
    except BrokenPipeError:
        # Nobody is left to tell. Python flushes once more when it ends: into nothing, as rich does it too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, ImportError) as error:  # the last: an extra that is not installed
        print(f"metaleader: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("metaleader: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(status)
