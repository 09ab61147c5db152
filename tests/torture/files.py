"""Run folders with files that no run writes, and the command line on them."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny

from metaleader import cli
from metaleader.presets import PRESETS
from metaleader.runner import experiment as runner


@contextlib.contextmanager
def small_runs() -> Iterator[None]:
    """In this context there is a preset named tiny, and runs draw no figures."""
    presets: Any = PRESETS
    finish = runner._finish
    presets["tiny"], runner._finish = tiny.tiny, lambda folder: None
    try:
        yield
    finally:
        runner._finish = finish
        del presets["tiny"]


def command(*arguments: object) -> tuple[Any, str]:
    """Run a command in this process; its exit status and its error output."""
    error = io.StringIO()
    with small_runs(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            return end.code, error.getvalue()
    raise AssertionError("the command line did not exit")


def tiny_run(folder: Path, *methods: str) -> Path:
    """A finished run of a few seconds."""
    code, error = command("run", "tiny", "--methods", ",".join(methods or ("toe",)), "--seeds", "1", "--out", folder)
    assert code == 0, error
    return folder


def refused(*arguments: object) -> str:
    """Run a command that must end with one line and status 2; returns the line."""
    code, error = command(*arguments)
    assert (code, error.count("\n"), error[:12]) == (2, 1, "metaleader: "), (code, error)
    return error
