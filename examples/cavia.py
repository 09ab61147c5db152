"""CAVIA: adaptation changes a context vector only, from zero. Run it with `python examples/cavia.py`."""

import torch
from torch import nn

import metaleader as ml


class WithContext(nn.Module):
    """A network whose inputs are extended by a context vector."""

    def __init__(self, size=4):
        super().__init__()
        self.context, self.body = nn.Parameter(torch.zeros(size)), ml.models.mlp(1 + size, 1)

    def forward(self, x):
        return self.body(torch.cat([x, self.context.expand(len(x), -1)], 1))


class CAVIA(ml.FTML):
    """FTML that adapts the context and keeps its initial value at zero."""

    def task_gradient(self, params, support, query):
        loss, gradients = super().task_gradient(params, support, query)
        return loss, gradients | {"context": torch.zeros_like(params["context"])}


def make(**settings):
    settings = {"only": "context", "inner_lr": 0.1, "meta_steps": 2, "tasks_per_step": 5} | settings
    return CAVIA(WithContext, ml.losses.squared_error, **settings)


if __name__ == "__main__":
    for record in ml.play(make(), ml.streams.SinusoidStream(tasks=20, train=20), reveal=20):
        print(f"{record.task}: squared error {record.loss:.3f}")
