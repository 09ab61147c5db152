"""Send SIGINT to the command line."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from torture.tally import Tally

COMMAND = (sys.executable, "-m", "metaleader")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def interrupt_command(seconds: Sequence[float], *arguments: str) -> tuple[int, str]:
    """Run a command and send SIGINT after these seconds each; returns its status and its error output.

    A command that has ended before is not interrupted.
    """
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A process that a shell runs in the background ignores interrupts, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    start = time.monotonic()
    for moment in seconds:
        time.sleep(max(0.0, start + moment - time.monotonic()))
        process.send_signal(signal.SIGINT)  # not sent to a process that has ended
    _, error = process.communicate(timeout=300)
    return process.returncode, error


def attack_startup(tries: int) -> Tally:
    """Send SIGINT once or twice to `metaleader list` within its first seconds."""
    tally, draw = Tally(), random.Random(0)
    for number in range(tries):
        first = 0.15 + 3 * draw.random()  # Python itself starts in less
        moments = [first, first + 0.3 * draw.random()][: 1 + number % 2]
        status, error = interrupt_command(moments, "list")
        ended = (status, error) in ((130, "metaleader: interrupted\n"), (0, ""))
        tally.note(f"SIGINT after {moments} s", None if ended else f"status {status}: {error[-300:]!r}")
    return tally
