"""Ctrl-C in the command line: one line and exit status 130, also while torch is imported, and when it comes twice.

Importing this module in a process that runs the command installs a handler of SIGINT; elsewhere it changes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_STATUS, _LINE = 130, "metaleader: interrupted"
_told = False


def tell() -> int:
    """Print the one line; returns the exit status."""
    global _told
    _told = True
    print(_LINE, file=sys.stderr)
    return _STATUS


@contextlib.contextmanager
def raised_once(stay: bool) -> Iterator[None]:
    """In this context, the first SIGINT raises KeyboardInterrupt, and the next one ends the process.

    Files are written such that an end at any moment loses nothing.

    Args:
        stay: keep the handler after the context, which is then the last of the process.
    """
    global _told
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before not in _REPLACED:
        yield
        return
    _told = False
    signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _exit if stay else before)


def _raise(*_: Any) -> None:
    signal.signal(signal.SIGINT, _exit)
    raise KeyboardInterrupt


def _exit(*_: Any) -> None:
    if not _told:  # not by print, which may be under way
        os.write(2, f"{_LINE}\n".encode())
    os._exit(_STATUS)


# SIGINT may be ignored, as in a background job of a shell, or belong to a program that calls the command line.
_REPLACED = (signal.default_int_handler, _exit)


def _is_command() -> bool:
    options = sys.orig_argv[1:]
    by_name = bool(options) and os.path.basename(options[0]) == "metaleader"
    return by_name or ("-m", "metaleader") in itertools.pairwise(options)


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _exit)
