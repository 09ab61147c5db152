"""Flip single bits in every file of a run, of a learner and of a session: each flip is refused, or changes nothing."""

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sessions
import tiny
import torch
from torch import nn
from torture.files import command, tiny_run
from torture.tally import Tally

import metaleader as ml
from metaleader.live.session import Session
from metaleader.runs.folder import read_records

# A check of a folder: None if it is as it was, "refused", or what is wrong
Check = Callable[[Path], str | None]


def attack_flips(folder: Path, most: int) -> Tally:
    """Flip bits; `most` is the number of flips per file."""
    run, learner, session = tiny_run(folder / "run"), folder / "learner", folder / "session"
    _make_learner(learner)
    with contextlib.closing(Session(session, sessions.make, updates="inline")) as opened:
        for event in range(3):
            opened.observe(*sessions.batch(event), task="customer", key=f"event {event}")
        reference: Any = opened.learner
        expected = reference.state_dict()
    records, results = read_records(run), tiny.results(run)

    def check_run(place: Path) -> str | None:
        if read_records(place) != records:
            return "other records are read"
        code, error = command("resume", place)
        if code == 2:
            return "refused" if error.count("\n") == 1 else f"not one line: {error[:300]}"
        content = {name: value for name, value in tiny.results(place).items() if name in results}
        same = content["records.csv"] == results["records.csv"]
        return None if same else "the results differ"

    def check_learner(place: Path) -> str | None:
        loaded = ml.TOE.load(place / "learner.safetensors", nn.Linear(1, 1), ml.losses.squared_error)
        return None if torch.equal(loaded.state.flat, _learner().state.flat) else "another learner is loaded"

    def check_session(place: Path) -> str | None:
        with contextlib.closing(Session(place, sessions.make, updates="inline")) as opened:
            found: Any = opened.learner
            same = not sessions.differences(found.state_dict(), expected, "")
        return None if same else "another learner is recovered"

    return sum(
        (
            _attack(source, folder / "flipped", check, most)
            for source, check in ((run, check_run), (learner, check_learner), (session, check_session))
        ),
        Tally(),
    )


def _learner() -> ml.TOE:
    torch.manual_seed(0)
    learner = ml.TOE(nn.Linear(1, 1), ml.losses.squared_error, meta_steps=1, tasks_per_step=1, query=1, seed=0)
    learner.begin("a")
    learner.observe(torch.ones(2, 1), torch.ones(2, 1))
    return learner


def _make_learner(folder: Path) -> None:
    folder.mkdir()
    _learner().save(folder / "learner.safetensors")


def _attack(source: Path, place: Path, check: Check, most: int) -> Tally:
    tally, draw = Tally(), random.Random(0)
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and path.stat().st_size]
    for file in files:
        if file.suffix in (".png", ".svg", ".pdf", ".html"):  # drawn anew from the others
            continue
        bits = 8 * file.stat().st_size
        for bit in draw.sample(range(bits), min(most, bits)):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(source, place)
            changed = place / file.relative_to(source)
            content = bytearray(changed.read_bytes())
            content[bit // 8] ^= 1 << bit % 8
            changed.write_bytes(content)
            problem = error = None
            try:
                problem = check(place)
            except (ValueError, OSError):
                problem = "refused"
            except Exception as raised:
                error = raised
            problem = None if problem == "refused" else problem
            tally.note(f"bit {bit} of {file.relative_to(source.parent)}", problem, silent=True, error=error)
    return tally
