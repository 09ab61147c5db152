"""Sensors of a plant: later sensors need fewer readings. Change what you need; every part is explained.

metaleader run experiment.py                              play all methods, and write a report
metaleader run experiment.py --set ftml.inner_lr=0.05     change a setting; `metaleader list experiment.py` shows all
metaleader verify runs/experiment                         test the claims below
"""

import numpy as np
import torch

import metaleader as ml


def stream(seed: int, sensors: int = 12, readings: int = 30, noise: float = 0.02) -> list[ml.Task]:
    """The stream of a seed: a list of tasks. Replace this with your data.

    The keyword arguments are settings: --set stream.noise=0.1.
    """
    draw = np.random.default_rng(seed)
    tasks = []
    for number in range(sensors):
        gain, phase = draw.uniform(0.5, 2.0), draw.uniform(0.0, 1.0)
        x = draw.uniform(-1.0, 1.0, (readings + 50, 1)).astype(np.float32)
        y = (gain * np.cos(3.0 * x + phase) + noise * draw.normal(size=x.shape)).astype(np.float32)
        train, test = slice(0, readings), slice(readings, None)  # a learner never sees the test data
        tasks.append(ml.Task(f"sensor {number}", ml.Batch(x[train], y[train]), ml.Batch(x[test], y[test])))
    return tasks


def network(hidden: int = 32, layers: int = 2) -> torch.nn.Module:
    """The network that all methods start from: any nn.Module. Its arguments are settings: --set network.hidden=64."""
    return ml.models.mlp(1, 1, [hidden] * layers)


class Nearest:
    """A method of your own: any object with begin, observe and adapt. It answers with the nearest reading."""

    def begin(self, name: str) -> None:
        """A new task begins."""
        self.x, self.y = torch.zeros(0, 1), torch.zeros(0, 1)

    def observe(self, x: torch.Tensor, y: torch.Tensor, update: bool = True) -> None:
        """Data of the task arrives."""
        self.x, self.y = torch.cat([self.x, x.cpu()]), torch.cat([self.y, y.cpu()])

    def adapt(self, steps: list[int], statistics: str) -> list:
        """One function of x for each number of adaptation steps."""
        return [lambda x: self.y[torch.cdist(x.cpu(), self.x).argmin(1)].to(x.device)] * len(steps)


# Options of all gradient methods. A setting of one method: --set ftml.meta_lr=0.01; of all: --set all.meta_lr=0.01
outer = {"meta_lr": 5e-3, "tasks_per_step": 8, "query": 5}
inner = {"inner_lr": 0.1, "inner_steps": 3}

experiment = ml.Experiment(
    summary="one regression per sensor, an MLP; needs no data",
    stream=stream,
    network=network,
    loss=ml.losses.squared_error,  # any function of (prediction, target)
    methods={
        # The library's methods by name, with options of their learners ...
        "ftml": {**outer, **inner, "support": 5},
        "ftl": {**outer, **inner},
        "toe": outer,
        # ... baselines in closed form: a linear model per sensor, shrunk to the mean of all sensors; one network for
        # all sensors, and a shrunk offset for each. If one of these is best, no network has to be adapted. ...
        "mixed": {"tasks_per_step": 8, "query": 5, "support": 5},
        "joint-offset": {**outer, "support": 5},
        # ... and methods of your own: a class, a function or an object, with a label and a colour if you like.
        "nearest": ml.Method(Nearest, label="nearest reading", colour="#D55E00"),
    },
    reveal=5,  # readings per reveal
    reveals=2,  # reveals per task; leave it out to reveal all readings
    meta_steps=10,  # updates per reveal
    gamma=0.05,  # a task counts as learned at this error
    steps=(3, 1),  # adaptation steps to measure; the first counts
    error_name="squared error",
    # Tested by `metaleader verify` over the last third of the tasks, with an interval over seeds.
    claims=[ml.better("ftml", "toe", at=5, margin=0.05), ml.better("ftml", "nearest", at=5)],
    threads=1,
)
