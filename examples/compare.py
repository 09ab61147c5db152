"""Methods compared on a stream of your own: two seeds each, a table, and the figures of the paper.

Run it with `python examples/compare.py [FOLDER]`; the figures go to the folder, `runs/compare` if none is given. A
method is a function that makes a learner: one of the library's with other settings, as the one here that remembers the
newest tasks only, or one of your own (docs/howto/learner.md).
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

import metaleader as ml
from metaleader.report.figures import draw_figures

GAMMA = 2.0  # the error at which a task counts as learned
SETTINGS: dict[str, Any] = {"meta_lr": 3e-3, "meta_steps": 5, "tasks_per_step": 10, "query": 5}
INNER: dict[str, Any] = {"inner_lr": 0.02, "inner_steps": 5}
METHODS: dict[str, Any] = {
    "ftml": lambda *args, **given: ml.FTML(*args, **SETTINGS, **INNER, support=5, **given),
    "ftml, newest 3": lambda *args, **given: ml.FTML(*args, **SETTINGS, **INNER, support=5, max_tasks=3, **given),
    "toe": lambda *args, **given: ml.TOE(*args, **SETTINGS, **given),
    "ftl": lambda *args, **given: ml.FTL(*args, **SETTINGS, **INNER, **given),
    "scratch": lambda *args, **given: ml.Scratch(*args, **SETTINGS, **given),
}


def main(folder: Path = Path("runs/compare"), tasks: int = 12, seeds: int = 2) -> list[dict[str, Any]]:
    """Play every method on the same streams; return the records, draw them."""
    records = []
    for method, make in METHODS.items():
        for seed in range(seeds):
            # A list of ml.Task(name, train=ml.Batch(x, y), test=ml.Batch(x, y)) is a stream too.
            stream = ml.streams.SinusoidStream(tasks=tasks, train=30, seed=seed)
            learner = make(lambda: ml.models.mlp(1, 1), ml.losses.squared_error, seed=seed)
            # Measured after five adaptation steps, whatever the learner's own number, unless `steps` says otherwise.
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
