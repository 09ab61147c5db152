"""What a learner starts from: its module, initialised from seed and round alone, and its hyperparameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np
import torch
from torch import nn

from metaleader.engine.engine import Engine, Mode
from metaleader.gradient.inner import Params, StepSize, moving_names, step_sizes
from metaleader.learners.optimizer import OptimizerFactory, Schedule
from metaleader.memory.by_task import Weights
from metaleader.tasks import Tree, rng

Model = nn.Module | Callable[[], nn.Module]


class Common(TypedDict, total=False):
    """Hyperparameters of every learner; see `Learner`."""

    meta_lr: Schedule
    meta_steps: int
    tasks_per_step: int
    query: int
    optimizer: str | OptimizerFactory
    clip: float | None
    weights: Weights | None
    max_tasks: int | None
    preprocess: Callable[[Tree], Tree] | None
    seed: int
    device: str | torch.device
    engine: Mode | Engine


def initial_module(model: Model, seed: int, t: int, fresh: bool = False) -> nn.Module:
    """Build the module of a learner, from seed and round alone; with `fresh`, a given module is initialised anew."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng("initialisation", seed, t).integers(2**63)))
        if not isinstance(model, nn.Module):
            built = model() if callable(model) else model
            if not isinstance(built, nn.Module):
                raise ValueError(
                    f"the model must be an nn.Module or a function that builds one, got {type(built).__name__}"
                )
            return built
        if not fresh:
            return model
        module = copy.deepcopy(model)
        for name, part in module.named_modules():
            if not any(True for _ in part.parameters(recurse=False)):
                continue
            reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
            if reset is None:
                raise ValueError(
                    f"layer {name!r} ({type(part).__name__}) has no reset_parameters, so it cannot be initialised anew;"
                    " pass a function that builds the model instead of a module"
                )
            reset()
        return module


def check_integer(name: str, value: Any, low: int) -> None:
    """Refuse what is not an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")


def check_step_size(name: str, lr: StepSize, params: Params, only: str | None) -> None:
    """Refuse step sizes that are negative, not finite, or not of the tensors that move."""
    moving = {key: params[key] for key in moving_names(params, only)}
    for key, value in step_sizes(lr, moving).items():
        if not hasattr(value, "__float__"):
            raise ValueError(f"{name} must be a number, or one for each tensor by name; got {value!r} for {key}")
        if not (math.isfinite(float(value)) and float(value) >= 0):
            raise ValueError(f"{name} must be a finite number of at least 0, got {float(value)} for {key}")
