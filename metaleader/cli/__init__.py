"""The command line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

import metaleader
from metaleader.cli import runs
from metaleader.cli.bench import bench as _bench
from metaleader.cli.data import data as _data
from metaleader.cli.list import list_experiments
from metaleader.cli.new import new as _new
from metaleader.cli.serve import serve as _serve
from metaleader.cli.show import show as _show
from metaleader.cli.status import status as _status
from metaleader.cli.theory import theory as _theory
from metaleader.cli.tune import tune as _tune
from metaleader.distributed.group import is_launched
from metaleader.system.interrupts import raised_once, tell
from metaleader.system.machine import keep_memory, versions

# Aliases keep `metaleader.cli.bench` and the others modules.
COMMANDS: dict[str, Callable[..., Any]] = {
    "run": runs.run,
    "grid": runs.grid,
    "tune": _tune,
    "resume": runs.resume,
    "join": runs.join,
    "report": runs.report,
    "regret": runs.regret,
    "verify": runs.verify,
    "list": list_experiments,
    "new": _new,
    "serve": _serve,
    "status": _status,
    "theory": _theory,
    "bench": _bench,
    "data": _data,
    "show": _show,
}


def main(arguments: list[str] | None = None) -> None:
    """Online meta-learning: follow the meta leader.

    Exits with 0, with 1 if a check fails or the reader of the output is gone (`| head -1`), and with 2 and a message
    for bad input.
    """
    keep_memory()
    with raised_once(stay=arguments is None):
        _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: Sequence[str]) -> None:
    try:
        if [*arguments] == ["--version"]:
            numbers = versions()
            print(f"metaleader {metaleader.__version__}, torch {numbers['torch']}, Python {numbers['python']}")
            sys.exit(0)
        for number, given in enumerate(arguments, 1):
            if given == "" or re.fullmatch(r"--[\w-]+=", given):
                after = f" after {arguments[number - 2]}" if number > 1 else ""
                raise ValueError(f"argument {number}, {given!r}{after}, is empty; give it a value, or leave it out")
        if is_launched() and [*arguments][:1] not in (["run"], ["resume"]):
            raise ValueError("torchrun starts several processes, for `run` and `resume`; start this command alone")
        try:
            status = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="metaleader", args=arguments)
        finally:
            sys.stdout.flush()  # an error at the flush when Python exits could not be caught
    except BrokenPipeError:
        # Python flushes again when it exits: redirect that to /dev/null, as rich does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, ImportError) as error:  # ImportError: an extra is not installed
        rank = f"rank {os.environ['RANK']}: " if is_launched() else ""
        print(f"metaleader: {rank}{error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(tell())
    sys.exit(status or 0)
