"""Faults at the system calls of `run`, `resume`, `join`, `save` and a session: an error of the disk, or a kill.

Each try is a fork of this process, which must have been started with `faults.c`, compiled, in LD_PRELOAD. Power
failures, which lose what was not synced, are not simulated.
"""

import contextlib
import ctypes
import errno
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import sessions
import tiny
import torch
from torch import nn
from torture.files import command, tiny_run
from torture.tally import Tally

import metaleader as ml
from metaleader.live.session import Session

KILL, KILL_IN_WRITE = -1, -2
ACTIONS = (errno.EIO, errno.ENOSPC, KILL, KILL_IN_WRITE)
_KILLED, _TRACEBACK = 99, 98


def compiled(folder: Path) -> Path:
    """The library of `faults.c`."""
    target = folder / "faults.so"
    compiler = (sysconfig.get_config_var("CC") or "gcc").split()[0]
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-O1", "-w", "-shared", "-fPIC", "-o", target, source, "-ldl"], check=True)
    return target


class Answer(NamedTuple):
    """The end of a try: the exit status of the process, its output, and the system calls that it made."""

    status: int
    text: str
    calls: int


class Target(NamedTuple):
    """A command to attack.

    Attributes:
        folder: the folder whose system calls fail.
        prepare: puts the folder into the state before the command.
        act: the command; returns its status and error output.
        problem: after the command, says what is wrong, given its answer; it may repair as a user would.
    """

    folder: Path
    prepare: Callable[[], object]
    act: Callable[[], tuple[Any, str]]
    problem: Callable[[Answer], str | None]


def _library() -> Any:
    return ctypes.CDLL(None)


