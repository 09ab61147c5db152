"""The attack of `make torture`: `python tests/torture/attack.py [MOST]`.

Interrupts at lines of learners' calls, faults at system calls, flipped bits, and signals. MOST bounds the number of
tries of each kind; without it, all are made, which takes hours. The last line counts.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torture import faults
from torture.flips import attack_flips
from torture.learners import attack_learners
from torture.signals import attack_startup
from torture.tally import Tally

TARGETS = ("run", "resume", "join", "save", "session")


def with_faults(folder: Path, most: int | None) -> Tally:
    """Faults at system calls, by a process with the library loaded."""
    folder.mkdir()
    preload = os.environ | {"LD_PRELOAD": str(faults.compiled(folder)), "PYTHONPATH": os.pathsep.join(sys.path[:2])}
    command = [sys.executable, __file__, "--faults", str(folder), "" if most is None else str(most)]
    answer = subprocess.run(command, env=preload, stdout=subprocess.PIPE, text=True, check=True)
    tries, failures, silent, tracebacks = map(int, answer.stdout.split()[-4:])
    return Tally(tries, failures, silent, tracebacks)


def main(most: int | None) -> int:
    """Attack, and print what was found."""
    total = Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {
            "interrupts at lines of the package": lambda: attack_learners(inside=["metaleader/"], most=most),
            "interrupts at any line, libraries included": lambda: attack_learners(most=most),
            "signals during calls": lambda: attack_learners(signals=most or 1000),
            "faults at system calls": lambda: with_faults(folder / "faults", most),
            "flipped bits": lambda: attack_flips(folder, most or 1000),
            "SIGINT while the command line starts": lambda: attack_startup(min(most or 100, 100)),
        }
        for part, attack in parts.items():
            found = attack()
            print(f"{part}: {found}", flush=True)
            total += found
    print(total)
    return 1 if total.failures else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--faults"]:
        tally = Tally()
        for target in TARGETS:
            tally += faults.main([str(Path(sys.argv[2]) / target), target, *filter(None, sys.argv[3:])])
        print(tally.tries, tally.failures, tally.silent, tally.tracebacks)
        sys.exit(0)
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else None))
