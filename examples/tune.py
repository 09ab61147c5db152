"""Settings of one method tried on a stream of its own seed, as the published results tune every method.

    python examples/tune.py pose ftl --seed 100 --tasks 20 meta_lr=1e-3,inner_lr=0.01 meta_lr=1e-3,inner_lr=0.03

Every setting plays the first tasks of the preset's stream. One line of JSON is written for each as soon as it is
there: the mean error over the second half of the tasks, by the number of adaptation steps and the size of D_t. The
seeds of results begin at 0; a seed such as 100 has other tasks, images and initialisations.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from metaleader.data import data_folder
from metaleader.engine import Engine
from metaleader.evaluate import Record, play
from metaleader.experiment import First
from metaleader.machine import find_device
from metaleader.presets import PRESETS


def tune(
    preset_name: str,
    method: str,
    settings: list[dict[str, float]],
    seed: int = 100,
    tasks: int | None = None,
    data: Path | None = None,
    device: str = "auto",
    schedule: str = "standard",
) -> list[dict[str, object]]:
    """Play the stream with each setting; what is printed is returned too."""
    preset = PRESETS[preset_name](schedule)  # type: ignore[arg-type]
    num = min(tasks or preset.tasks, preset.tasks)
    planned = num * preset.reveals * preset.meta_steps // (1 if method.startswith("ftml") else 10)
    stream = First(preset.stream(seed, data_folder(None if data is None else str(data))), num)
    found = []
    for setting in settings:
        started = time.perf_counter()
        place = find_device(device)
        learner = preset.known[method](
            preset.model,
            preset.loss,
            **({"meta_steps": preset.meta_steps, "seed": seed, "device": place} | setting),
            engine=Engine("auto", planned, place),
        )
        records = list(play(learner, stream, preset.reveal, reveals=preset.reveals, steps=preset.steps))
        late = [record for record in records if record.round >= num // 2]
        errors = {
            str(steps): {
                size: round(float(np.mean([error(r, suffix) for r in late if r.datapoints == size])), 4)
                for size in preset.panels
            }
            for steps, suffix in zip(preset.steps, ["", *(f"_{number}" for number in preset.steps[1:])], strict=True)
        }
        seconds = round(time.perf_counter() - started, 1)
        line = {"preset": preset_name, "method": method, "seed": seed, "tasks": num, **setting}
        found.append(line | {"errors": errors, "seconds": seconds})
        print(json.dumps(found[-1]), flush=True)
    return found


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
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--tasks", type=int)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    tune(given.preset, given.method, given.settings, given.seed, given.tasks, given.data, given.device)
