"""SIGINT while the command line starts, and SIGINT twice: one line, status 130."""

import os
import signal
import subprocess
import sys
import time

import pytest
from torture.signals import COMMAND, ENVIRONMENT, interrupt_command


@pytest.mark.parametrize("seconds", [0.3, 0.9])
def test_an_interrupt_during_the_imports(seconds: float) -> None:
    assert interrupt_command([seconds], "list") == (130, "metaleader: interrupted\n")


def test_two_interrupts_at_once() -> None:
    assert interrupt_command([0.5, 0.5], "list") == (130, "metaleader: interrupted\n")


def test_programs_that_import_the_package_keep_their_handler() -> None:
    code = "import signal, metaleader; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=False).returncode == 0


def test_an_ignored_interrupt_stays_ignored() -> None:
    ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    process = subprocess.Popen(
        [*COMMAND, "--version"], env=ENVIRONMENT, preexec_fn=ignore, stdout=subprocess.PIPE, text=True
    )
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, out[:10]) == (0, "metaleader")
