"""Interrupt learners at the lines that their calls run, and compare them with the learner before and after the call."""

import copy
import functools
import hashlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torture.interrupts import changes, interrupted_at, lines_of, process_state, repair, signalled_after
from torture.tally import Tally

import metaleader as ml
from metaleader.system.trees import tree_to_bytes

Call = Callable[[Any], object]

SIZES: dict[str, Any] = {"meta_lr": 1e-2, "meta_steps": 2, "tasks_per_step": 3, "seed": 0}
INNER: dict[str, Any] = {"inner_lr": 0.1, "inner_steps": 2}


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def _dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Dropout(0.1), nn.Linear(4, 1)
    )


def _chooser() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 7), ml.models.TaskLogits(7))


# Learners by kind
MAKE: dict[str, Callable[[], Any]] = {
    "ftml": lambda: ml.FTML(_dropout, ml.losses.squared_error, support=2, query=2, **INNER, **SIZES),
    "toe": lambda: ml.TOE(_net, ml.losses.squared_error, query=2, **SIZES),
    "ftl": lambda: ml.FTL(_net, ml.losses.squared_error, query=2, **INNER, **SIZES),
    "scratch": lambda: ml.Scratch(_net, ml.losses.squared_error, query=2, **SIZES),
    "scratch of a module": lambda: ml.Scratch(_net(), ml.losses.squared_error, query=2, **SIZES),
    "bayes": lambda: ml.FTML(_net, ml.losses.squared_error, support=2, query=2, adaptation=ml.BayesianHead(), **SIZES),
    "bounded": lambda: ml.FTML(
        _net, ml.losses.squared_error, support=2, query=2, max_tasks=3, optimizer=torch.optim.RMSprop, **INNER, **SIZES
    ),
    "limited": lambda: ml.FTML(
        _net, ml.losses.squared_error, support=2, query=2, max_datapoints=3, reservoir=True, **INNER, **SIZES
    ),
    "limited n-way": lambda: ml.FTML(
        _chooser, ml.losses.cross_entropy, support=3, query=3, max_datapoints=2, max_bytes=400, **INNER, **SIZES
    ),
    "n-way": lambda: ml.FTML(_chooser, ml.losses.cross_entropy, support=3, query=3, **INNER, **SIZES),
}


def _data(kind: str, seed: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    draw = np.random.default_rng(seed)
    x = torch.from_numpy(draw.standard_normal((rows, 2)).astype(np.float32))
    if "n-way" in kind:
        return x, torch.arange(rows) % 3
    return x, torch.from_numpy(draw.standard_normal((rows, 1)).astype(np.float32))


def _takes_names(kind: str) -> bool:
    return not kind.startswith("scratch") and "n-way" not in kind


def _classes(kind: str, t: int) -> dict[str, Any]:
    return {"classes": [t, t + 2, t + 4]} if "n-way" in kind else {}


def _prepared(kind: str) -> Any:
    """A learner with rounds, among them two of one name, and with tasks observed by name."""
    learner = MAKE[kind]()
    for t, name in enumerate(("a", "b", "a")):
        learner.begin(name, **_classes(kind, t))
        learner.observe(*_data(kind, t))
    if _takes_names(kind):
        learner.observe(*_data(kind, 7), task="named", update=False)
        learner.begin("c")
        learner.observe(*_data(kind, 8))
    learner.predict(_data(kind, 0)[0])
    return learner


def _calls(kind: str, state: dict[str, Any], path: Path) -> dict[str, Call]:
    x, y = _data(kind, 20)
    calls: dict[str, Call] = {
        "begin": lambda learner: learner.begin("new", **_classes(kind, 1)),
        "observe": lambda learner: learner.observe(x, y),
        "observe(update=False)": lambda learner: learner.observe(x, y, update=False),
        "update": lambda learner: learner.update(),
        "adapt": lambda learner: learner.adapt(),
        "predict": lambda learner: learner.predict(x),
        "save": lambda learner: learner.save(path),
        "load_state_dict": lambda learner: learner.load_state_dict(state),
    }
    if _takes_names(kind):
        calls |= {
            "observe(task='a')": lambda learner: learner.observe(x, y, task="a"),
            "observe(task='new')": lambda learner: learner.observe(x, y, task="new"),
            "forget": lambda learner: learner.forget("named" if "named" in learner.tasks else "a"),
            "forget the open round": lambda learner: learner.forget("c"),
            "predict_many": lambda learner: learner.predict_many({"c": x, next(iter(learner.tasks)): x}),
        }
    return calls


def _digest(learner: Any) -> str:
    return hashlib.sha256(tree_to_bytes(learner.state_dict(), "state", 1)).hexdigest()


def _future(kind: str, learner: Any) -> tuple[bytes, str]:
    """Predictions, and the state after the next call."""
    x, y = _data(kind, 30)
    prediction = learner.predict(x).contiguous().numpy().tobytes()
    learner.observe(x, y)
    return prediction, _digest(learner)


def _tensors(learner: Any) -> list[tuple[str, int, bytes]]:
    module = learner.network.module
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, id(tensor), tensor.detach().numpy().tobytes()) for name, tensor in named]


