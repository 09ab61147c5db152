"""Compare methods on your own stream: two seeds per method, a table, and the figures of the paper.

Run it with `python examples/compare.py [FOLDER]`. The figures go to FOLDER, by default `runs/compare`. A method is a
function that makes a learner: a learner of the library with other settings, such as the one that stores only the newest
tasks, or your own learner (docs/howto/learner.md). Mixed effects and joint training with an offset per task show
whether meta-learning pays: they adapt in closed form, and no network per task.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

import metaleader as ml
from metaleader.methods import known_method
from metaleader.report.figures import draw_figures

GAMMA = 2.0  # a task counts as learned at this error or less
SETTINGS: dict[str, Any] = {"meta_lr": 3e-3, "meta_steps": 5, "tasks_per_step": 10, "query": 5}
INNER: dict[str, Any] = {"inner_lr": 0.02, "inner_steps": 5}
METHODS: dict[str, Any] = {
    "ftml": lambda *args, **options: ml.FTML(*args, **SETTINGS, **INNER, support=5, **options),
    "ftml, newest 3": lambda *args, **options: ml.FTML(*args, **SETTINGS, **INNER, support=5, max_tasks=3, **options),
    "toe": lambda *args, **options: ml.TOE(*args, **SETTINGS, **options),
    "ftl": lambda *args, **options: ml.FTL(*args, **SETTINGS, **INNER, **options),
    "mixed": known_method("mixed", {"meta_steps": 5, "tasks_per_step": 10, "query": 5, "support": 5}),
    "joint-offset": known_method("joint-offset", {**SETTINGS, "support": 5}),
    "scratch": lambda *args, **options: ml.Scratch(*args, **SETTINGS, **options),
}


def main(folder: Path = Path("runs/compare"), tasks: int = 12, seeds: int = 2) -> list[dict[str, Any]]:
    """Play every method on the same streams, draw the figures, and return the records."""
    records = []
    for method, make in METHODS.items():
        for seed in range(seeds):
            # A list of ml.Task(name, train=ml.Batch(x, y), test=ml.Batch(x, y)) is a stream too.
            stream = ml.streams.SinusoidStream(tasks=tasks, train=30, seed=seed)
            learner = make(lambda: ml.models.mlp(1, 1), ml.losses.squared_error, seed=seed)
            # By default, `play` measures after five adaptation steps, whatever the learner's `inner_steps`.
            for record in ml.play(learner, stream, reveal=10, gamma=GAMMA):
                records.append({"method": method, "seed": seed, **dataclasses.asdict(record)})
        late = [
            r["loss"] for r in records if r["method"] == method and r["datapoints"] == 10 and 2 * r["round"] >= tasks
        ]
        print(f"{method:>15}: squared error {np.mean(late):.2f} after 10 datapoints, second half of the tasks")
    folder.mkdir(parents=True, exist_ok=True)
    for path in draw_figures(records, [10, 30], folder, "squared error", GAMMA):
        print(path)
    return records


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
