"""Try settings of one method on streams with separate seeds, as the settings for pose and Rainbow MNIST were tuned.

    python examples/tune.py pose ftl --seed 100 --seeds 3 --tasks 20 inner_lr=0.01 inner_lr=0.03,meta_lr=3e-3

Each setting plays the first tasks of the preset's streams, batched over seeds. It writes one line of JSON: the mean
error over seeds and the second half of the tasks, by the number of adaptation steps and the size of D_t, or the reason
of a failure. Published results use seeds from 0; seeds from 100 give other tasks, images and initialisations.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metaleader.engine.engine import Engine
from metaleader.evaluate import Record, play_together
from metaleader.experiments.experiment import Experiment
from metaleader.presets import PRESETS
from metaleader.runner.plan import make_stream, planned_updates
from metaleader.streams.base import View
from metaleader.streams.datasets.registry import data_folder
from metaleader.system.machine import find_device


def tune(
    preset_name: str,
    method: str,
    settings: list[dict[str, float]],
    seed: int = 100,
    seeds: int = 1,
    tasks: int | None = None,
    data: Path | None = None,
    device: str = "auto",
    schedule: Any = "standard",
) -> list[dict[str, Any]]:
    """Play the streams with each setting, and return the printed lines."""
    preset = PRESETS[preset_name](schedule)
    if preset.threads is not None:
        torch.set_num_threads(preset.threads)
    most = preset.tasks or 0
    preset = dataclasses.replace(preset, tasks=min(tasks or most, most))
    folder, torch_device = data_folder(None if data is None else str(data)), find_device(device)
    seed_list = list(range(seed, seed + seeds))
    streams = [View(make_stream(preset, s, str(folder)), range(preset.tasks or 0)) for s in seed_list]
    lines = []
    for values in settings:
        started = time.perf_counter()
        engine = Engine("auto", planned_updates(preset, method), torch_device)
        options = {"meta_steps": preset.meta_steps, "device": torch_device, "engine": engine} | values
        line = {"preset": preset_name, "method": method, "seeds": seed_list, "tasks": preset.tasks, **values}
        try:
            learners = [preset.all_methods[method](preset.network, preset.loss, seed=s, **options) for s in seed_list]
            line["errors"] = errors(preset, learners, streams)
        except (TypeError, ValueError) as error:  # an option that the method does not have, or a loss that diverges
            line["failed"] = str(error)
        lines.append(line | {"seconds": round(time.perf_counter() - started, 1)})
        print(json.dumps(lines[-1]), flush=True)
    return lines


def errors(preset: Experiment, learners: list[Any], streams: list[View]) -> dict[str, dict[str, float]]:
    """Return mean errors by the number of adaptation steps and the size of D_t."""
    plays = play_together(
        learners, streams, preset.reveal, reveals=preset.reveals, steps=preset.steps, measure_at=preset.sizes()
    )
    late = [record for records in plays for record in records if record.round >= (preset.tasks or 0) // 2]
    suffixes = ["", *(f"_{number}" for number in preset.steps[1:])]
    return {
        str(steps): {
            str(size): round(float(np.mean([error(r, suffix) for r in late if r.datapoints == size])), 4)
            for size in preset.sizes()
        }
        for steps, suffix in zip(preset.steps, suffixes, strict=True)
    }


def error(record: Record, suffix: str) -> float:
    """Return the reported error: 1 - accuracy, or the loss for regression."""
    if record.accuracy is None:
        return record.more[f"loss{suffix}"] if suffix else record.loss
    return 1 - (record.more[f"accuracy{suffix}"] if suffix else record.accuracy)


def setting(text: str) -> dict[str, float]:
    """Parse `name=number` pairs, separated by commas; `inner_steps=10` gives an integer."""
    pairs = (pair.split("=") for pair in text.split(","))
    return {name: int(value) if value.isdigit() else float(value) for name, value in pairs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("method")
    parser.add_argument("settings", nargs="+", type=setting, metavar="name=number[,name=number]")
    parser.add_argument("--seed", type=int, default=100, help="the first seed (100)")
    parser.add_argument("--seeds", type=int, default=1, help="the number of seeds (1)")
    parser.add_argument("--tasks", type=int, help="the number of tasks; all of the preset's tasks if not given")
    parser.add_argument("--data", type=Path, help="the folder with data sets")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    args = parser.parse_args()
    methods = PRESETS[args.preset]("standard").all_methods
    if args.method not in methods:
        parser.error(f"{args.preset} has {', '.join(methods)}; got {args.method}")
    tune(args.preset, args.method, args.settings, args.seed, args.seeds, args.tasks, args.data, args.device)
