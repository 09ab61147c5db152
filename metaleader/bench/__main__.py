"""`python -m metaleader.bench`: `metaleader bench` where tyro is not installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from metaleader.bench.report import MEASUREMENTS, named, run_bench
from metaleader.system.machine import keep_memory


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments of `metaleader bench` and run it."""
    parser = argparse.ArgumentParser(prog="python -m metaleader.bench", description="Measure the engine.")
    parser.add_argument("--what", default="meta-step", help=f"separated by commas, of {','.join(MEASUREMENTS)}")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto for the GPU where there is one")
    parser.add_argument("--peers", action="store_true", help="time higher and torchopt on the work of meta-step too")
    parser.add_argument("--out", help="a file that gets each result as a line of JSON, as soon as it is there")
    given = parser.parse_args(arguments)
    keep_memory()
    run_bench(named(given.what), given.device, given.peers, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
