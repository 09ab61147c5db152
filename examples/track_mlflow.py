"""Send the records of a run to MLflow: `python examples/track_mlflow.py sinusoid runs/sinusoid`."""

import sys
from pathlib import Path

import mlflow  # pyright: ignore[reportMissingImports]

from metaleader.runner import RunOptions, run_experiment


def on_record(method, seed, record):
    """Log the measurements of a record, with the round as the step."""
    values = {"loss": record.loss, "accuracy": record.accuracy}
    start = f"{method}/seed_{seed}/after_{record.datapoints}"
    mlflow.log_metrics({f"{start}/{n}": v for n, v in values.items() if v is not None}, step=record.round)


def main(options, folder):
    with mlflow.start_run(run_name=folder.name):
        mlflow.log_params({"experiment": options.experiment, "seeds": options.seeds, "set": " ".join(options.set)})
        run_experiment(options, folder, on_record)
        for name in ("config.json", "records.csv", "report.html"):
            mlflow.log_artifact(str(folder / name))


if __name__ == "__main__":
    main(RunOptions(sys.argv[1]), Path(sys.argv[2]))
