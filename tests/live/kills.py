"""Kills a session under load, again and again: `python kills.py FOLDER KILLS MODE`.

The process forks, so that torch is imported once. The child observes from four threads and reports each call that
returned; the parent kills it with SIGKILL at a random moment and opens a new one on the same folder. In the mode
"process", it also kills the process of the updates before, at a random moment, in every second child. At the end the
folder must hold every call that was reported, none twice, in the state of a learner that made the calls itself, and no
process may be left.
"""

import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from sessions import ROWS, batch, calls, make, plain_learner, same_state

from metaleader.live.calls import Observe
from metaleader.live.session import Session


def child(folder, mode, number, pipe):
    session = Session(folder, make, updates=mode, share=1.0)
    os.write(pipe, b"open %d\n" % (session.status()["update_process"] or 0))

    def work(thread):
        i = 0
        while True:
            event = number * 10**6 + thread * 10**4 + i
            session.observe(*batch(event), task=f"customer {event % 7}", key=f"event {event}")
            os.write(pipe, b"%d\n" % event)
            # Sent again, as after a lost answer.
            assert session.observe(*batch(event), task=f"customer {event % 7}", key=f"event {event}") is False
            session.predict(batch(event)[0], f"customer {event % 7}")
            i += 1

    for thread in range(4):
        threading.Thread(target=work, args=(thread,), daemon=True).start()
    time.sleep(600)


def killed(folder, mode, number, delay, early):
    """The events that a child reported until it was killed, and the number of its process of updates.

    Args:
        early: the delay after which that process is killed, or None.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        try:
            child(folder, mode, number, writer)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as lines:
        word, updates = lines.readline().split()
        assert word == b"open"
        if early is not None:
            time.sleep(early)
            os.kill(int(updates), signal.SIGKILL)
        time.sleep(delay)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return [int(line) for line in lines.read().splitlines()], int(updates)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def main(folder, kills, mode):
    torch.set_num_threads(1)
    warm = make()  # the first calls load modules, which the children then share
    for event in range(3):
        warm.observe(*batch(event), task="a")
    warm.predict(batch(0)[0], "a")
    draw, reported, processes, early = random.Random(0), set(), set(), 0
    for number in range(kills):
        first = draw.uniform(0.1, 0.8) if mode == "process" and number % 2 else None
        events, process = killed(folder, mode, number, draw.uniform(0.1, 0.8), first)
        reported.update(events)
        processes.add(process)
        early += first is not None
    deadline = time.monotonic() + 10
    while any(map(is_running, processes - {0})):
        assert time.monotonic() < deadline, "a process of updates is left"
        time.sleep(0.1)
    shutil.copytree(folder, f"{folder}-copy")
    for path in Path(f"{folder}-copy").glob("checkpoint-*"):
        path.unlink()
    stored = [call for call in calls(f"{folder}-copy") if isinstance(call, Observe)]
    assert len({call.key for call in stored}) == len(stored)
    plain, states = plain_learner(f"{folder}-copy"), []
    for path in (folder, f"{folder}-copy"):
        with Session(path, make, updates="inline") as session:
            assert same_state(session.learner, plain), path
            assert sum(session.learner.tasks.values()) == len(stored) * ROWS
            states.append(session.learner.step)
            for event in sorted(reported):
                assert session.observe(*batch(event), task=f"customer {event % 7}", key=f"event {event}") is False
    assert reported, "no call returned before a kill"
    print(
        f"{kills} kills: {len(reported)} calls reported, {len(stored)} stored, {states[0]} updates, state equal;"
        f" {early} kills of the process of the updates"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
