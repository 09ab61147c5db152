"""Meta-SGD: one learned step size per number of the network. Run it with `python examples/meta_sgd.py`."""

import math
from dataclasses import dataclass

import torch

import metaleader as ml
from metaleader.engine.objective import Adaptation


@dataclass(frozen=True)
class MetaSGD(Adaptation):
    """Gradient steps whose step sizes, `lr` at first, are learned with the initialisation."""

    lr: float = 0.02
    steps: int = 2

    def init(self, network):
        return {f"log rate of {name}": torch.full_like(v, math.log(self.lr)) for name, v in network.params().items()}

    def __call__(self, network, params, data):
        adapted = {name: value for name, value in params.items() if f"log rate of {name}" in params}
        for _ in range(self.steps):
            gradient = torch.func.grad(network.loss_fn)(adapted, data)
            adapted = {n: v - params[f"log rate of {n}"].exp() * gradient[n] for n, v in adapted.items()}
        return adapted


def make(**settings):
    settings = {"adaptation": MetaSGD(), "meta_steps": 2, "tasks_per_step": 5} | settings
    return ml.FTML(lambda: ml.models.mlp(1, 1), ml.losses.squared_error, **settings)


if __name__ == "__main__":
    for record in ml.play(make(), ml.streams.SinusoidStream(tasks=20, train=20), reveal=20):
        print(f"{record.task}: squared error {record.loss:.3f}")
