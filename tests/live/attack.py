"""Faults of disk, memory and clock in a session: `python tests/live/attack.py FOLDER [MOST]`; prints a line per kind.

- System calls: each that changes the folder fails with EIO or ENOSPC, or ends the process there, also in the middle of
  a write, at every call in turn. Calls that returned must be there when the folder is opened again.
- Flipped bits and torn pages in every file of a killed folder. Opening it gives the same state, or an error that names
  the file; with `repair=True` it then opens, with all intact records.
- Two processes on one folder: the second is refused.
- A clock that goes backwards: the state is that of a learner that made the calls itself.

MOST bounds the tries of each kind; without it, every system call and every sector is tried, and 1,000 bits per file.
The last line counts.
"""

import contextlib
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from sessions import batch, make, plain_learner, same_state
from torture import faults
from torture.tally import Tally

from metaleader.live.session import Session

EVENTS, SECTOR, PAGE = 10, 512, 16384


def made(folder):
    """A folder as a kill leaves it, with a write-ahead log and two checkpoints; another one that was closed."""
    with Session(folder / "open", make, updates="inline") as session:
        for i in range(EVENTS):
            session.observe(*batch(i), task=f"customer {i % 3}", key=f"event {i}")
            if i in (3, 7):
                session._updater.write_checkpoint()
        shutil.copytree(folder / "open", folder / "killed")
    return folder / "killed", folder / "open", session.learner


def show(kind, tally, note=""):
    """Print a line, and pass the tally on."""
    print(f"{kind}: {tally}{note}", flush=True)
    return tally


def damaged(folder, expected, what, file, content, tally):
    """Open a folder with a damaged file; it must have the same state, or be refused and repaired."""
    place = folder.with_name("damaged")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place)
    (place / file).write_bytes(content)
    problem = error = None
    outcome = "same state"
    try:
        with Session(place, make, updates="thread", share=1.0) as session:
            problem = None if same_state(session.learner, expected) else "another state"
    except (ValueError, OSError) as refused:
        outcome = "refused"
        names = {file, file.removesuffix("-wal"), file.removesuffix("-shm")}
        problem = None if any(name in str(refused) for name in names) else f"the error names no file: {refused}"
        try:
            with Session(place, make, updates="thread", repair=True) as session:
                tasks = session.learner.tasks
                wrong = [name for name, size in tasks.items() if size > expected.tasks.get(name, 0)]
                problem = problem or (f"more data than before: {wrong}" if wrong else None)
        except Exception as raised:
            error = raised
    except Exception as raised:
        error = raised
    tally.note(f"{what} of {file}", problem, silent=outcome == "same state", error=error)
    return outcome


def attack_files(folder, most):
    """Flip bits in, and tear pages of, every file."""
    (folder / "files").mkdir()
    source, closed, expected = made(folder / "files")
    draw, total = random.Random(0), Tally()
    files = [*sorted(path for path in source.iterdir() if path.stat().st_size), closed / "journal.sqlite"]
    for kind in ("flipped bits", "torn pages"):
        for file in files:
            tally, content, refused = Tally(), file.read_bytes(), 0
            if kind == "flipped bits":
                places = draw.sample(range(8 * len(content)), min(most or 1000, 8 * len(content)))
            else:
                starts = range(SECTOR, len(content), SECTOR)
                places = starts if most is None else draw.sample(starts, min(most, len(starts)))
            for at in places:
                changed = bytearray(content)
                if kind == "flipped bits":
                    changed[at // 8] ^= 1 << at % 8
                else:  # the rest of a page is not written
                    end = min((at // PAGE + 1) * PAGE, len(content))
                    changed[at:end] = bytes(end - at)
                refused += damaged(file.parent, expected, f"{kind} at {at}", file.name, changed, tally) == "refused"
            total += show(f"{kind} in {file.parent.name} {file.name}", tally, f"; {refused} refused and repaired")
    return total


def attack_lock(folder, tries):
    """Open a folder that is in use, from other processes."""
    tally = Tally()
    with Session(folder / "lock", make, updates="inline") as session:
        session.observe(*batch(0), task="a")
        for number in range(tries):
            process = os.fork()
            if process == 0:
                status = 1
                try:
                    Session(folder / "lock", make)
                except ValueError as error:
                    status = 0 if "in use" in str(error) else 2
                finally:
                    os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            tally.note(f"opening {number}", None if status == 0 else f"status {status}")
    return show("a second process", tally)


def attack_clock(folder):
    """Set the clock back by an hour at every look."""
    tally, now = Tally(), time.time()
    real = time.time

    def backwards():
        nonlocal now
        now -= 3600
        return now

    time.time = backwards
    try:
        for mode in ("thread", "inline"):
            place = folder / f"clock {mode}"
            with Session(place, make, updates=mode, share=1.0) as session:
                for i in range(EVENTS):
                    session.observe(*batch(i), task=f"customer {i % 3}", key=f"event {i}")
                    os.utime(place, (now, now))
                    for path in place.iterdir():
                        os.utime(path, (now, now))
                session.wait()
            with Session(place, make, updates=mode) as session:
                same = same_state(session.learner, plain_learner_of(place))
                again = session.observe(*batch(1), task="customer 1", key="event 1")
            tally.note(f"a clock that goes backwards, {mode}", None if same and not again else "another state")
    finally:
        time.time = real
    return show("a clock that goes backwards", tally)


def plain_learner_of(folder):
    copied = folder.with_name(f"{folder.name} copy")
    shutil.copytree(folder, copied)
    return plain_learner(copied)


def main(folder, most):
    logging.getLogger("metaleader").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    target, total = faults._session(folder / "session"), Tally()
    for action, name in zip(faults.ACTIONS, ("EIO", "full disk", "kill", "kill in a write"), strict=True):
        found = faults.attack("session", target, (action,), most)
        total += show(f"{name} at a system call", found)
    total += attack_files(folder, most)
    total += attack_lock(folder, min(most or 100, 100))
    total += attack_clock(folder)
    print(total)
    return 1 if total.failures else 0


if __name__ == "__main__":
    place, bound = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None
    if "faults.so" not in os.environ.get("LD_PRELOAD", ""):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        library = faults.compiled(place)
        with contextlib.suppress(KeyboardInterrupt):
            sys.exit(
                subprocess.run([sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": str(library)}).returncode
            )
    sys.exit(main(place / "attacked", bound))
