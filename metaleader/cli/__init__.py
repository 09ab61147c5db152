"""The front desk: the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tyro

from metaleader.cli.bench import bench
from metaleader.cli.run import run

COMMANDS: dict[str, Callable[..., Any]] = {"bench": bench, "run": run}


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
