"""The updates to measure: the paper's shapes, on random images."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from metaleader import losses, models
from metaleader.engine.engine import Engine
from metaleader.gradient.selection import Params
from metaleader.learners import FTML, TOE, Learner
from metaleader.learners.options import initial_module
from metaleader.losses import Loss
from metaleader.tasks import Batch, rng, to_device

INNER_LR = 0.1

# Parameters, support and query; tensors have a leading learner dimension, those of batches then a task dimension.
Inputs = tuple[Params, Batch, Batch]


@dataclass(frozen=True)
class Work:
    """Updates of one or more learners of the same shape.

    Attributes:
        model: builds the network.
        image: the shape of an image, (channels, height, width).
        outputs: the number of classes, or with `regression` of values to predict.
        support: support datapoints per task.
        query: query datapoints per task.
        inner_steps: the number of inner steps; 0 is the update of the baselines (TOE, FTL).
        tasks: tasks per update.
        seeds: the number of learners updated together.
        regression: whether the loss is the squared error instead of cross-entropy.
    """

    model: Callable[[], nn.Module]
    image: tuple[int, int, int] = (3, 28, 28)
    outputs: int = 10
    support: int = 10
    query: int = 10
    inner_steps: int = 5
    tasks: int = 25
    seeds: int = 1
    regression: bool = False

    @property
    def inner_lr(self) -> float:
        """The step size of the inner loop."""
        return INNER_LR

    @property
    def loss(self) -> Loss:
        """The loss, with the paper's label smoothing."""
        return losses.squared_error if self.regression else functools.partial(losses.cross_entropy, smoothing=0.1)

    def datapoints(self, num: int, *key: int) -> Batch:
        """Random images, uint8 as in a buffer, with random targets."""
        draw = rng("bench", *key)
        x = torch.from_numpy(draw.integers(256, size=(num, *self.image), dtype="uint8"))
        if self.regression:
            return Batch(x, torch.from_numpy(draw.uniform(-1, 1, (num, self.outputs)).astype("float32")))
        return Batch(x, torch.from_numpy(draw.integers(self.outputs, size=num)))

    def inputs(self, device: torch.device, draw: int = 0) -> Inputs:
        """The inputs of an update; each draw has different initialisations and images."""
        per_learner = []
        for seed in range(self.seeds):
            module = initial_module(self.model, draw, seed).to(device)
            params = {name: value.detach().clone() for name, value in module.named_parameters()}
            width = self.support + self.query
            flat = to_device(self.datapoints(self.tasks * width, draw, seed), device)
            batch = tree_map(lambda leaf: leaf.unflatten(0, (self.tasks, width)), flat)  # noqa: B023
            support = tree_map(lambda leaf: leaf[:, : self.support], batch)
            query = tree_map(lambda leaf: leaf[:, self.support :], batch)
            per_learner.append((params, support, query))
        return tree_map(lambda *leaves: torch.stack(leaves), *per_learner)

    def learner(self, engine: Engine, device: torch.device, seed: int = 0, meta_steps: int = 10) -> Learner:
        """A new learner without data: FTML, or TOE if there are no inner steps."""
        common: Any = {"query": self.query, "tasks_per_step": self.tasks, "meta_steps": meta_steps}
        if self.inner_steps:
            common |= {"inner_lr": self.inner_lr, "inner_steps": self.inner_steps, "support": self.support}
        kind = FTML if self.inner_steps else TOE
        return kind(self.model, self.loss, seed=seed, device=device, engine=engine, **common)

    def learners(self, engine: Engine, device: torch.device, num_tasks: int = 30) -> list[Learner]:
        """Learners that have observed some tasks and made no update."""
        learners = []
        for seed in range(self.seeds):
            learner = self.learner(engine, device, seed)
            for t in range(num_tasks):
                learner.begin(f"task {t}")
                learner.observe(*self.datapoints(2 * (self.support + self.query), seed, t), update=False)
            learners.append(learner)
        return learners

    def no_chain(self) -> Work:
        """The same work with a network that is not a chain, because it does not begin with a convolution."""
        return replace(self, model=functools.partial(_hide, self.model))


def _hide(model: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Identity(), model())


RAINBOW = Work(functools.partial(models.conv_net, 10))
SEEDS = replace(RAINBOW, seeds=3)
CIFAR = Work(functools.partial(models.conv_net, 5, 32), (3, 32, 32), 5, 25, 25)
POSE = Work(models.pose_net, (3, 64, 64), 4, regression=True)
PLAIN = replace(RAINBOW, support=0, inner_steps=0)
