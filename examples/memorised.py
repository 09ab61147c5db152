"""Do the learners of a run remember their images? Errors on images that they trained on, and on test images.

The final learners of a finished run adapt to the first 20 datapoints of each task of the stream. They are measured on
the task's other training images and on its test images, with batch norm's statistics of the images measured. Means over
all tasks, in per cent, one line per method and seed. From scratch is left out, since it begins anew with every task.

    python examples/memorised.py RUN [--data DIR]
"""

import argparse
from pathlib import Path

import torch

from metaleader.evaluate import preload
from metaleader.runner import RunOptions
from metaleader.runner.plan import planned
from metaleader.runs.folder import read_checkpoint, read_config
from metaleader.streams.base import View

SIZE = 20


def error(net, batch):
    """The percentage of datapoints of which another class is the most probable one."""
    with torch.no_grad():
        return 100 * (net(batch.x).argmax(1) != batch.y).double().mean().item()


def main(folder, data=None):
    """Print and return (method, seed, error on images trained on, error on test images)."""
    config = read_config(folder)
    given = {name: config[name] for name in ("experiment", "schedule", "tasks")} | {"device": "cpu", "data": data}
    plan = planned(RunOptions(**given, methods=tuple(config["methods"]), set=tuple(config["set"])))
    rows = []
    for method in (name for name in plan.methods if name != "scratch"):
        saved = read_checkpoint(folder, method)
        for seed, state in enumerate(saved["state"]["learners"], config["first_seed"]):
            stream = View(plan.stream(seed), range(saved["rounds_played"]))
            learner = plan.learner(method, seed, device="cpu", engine="eager")
            preload(learner, stream, len(stream), plan.experiment.reveal * plan.experiment.reveals)
            learner.load_state_dict(state)
            errors = []
            for t in range(len(stream)):
                (x, y), test = stream[t].train, stream[t].test
                learner.observe(x[:SIZE], y[:SIZE], task=f"again {t}", update=False)
                net = learner.adapt(statistics="batch", task=f"again {t}")
                errors.append((error(net, test._replace(x=x[SIZE:], y=y[SIZE:])), error(net, test)))
            trained, held_out = torch.tensor(errors).mean(0).tolist()
            print(f"{method}, seed {seed}: trained on {trained:.2f} %, test {held_out:.2f} %", flush=True)
            rows.append((method, seed, trained, held_out))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", help="the folder with data sets")
    given = parser.parse_args()
    main(given.run, given.data)
