"""Presets small enough to be run dozens of times, and what a run leaves behind."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from metaleader import losses, models
from metaleader.experiments.experiment import Experiment
from metaleader.learners import FTML, TOE, Scratch
from metaleader.methods import Method
from metaleader.presets import PRESETS
from metaleader.streams import Labelled, NWayStream, SinusoidStream
from metaleader.system.trees import load_tree


def small_net():
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


def tiny(schedule="standard") -> Experiment:
    """Sinusoids, two updates a reveal, all five methods; dropout, so that its masks are tested too."""
    return dataclasses.replace(
        PRESETS["sinusoid"]("quick"),
        stream=lambda seed, data: SinusoidStream(tasks=9, train=12, test=5, seed=seed),
        network=small_net,
        tasks=3,
        meta_steps=2,
        reveal=4,
        reveals=2,
        panels=(4, 8),
        steps=(2, 1),
    )


def chooser():
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    return nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 7), models.TaskLogits(7))


def tiny_nway(schedule="standard") -> Experiment:
    """3-way tasks whose images come again, batch norm, and fewer reveals than a task has data for."""
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(7), 5)
    x = (draw.standard_normal((35, 4)) + labels[:, None]).astype(np.float32)
    ways: dict[str, Any] = {"query": 3, "tasks_per_step": 2}
    return dataclasses.replace(
        tiny(),
        stream=lambda seed, data: NWayStream(Labelled(x, labels, x, labels), ways=3, per_class=4, seed=seed),
        network=lambda: nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 3)
        ),
        loss=functools.partial(losses.cross_entropy, smoothing=0.1),
        methods={
            "ftml": Method(FTML, **ways, support=3, optimizer="sgd", meta_lr=[(0, 0.1), (9, 0.01)]),
            "toe": Method(TOE, model=chooser, **ways),
            "scratch": Method(Scratch, **ways),
        },
        tasks=5,
        reveal=3,
        reveals=3,
        gamma=0.9,
        panels=(3, 9),
        error_name="error",
    )


def results(folder: Path) -> dict[str, Any]:
    """What must be the same however often a run was stopped: the bytes of the records and of every saved tensor."""
    found: dict[str, Any] = {"records.csv": (folder / "records.csv").read_bytes()}
    for path in sorted((folder / "checkpoint").iterdir()):
        tree = load_tree(path, "metaleader-checkpoint", 2)
        found[path.name] = tree_map(lambda leaf: leaf.numpy().tobytes() if isinstance(leaf, Tensor) else leaf, tree)
    return found
