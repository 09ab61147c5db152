"""Settings of one method tried on streams of their own seeds, as those of pose and Rainbow MNIST were tuned.

    python examples/tune.py pose ftl --seed 100 --seeds 3 --tasks 20 inner_lr=0.01 inner_lr=0.03,meta_lr=3e-3

Every setting plays the first tasks of the preset's streams, seeds side by side. One line of JSON is written for each as
soon as it is there: the mean error over seeds and the second half of the tasks, by the number of adaptation steps and
the size of D_t; of a setting that fails, the reason. The seeds of results begin at 0; from 100 on, tasks, images and
initialisations are others.
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
from metaleader.experiment import First, planned_updates
from metaleader.presets import PRESETS, Preset
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
    """Play the streams with each setting; what is printed is returned too."""
    preset = PRESETS[preset_name](schedule)
    if preset.threads is not None:
        torch.set_num_threads(preset.threads)
    preset = dataclasses.replace(preset, tasks=min(tasks or preset.tasks, preset.tasks))
    folder, place = data_folder(None if data is None else str(data)), find_device(device)
    own_seeds = list(range(seed, seed + seeds))
    streams = [First(preset.stream(own, folder), preset.tasks) for own in own_seeds]
    found = []
    for given in settings:
        started = time.perf_counter()
        engine = Engine("auto", planned_updates(preset, method), place)
        common = {"meta_steps": preset.meta_steps, "device": place, "engine": engine} | given
        line = {"preset": preset_name, "method": method, "seeds": own_seeds, "tasks": preset.tasks, **given}
        try:
            learners = [preset.known[method](preset.model, preset.loss, seed=own, **common) for own in own_seeds]
            line["errors"] = errors(preset, learners, streams)
        except (TypeError, ValueError) as error:  # a setting that the method has not, or that does not learn
            line["failed"] = str(error)
        found.append(line | {"seconds": round(time.perf_counter() - started, 1)})
        print(json.dumps(found[-1]), flush=True)
    return found


def errors(preset: Preset, learners: list[Any], streams: list[First]) -> dict[str, dict[str, float]]:
    """Mean errors by the number of adaptation steps and the size of D_t."""
    plays = play_together(
        learners, streams, preset.reveal, reveals=preset.reveals, steps=preset.steps, measure_at=preset.panels
    )
    late = [record for records in plays for record in records if record.round >= preset.tasks // 2]
    suffixes = ["", *(f"_{number}" for number in preset.steps[1:])]
    return {
        str(steps): {
            str(size): round(float(np.mean([error(r, suffix) for r in late if r.datapoints == size])), 4)
            for size in preset.panels
        }
        for steps, suffix in zip(preset.steps, suffixes, strict=True)
    }


def error(record: Record, suffix: str) -> float:
    """What a result reports: 1 - accuracy, or for regression the loss."""
    if record.accuracy is None:
        return record.more[f"loss{suffix}"] if suffix else record.loss
    return 1 - (record.more[f"accuracy{suffix}"] if suffix else record.accuracy)


def setting(text: str) -> dict[str, float]:
    """`name=number` pairs, separated by commas; `inner_steps=10` is an integer."""
    pairs = (pair.split("=") for pair in text.split(","))
    return {name: int(value) if value.isdigit() else float(value) for name, value in pairs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("method")
    parser.add_argument("settings", nargs="+", type=setting, metavar="name=number[,name=number]")
    parser.add_argument("--seed", type=int, default=100, help="the first seed (100)")
    parser.add_argument("--seeds", type=int, default=1, help="how many, side by side (1)")
    parser.add_argument("--tasks", type=int, help="how many of the preset's; all if not given")
    parser.add_argument("--data", type=Path, help="the folder with data sets")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    given = parser.parse_args()
    known = PRESETS[given.preset]("standard").known
    if given.method not in known:
        parser.error(f"{given.preset} has {', '.join(known)}; got {given.method}")
    tune(given.preset, given.method, given.settings, given.seed, given.seeds, given.tasks, given.data, given.device)
