"""`python -m metaleader.bench`: the same as `metaleader bench`, without the need for tyro."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from metaleader.bench.report import MEASUREMENTS, named, run_bench
from metaleader.system.machine import keep_memory


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments of `metaleader bench` and run it."""
    parser = argparse.ArgumentParser(prog="python -m metaleader.bench", description="Measure the engine.")
    parser.add_argument(
        "--what", default="meta-step", help=f"measurements separated by commas: {','.join(MEASUREMENTS)}"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto for the GPU if there is one")
    parser.add_argument("--peers", nargs="*", help="also measure these libraries, separated by commas; no names: all")
    parser.add_argument("--out", help="append each result to this file as a line of JSON as soon as it is measured")
    parser.add_argument("--networks", help="names separated by commas; by default all that suit the device")
    parser.add_argument("--modes", help="modes of the engine separated by commas; by default all of the device")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds that the first update of a network may take"
    )
    parser.add_argument("--jobs", type=int, help="processes that compile networks at the same time")
    options = parser.parse_args(arguments)
    keep_memory()
    chosen = (options.networks, options.modes, options.limit, options.jobs)
    run_bench(named(options.what), options.device, options.peers, options.out, *chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