def _in_fork(target: Target, number: int, action: int) -> Answer:
    """Run the command in a fork, with a fault at a system call; 0 is none."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        status, text = _TRACEBACK, ""
        try:
            os.close(reader)
            _library().faults_arm(str(target.folder).encode(), ctypes.c_long(number), action)
            try:
                status, text = target.act()
            except BaseException:
                text = traceback.format_exc()
            calls = _library().faults_count()
            _library().faults_arm(b"", ctypes.c_long(0), 0)
            os.write(writer, f"{calls}\n{text}"[-60_000:].encode())
        finally:
            os._exit(status if isinstance(status, int) else _TRACEBACK)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read().decode(errors="replace")
    _, waited = os.waitpid(process, 0)
    calls, _, text = content.partition("\n")
    return Answer(os.waitstatus_to_exitcode(waited), text, int(calls or 0))


def attack(name: str, target: Target, actions: tuple[int, ...] = ACTIONS, most: int | None = None) -> Tally:
    """Let the system calls of a command fail, one at a time.

    Args:
        name: of the command.
        target: the command.
        actions: error numbers, `KILL`, `KILL_IN_WRITE`.
        most: the number of calls per action, evenly spread; all if None.
    """
    tally = Tally()
    target.prepare()
    whole = _in_fork(target, 0, 0)
    if whole.status != 0 or whole.calls == 0:
        raise AssertionError(f"{name} fails without a fault: {whole}")
    numbers = range(1, whole.calls + 1)
    for action in actions:
        for number in numbers if most is None else numbers[:: max(1, len(numbers) // most)]:
            target.prepare()
            answer = _in_fork(target, number, action)
            what = {KILL: "killed", KILL_IN_WRITE: "killed in a write"}.get(action) or errno.errorcode[action]
            problem = None
            if action > 0 and answer.status not in (0, 2):
                problem = f"status {answer.status}"
            elif action > 0 and answer.status == 2 and answer.text.count("\n") != 1:
                problem = f"not one line: {answer.text[:300]!r}"
            error = answer.text[-600:] if answer.status == _TRACEBACK else None
            try:
                problem = problem if problem is not None else target.problem(answer)
            except Exception as raised:
                problem = f"then {type(raised).__name__}: {raised}"
            tally.note(f"{name}, call {number} {what}", problem, silent=answer.status == 0, error=error)
    return tally


def targets(folder: Path) -> dict[str, Target]:
    """The commands to attack, by name."""
    whole, other = tiny_run(folder / "whole"), tiny_run(folder / "other", "scratch")
    expected = _results(whole)
    joined = folder / "expected"
    assert command("join", whole, other, "--out", joined)[0] == 0
    both, place = _results(joined), folder / "attacked"
    clear = lambda: shutil.rmtree(place, ignore_errors=True)  # noqa: E731
    start = ("run", "tiny", "--methods", "toe", "--seeds", "1", "--out", place)

    def run_problem(answer: Answer) -> str | None:
        if answer.status == 0 and _results(place) != expected:
            return "status 0, but the results differ"
        code, error = command("resume", place)
        if code != 0 and not (place / "records.csv").exists():  # stopped before its first record
            code, error = command(*start)
        return f"cannot go on: {error}" if code != 0 else _difference(_results(place), expected)

    stopped = folder / "stopped"
    run = Target(place, clear, lambda: command(*start), run_problem)

    def prepare_resume() -> None:
        clear()
        if not stopped.exists():
            calls = _in_fork(run, 0, 0).calls
            clear()
            _in_fork(run, calls * 2 // 3, KILL)
            shutil.copytree(place, stopped)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(stopped, place)

    def join() -> tuple[Any, str]:
        return command("join", whole, other, "--out", place)

    def join_problem(answer: Answer) -> str | None:
        if answer.status == 0:
            return _difference(_results(place), both)
        code, error = join()
        if code != 0 and (place / "records.csv").exists():  # complete already
            code, error = command("resume", place)
        return f"cannot go on: {error}" if code != 0 else _difference(_results(place), both)

    return {
        "run": run,
        "resume": Target(place, prepare_resume, lambda: command("resume", place), run_problem),
        "join": Target(place, clear, join, join_problem),
        "save": _save(folder / "learners"),
        "session": _session(folder / "session"),
    }


def _results(folder: Path) -> dict[str, Any]:
    """The bytes of the records and of all saved values, without the configuration, which names the commit."""
    found = tiny.results(folder)
    return {name: {**tree, "config": None} if isinstance(tree, dict) else tree for name, tree in found.items()}


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    names = [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
    return f"the results differ in {', '.join(names)}" if names else None


def _save(folder: Path) -> Target:
    path = folder / "learner.safetensors"

    def made(rounds: int) -> ml.TOE:
        learner = ml.TOE(nn.Linear(1, 1), ml.losses.squared_error, meta_steps=1, tasks_per_step=1, query=1, seed=0)
        for t in range(rounds):
            learner.begin(f"round {t}")
            learner.observe(torch.ones(2, 1) * t, torch.ones(2, 1))
        return learner

    torch.manual_seed(0)
    old, new = made(1), made(2)

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        old.save(path)

    def save() -> tuple[int, str]:
        try:
            new.save(path)
        except OSError as error:
            return 2, f"{error}\n"
        return 0, ""

    def problem(answer: Answer) -> str | None:
        loaded = ml.TOE.load(path, nn.Linear(1, 1), ml.losses.squared_error)
        if loaded.round != (1 if answer.status == 0 else loaded.round) or loaded.round not in (0, 1):
            return f"round {loaded.round} was loaded"
        new.save(path)
        names = [entry.name for entry in folder.iterdir()]
        return None if names == [path.name] else f"files are left behind: {names}"

    return Target(folder, prepare, save, problem)


def _session(folder: Path) -> Target:
    """Observations of which each that returned must be there when the session is opened again."""
    told = folder.with_suffix(".told")

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        told.write_bytes(b"")

    def observe() -> tuple[int, str]:
        try:
            with contextlib.closing(Session(folder, sessions.make, updates="inline")) as session:
                for event in range(4):
                    session.observe(*sessions.batch(event), task=f"customer {event % 2}", key=f"event {event}")
                    with told.open("ab") as file:
                        file.write(b"%d\n" % event)
                session.forget("customer 1")
                with told.open("ab") as file:
                    file.write(b"forgotten\n")
        except (OSError, ValueError) as error:
            return 2, f"{' '.join(str(error).split())}\n"
        return 0, ""

    def problem(answer: Answer) -> str | None:
        lines = told.read_text().split()
        with contextlib.closing(Session(folder, sessions.make, updates="inline")) as session:
            learner: Any = session.learner
            stored = learner.tasks
            present = {
                f"event {event}"
                for event in range(4)
                if not session.observe(*sessions.batch(event), task=f"customer {event % 2}", key=f"event {event}")
            }
        lost = "forgotten" in lines and "customer 1" in stored
        if len(lines) >= 4:  # customer 1 may be forgotten by now
            lines = [line for line in lines if line.isdigit() and int(line) % 2 == 0]
        missing = [line for line in lines if f"event {line}" not in present]
        return f"lost {missing}" if missing or lost else None

    return Target(folder, prepare, observe, problem)


def main(arguments: list[str]) -> Tally:
    """Attack in this process, which has the library: FOLDER NAMES [MOST]."""
    folder, names, most = Path(arguments[0]), arguments[1].split(","), int(arguments[2]) if arguments[2:] else None
    with contextlib.redirect_stdout(io.StringIO()):
        all_targets, tally = targets(folder), Tally()
        for name in names:
            found = attack(name, all_targets[name], most=most)
            print(f"{name}: {found}", file=sys.stderr)
            tally += found
    return tally
