"""The hyperparameters of learners, declared once, and the initial module.

A dataclass of options is the signature of a learner's constructor, the content of its file, and its documentation.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn

from metaleader.gradient.selection import Params, StepSize, split, step_sizes
from metaleader.learners.optimizer import OptimizerFactory, Schedule
from metaleader.memory.limits import Limits
from metaleader.memory.rows import Weights
from metaleader.nets.functional import scale_uint8
from metaleader.system.settings import restoring
from metaleader.tasks import Tree, rng

Model = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Hyperparameters of every learner."""

    meta_lr: Schedule = 1e-3
    """The outer step size, or (from update, step size) pairs such as `[(0, 0.01), (5000, 0.001)]`."""
    meta_steps: int = 10
    """Updates at each `observe`."""
    tasks_per_step: int = 25
    """Tasks in one update."""
    query: int = 10
    """Datapoints of each task on which the loss of an update is taken."""
    optimizer: str | OptimizerFactory = "adam"
    """"adam", "sgd" (momentum 0.9), or a function of (parameters, lr=...) such as `torch.optim.AdamW`. A schedule
    scales the step sizes that it gives to groups of parameters."""
    clip: float | None = None
    """The largest norm of a gradient; longer ones are scaled down."""
    weights: Weights | None = None
    """nu^t, the distribution over the tasks seen, such as `recency(10)`; None is uniform."""
    max_tasks: int | None = None
    """The number of tasks kept: the newest, or those with the largest `weights`. 1 keeps the current task alone: a
    streaming learner. None keeps all."""
    max_datapoints: int | None = None
    """The number of datapoints kept of each task; of n-way tasks, of each class. None keeps all."""
    max_bytes: int | None = None
    """The bytes of all datapoints kept: tasks are dropped as by `max_tasks`, and one task takes at most half. None
    keeps all."""
    reservoir: bool = False
    """Whether `max_datapoints` and `max_bytes` keep a uniform random sample of the datapoints of a task; otherwise the
    newest."""
    preprocess: Callable[[Tree], Tree] | None = scale_uint8
    """Applied to every x; by default scales uint8 to [0, 1]."""
    seed: int = 0
    """Of the initialisation and of all draws."""
    shards: int = 1
    """The number of parts of an update's tasks, which processes of torch.distributed can share out among them. It
    changes the draws; the number of processes changes nothing."""

    def __post_init__(self) -> None:
        for name, low in _INTEGERS.items():
            if hasattr(self, name):
                check_integer(name, getattr(self, name), low)
        self.limits()
        if self.shards > self.tasks_per_step:
            raise ValueError(
                f"shards must be at most tasks_per_step, so that each draws a task; got shards={self.shards} and"
                f" tasks_per_step={self.tasks_per_step}"
            )
        if self.preprocess is not None and not callable(self.preprocess):
            raise ValueError(f"preprocess must be a function of x, or None; got {self.preprocess!r}")
        if self.weights is not None and not callable(self.weights):
            raise ValueError(
                f"weights must be a function of the number of tasks, as metaleader.recency(20); got {self.weights!r}"
            )

    def limits(self) -> Limits:
        """The limits of memory."""
        names = ("max_tasks", "max_datapoints", "max_bytes", "reservoir", "seed")
        return Limits(**{name: getattr(self, name) for name in names})

    @classmethod
    def parse(cls, settings: Mapping[str, Any], learner: str) -> Self:
        """Build options from keyword arguments; a misspelt name raises an error that suggests the right one."""
        names = [field.name for field in fields(cls)]
        for name in settings:
            if name not in names:
                close = difflib.get_close_matches(name, [*names, *_PLACES], 1)
                advice = f"did you mean {close[0]}?" if close else f"it has {', '.join([*names, *_PLACES])}"
                raise ValueError(f"{learner} has no setting {name!r}; {advice}")
        options = cls(**settings)
        for field in fields(cls):
            value = getattr(options, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field.name} must be True or False, got {value!r}")
            if isinstance(value, bool) and "bool" not in str(field.type):
                raise ValueError(f"{field.name} must be no boolean, got {value}")
        return options

    def plain(self) -> dict[str, Any]:
        """The options by name, as values that a file can hold; functions are left as they are."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.meta_lr, Sequence):
            values["meta_lr"] = [list(pair) for pair in self.meta_lr]
        elif not isinstance(self.meta_lr, int):
            values["meta_lr"] = float(self.meta_lr)  # of NumPy
        inner_lr = values.get("inner_lr")
        if inner_lr is not None:
            by_name = isinstance(inner_lr, Mapping)
            values["inner_lr"] = {n: float(v) for n, v in inner_lr.items()} if by_name else float(inner_lr)
        return values

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """The options as keyword parameters of a constructor."""
        empty = inspect.Parameter.empty
        return [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=empty if field.default is MISSING else field.default,
                annotation=field.type,
            )
            for field in fields(cls)
        ]


class Configured:
    """An object with options, which are read as its attributes; what is set when it is built stays as it is."""

    Options: ClassVar[type[Options]] = Options
    options: Options

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        signature = None  # a constructor of the subclass has its own
        if "__init__" not in vars(cls):
            learner = next(kind for kind in cls.__mro__ if Configured in kind.__bases__)
            positional = list(inspect.signature(learner.__init__).parameters.values())[1:-1]
            signature = inspect.Signature([*positional, *cls.Options.parameters()])
        cls.__signature__ = signature

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options")
        if options is None or name not in options.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(options, name)

    def __setattr__(self, name: str, value: Any) -> None:
        options = self.__dict__.get("options")
        is_option = options is not None and name in options.__dataclass_fields__ and getattr(options, name) != value
        if is_option or (name in _FIXED and "rule" in self.__dict__):
            raise ValueError(f"{name} is set when a learner is built; build a new one, or load a state into it")
        if name in _METHODS:
            raise ValueError(f"{name} is a method of the class; override it in a subclass of {type(self).__name__}")
        super().__setattr__(name, value)


# Attributes that are read when a learner is built, so that a later change would have half an effect
_FIXED = frozenset({"options", "model", "loss", "device", "data_folder", "network", "definition", "rule", "sharding"})
# Methods that are read when a learner is built
_METHODS = ("define", "task_gradient", "loss_fn")

# Arguments of a learner that are not options
_PLACES = ("device", "engine", "data_folder")

# The integers among the options, with their lower bounds
_INTEGERS = {"shards": 1, "meta_steps": 0, "tasks_per_step": 1, "query": 1, "seed": 0, "inner_steps": 0}


def check_integer(name: str, value: Any, low: int) -> None:
    """Reject a value that is not an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")