def attack_learners(
    kinds: Sequence[str] = tuple(MAKE),
    names: Sequence[str] | None = None,
    inside: Sequence[str] = ("",),
    most: int | None = None,
    signals: int = 0,
) -> Tally:
    """Interrupt calls of learners.

    Args:
        kinds: of learners, keys of `MAKE`.
        names: of calls; all if None.
        inside: parts of the paths of the files to interrupt in.
        most: the number of lines per call, evenly spread; all if None.
        signals: instead of lines, the number of signals per call, at random moments.
    """
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            base = _prepared(kind)
            other = copy.deepcopy(base)
            other.observe(*_data(kind, 9))
            for name, call in _calls(kind, other.state_dict(), Path(folder) / "learner.safetensors").items():
                if names is None or name in names:
                    moments = _signals(call, base, signals) if signals else _lines(call, base, inside, most)
                    tally += _attack(kind, name, call, base, moments)
    return tally


# A moment: its name, and a function that runs a call with an interrupt then
Moment = tuple[object, Callable[[Callable[[], object]], bool]]


def _lines(call: Call, base: Any, inside: Sequence[str], most: int | None) -> list[Moment]:
    learner = copy.deepcopy(base)
    call(learner)  # what is built once is built
    learner = copy.deepcopy(base)
    sites = lines_of(lambda: call(learner), inside)
    sites = sites if most is None else sites[:: max(1, len(sites) // most)]
    return [(site, functools.partial(interrupted_at, site=site)) for site in sites]


def _signals(call: Call, base: Any, num: int) -> list[Moment]:
    durations = []
    for _ in range(3):
        learner = copy.deepcopy(base)
        start = time.perf_counter()
        call(learner)
        durations.append(time.perf_counter() - start)
    draw, longest = random.Random(0), min(durations)
    seconds = [1e-6 + longest * draw.random() for _ in range(num)]
    return [(f"{moment:.6f} s", functools.partial(signalled_after, seconds=moment)) for moment in seconds]


def _attack(kind: str, name: str, call: Call, base: Any, moments: Sequence[Moment]) -> Tally:
    tally, outcomes = Tally(), {}
    for changed in (False, True):
        learner = copy.deepcopy(base)
        if changed:
            call(learner)
        digest = _digest(learner)
        outcomes[digest] = _future(kind, learner)
    before = process_state()
    for moment, interrupt in moments:
        learner = copy.deepcopy(base)
        tensors = _tensors(learner)
        error = None
        try:
            if not interrupt(lambda learner=learner: call(learner)):
                continue
        except Exception as raised:
            error = raised
        problems = [f"changed {', '.join(changed)}" for changed in (changes(before),) if changed]
        repair(before)
        try:
            digest = _digest(learner)
            if digest not in outcomes:
                problems.append("the state is neither that before nor that after the call")
            elif _future(kind, learner) != outcomes[digest]:
                problems.append("it goes on otherwise")
            if _tensors(learner) != tensors:
                problems.append("the module changed")
        except Exception as raised:
            error = raised
        repair(before)
        tally.note(f"{kind}: {name} interrupted at {moment}", "; ".join(problems) or None, silent=True, error=error)
    return tally
