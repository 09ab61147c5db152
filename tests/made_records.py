"""Made-up records of a run of full size, with plausible curves, to judge figures and pages by."""

import csv
import json
from pathlib import Path

import numpy as np

from metaleader.presets import PRESETS
from metaleader.tasks import rng

# For each method: the error of the first task with little data, of late tasks, and the power of its decrease in data.
SHAPES = {
    "ftml": (0.75, 0.055, 0.25),
    "ftml-last": (0.8, 0.12, 0.2),
    "ftl": (0.75, 0.1, 0.25),
    "toe": (0.8, 0.13, 0.15),
    "scratch": (0.75, 0.75, 0.6),
}


def made_records(preset="rainbow-mnist", tasks=56, reveals=None, seeds=3, methods=tuple(SHAPES)):
    """Records as `read_records` gives them, with the further columns of nets with batch norm."""
    fixed = PRESETS[preset]("standard")
    regression = preset in ("pose", "sinusoid")
    records = []
    for method in methods:
        start, end, power = SHAPES[method]
        for seed in range(seeds):
            noise = rng(f"made records of {method}", seed)
            for t in range(tasks):
                base = end + (start - end) * np.exp(-t / 7)
                hard = np.exp(0.15 * noise.standard_normal())
                needed = None
                for i in range(reveals or fixed.reveals or 0):
                    datapoints = fixed.reveal * (i + 1)
                    error = min(0.9, float(base * hard * (i + 1) ** -power * np.exp(0.04 * noise.standard_normal())))
                    value = error if regression else 1 - error
                    meets = fixed.gamma is not None and (error <= fixed.gamma if regression else value >= fixed.gamma)
                    needed = needed or (datapoints if meets else None)
                    more = {f"loss_{n}": 2.5 * error * f for n, f in ((1, 1.2), (10, 0.97), ("task", 1.05))}
                    if not regression:
                        more |= {f"accuracy_{n}": 1 - error * f for n, f in ((1, 1.2), (10, 0.97), ("task", 1.05))}
                    records.append(
                        {
                            "method": method,
                            "seed": seed,
                            "protocol": "online",
                            "round": t,
                            "task": f"violet, half size, {t}°",
                            "datapoints": datapoints,
                            "loss": error if regression else 2.5 * error,
                            "accuracy": None if regression else value,
                            "needed": needed,
                            **more,
                        }
                    )
    return records


def uneven(records):
    """One seed does much worse than the others on every second task, so that mean - error is about zero there."""
    return [r | {"loss": r["loss"] * (1000 if r["seed"] == 0 and r["round"] % 2 else 1)} for r in records]


def made_settings(gamma, steps=(5,)):
    learned = {"loss": {}, "learners": {}}
    return {
        "meta_steps": 10,
        "reveal": 20,
        "reveals": 45,
        "gamma": gamma,
        "steps": list(steps),
        "measure_at": [],
        "before_at": [],
        **learned,
    }


def made_config(records=(), preset="rainbow-mnist", **config):
    """A configuration as `metaleader run` writes it, for any preset; `preset` is the name of the experiment."""
    fixed = PRESETS[preset if preset in PRESETS else "rainbow-mnist"]("standard")
    return {
        "format": 2,
        "experiment": preset,
        "methods": list(dict.fromkeys(r["method"] for r in records)),
        "seeds": len({r["seed"] for r in records}),
        "schedule": "standard",
        "tasks": fixed.tasks,
        "device": "cpu",
        "engine": "auto",
        "data": None,
        "tensorboard": False,
        "set": [],
        "first_seed": 0,
        "regret": False,
        "shards": 1,
        "file": None,
        "sha256": None,
        "imports": {},
        "styles": {},
        "claims": [],
        "engines": {},
        "threads": 1,
        "settings": made_settings(fixed.gamma, fixed.steps),
        "panels": list(fixed.sizes()),
        "error_name": fixed.error_name,
        "statistics": "batch",
        "hardware": "abacus",
        "versions": {"metaleader": "0.1.0", "torch": "2.13.0"},
        "commit": None,
        **config,
    }


def write_run(folder: Path, records, **config):
    """A run folder with these records."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(made_config(records, **config)))
    with open(folder / "records.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return folder
