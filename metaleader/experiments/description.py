"""The effective settings of an experiment as JSON, for `config.json`, and what differs between two of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from metaleader.engine.determinism import seeded
from metaleader.experiments.experiment import Experiment
from metaleader.learners import Learner
from metaleader.system.builders import arguments_of, described, given_arguments, name_of, plain, settable

_SIZES = ("tasks", "order", "meta_steps", "reveal", "reveals", "gamma")
# A run that continues measures what it measured before, whatever the experiment says now; see `measured_as`.
_MEASURED = ("steps", "measure_at", "before_at")


def described_experiment(experiment: Experiment, learners: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an experiment, with a learner of each method."""
    sizes = {name: plain(getattr(experiment, name)) for name in _SIZES}
    parts = {name: str(columns) for name, columns in experiment.parts.items()}
    return {
        **sizes,
        "steps": list(experiment.steps),
        "measure_at": list(experiment.measure_at),
        "before_at": list(experiment.sizes_before()),
        "loss": described(experiment.loss, "prediction", "target"),
        "network": {**described(experiment.network), **_structure(_built(experiment.network))},
        "stream": described(experiment.stream, "seed", "data"),
        "learners": {name: _learner(experiment, name, learner) for name, learner in learners.items()},
        **({"parts": parts} if parts else {}),
    }


def measured_as(experiment: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """The experiment with the numbers of steps and the sizes that a run with these settings measures."""
    return replace(experiment, **{name: tuple(settings[name]) for name in _MEASURED})


def changes(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    tasks: int,
    experiment: Experiment,
    methods: Sequence[str],
    same_torch: bool = True,
) -> list[str]:
    """The settings that differ from those of a configuration, as "reveal was 5, now 10".

    Args:
        then: the configuration of a run.
        now: the description of the experiment.
        tasks: the number of tasks now played.
        experiment: the experiment.
        methods: the methods that are run.
        same_torch: whether both are of the same version of torch; hashes of networks differ between versions.
    """
    if then["format"] == 1:
        # Format 1 has only the keywords that were given.
        given = {name: experiment.all_methods[name].options for name in methods}
        learners = {n: {k: v for k, v in options.items() if k != "model"} for n, options in given.items()}
        now = {name: now[name] for name in (*_SIZES[2:], "parts") if name in now}
        now |= {"loss": plain(given_arguments(experiment.loss)), "learners": plain(learners)}
    before, after = (
        _flat({name: value for name, value in json.loads(json.dumps(tree)).items() if name not in _MEASURED})
        for tree in (then["settings"], now)
    )
    before["tasks played"], after["tasks played"] = then["tasks"], tasks
    is_compared = lambda name: same_torch or not name.endswith("network.sha256")  # noqa: E731
    names = dict.fromkeys(filter(is_compared, [*before, *after]))
    missing = object()
    texts = {name: (before.get(name, missing), after.get(name, missing)) for name in names}
    return [
        f"{name} was {'not set' if old is missing else json.dumps(old)},"
        f" now {'not set' if new is missing else json.dumps(new)}"
        for name, (old, new) in texts.items()
        if old is missing or new is missing or old != new
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree by path, where a path is that of `--set` if there is one."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        path = prefix if name in ("learners", "options") else f"{prefix}{name}."
        if isinstance(value, Mapping):
            leaves |= _flat(value, path)
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def _built(network: nn.Module | Callable[..., nn.Module]) -> nn.Module:
    with seeded(0):
        module = network if isinstance(network, nn.Module) else network()
    if not isinstance(module, nn.Module):
        raise ValueError(f"network must build an nn.Module, got {type(module).__name__}")
    return module


def _learner(experiment: Experiment, name: str, learner: Any) -> dict[str, Any]:
    method, own_network = experiment.all_methods[name], {}
    options = arguments_of(method.make)
    if "meta_steps" in settable(method.make):
        options["meta_steps"] = experiment.meta_steps
    options |= method.options
    if isinstance(learner, Learner):
        options |= learner.options.plain()
        if "model" in method.options:
            own_network = {"network": _structure(_built(method.options["model"]))}
    options = {key: value for key, value in options.items() if key not in ("seed", "device", "engine")}
    return {"class": name_of(type(learner)), "options": plain(options), **own_network}


def _structure(network: nn.Module) -> dict[str, Any]:
    """The class of a network, the number of its parameters, and a hash of its layers and of the shapes in them."""
    tensors = [*network.named_parameters(), *network.named_buffers()]
    layers = [(name, name_of(type(layer)), layer.extra_repr()) for name, layer in network.named_modules()]
    # Torch prints other arguments of the same layer in other versions; `changes` compares hashes of one version.
    shapes = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    return {
        "class": name_of(type(network)),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "sha256": hashlib.sha256(json.dumps([layers, shapes]).encode()).hexdigest(),
    }