def check_sizes(name: str, value: Any) -> int | tuple[int, ...]:
    """Reject anything but an integer of at least 1, or several of them that divide the largest."""
    if not isinstance(value, tuple | list):
        check_integer(name, value, 1)
        return value
    if not value:
        raise ValueError(f"{name} must be an integer or several, got {value!r}")
    for size in value:
        check_integer(name, size, 1)
        if max(value) % size:
            raise ValueError(f"each {name} size must divide the largest, {max(value)}; got {list(value)}")
    return tuple(value)


def check_step_size(lr: StepSize, params: Params, only: str | None) -> float | dict[str, float]:
    """The inner step size as plain numbers; rejects negative and infinite ones, and names of other tensors."""
    for name, value in step_sizes(lr, split(params, only)[0]).items():
        if not hasattr(value, "__float__"):
            raise ValueError(f"inner_lr must be a number, or one for each tensor by name; got {value!r} for {name}")
        if not (math.isfinite(float(value)) and float(value) >= 0):
            raise ValueError(f"inner_lr must be a finite number of at least 0, got {float(value)} for {name}")
    return {name: float(value) for name, value in lr.items()} if isinstance(lr, Mapping) else float(lr)


def initial_module(model: Model, seed: int, t: int, fresh: bool = False) -> nn.Module:
    """Build the module of a learner from seed and round alone; with `fresh`, a given module is initialised anew."""
    with restoring(functools.partial(torch.set_rng_state, torch.get_rng_state())):
        torch.manual_seed(int(rng("initialisation", seed, t).integers(2**63)))
        if not isinstance(model, nn.Module):
            module = model() if callable(model) else model
            if not isinstance(module, nn.Module):
                raise ValueError(
                    f"the model must be an nn.Module or a function that builds one, got {type(module).__name__}"
                )
            return module
        if not fresh:
            return model
        module = copy.deepcopy(model)
        for name, layer in module.named_modules():
            if not any(True for _ in layer.parameters(recurse=False)):
                continue
            reset = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
            if reset is None:
                raise ValueError(
                    f"layer {name!r} ({type(layer).__name__}) has no reset_parameters and cannot be initialised anew;"
                    " pass a function that builds the model instead of a module"
                )
            reset()
        return module


def initial_params(model: Model, seed: int, t: int, device: torch.device) -> Params:
    """The parameters of a learner that starts anew in round t."""
    module = initial_module(model, seed, t, fresh=True)
    return {name: value.detach().to(device) for name, value in module.named_parameters() if value.requires_grad}
