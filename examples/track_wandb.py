"""Send the records of a run to Weights & Biases: `python examples/track_wandb.py sinusoid runs/sinusoid`."""

import json
import sys
from pathlib import Path

import wandb  # pyright: ignore[reportMissingImports]

from metaleader.runner import RunOptions, run_experiment


def main(options, folder):
    with wandb.init(project="metaleader", name=folder.name) as run:

        def on_record(method, seed, record):
            """Log the measurements of a record; methods are played one after another, so the round is a value."""
            values = {"loss": record.loss, "accuracy": record.accuracy}
            start = f"{method}/seed {seed}/after {record.datapoints}"
            run.log({"round": record.round} | {f"{start}/{n}": v for n, v in values.items() if v is not None})

        run_experiment(options, folder, on_record)
        run.config.update(json.loads((folder / "config.json").read_bytes()))


if __name__ == "__main__":
    main(RunOptions(sys.argv[1]), Path(sys.argv[2]))
