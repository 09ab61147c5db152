"""The front desk: the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tyro

from metaleader.cli.data import data as _data
from metaleader.cli.list import list_presets as _list
from metaleader.cli.resume import resume as _resume
from metaleader.cli.run import run as _run
from metaleader.cli.show import show as _show
from metaleader.cli.theory import theory as _theory

# Imported under other names, so that the modules keep theirs.
COMMANDS: dict[str, Callable[..., Any]] = {
    "run": _run,
    "resume": _resume,
    "list": _list,
    "theory": _theory,
    "show": _show,
    "data": _data,
}


def main(arguments: list[str] | None = None) -> None:
    """Online meta-learning: follow the meta leader.

    Exits with 0, with 1 where a check fails, and with 2 for bad input, whose message then says what to do.
    """
    try:
        status = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="metaleader", args=arguments)
    except (ValueError, OSError) as error:
        print(f"metaleader: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("metaleader: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(status)
