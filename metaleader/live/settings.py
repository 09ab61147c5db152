"""The settings of a learner, by which a folder recognises the learner that it belongs to."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from metaleader.learners.checkpoint import subclass_settings
from metaleader.learners.learner import Learner


def settings_of(learner: Learner) -> dict[str, Any]:
    """Everything that must not change between two sessions of one folder, as plain values.

    Functions are described by their names, weights by their values for 8 tasks, the model by its layers and tensors.
    """
    options = learner.options.plain() | subclass_settings(learner)
    weights = learner.options.weights
    if weights is not None:
        options["weights"] = [float(value) for value in weights(8)]
    model = learner.network.module
    values = {
        "learner": type(learner).__name__,
        **options,
        "loss": learner.loss,
        "layers": {name: type(layer).__name__ for name, layer in model.named_modules() if name},
        "parameters": {name: [str(value.dtype), *value.shape] for name, value in model.named_parameters()},
    }
    return json.loads(json.dumps(values, default=_described))


def check_settings(folder: str | os.PathLike[str], saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Reject a learner whose settings differ from those of a folder.

    Raises:
        ValueError: with every setting that differs, and both values.
    """
    # A setting that an earlier release did not have is not compared.
    differences = [difference for name in saved if name in given for difference in _differences(name, saved, given)]
    if differences:
        listed = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise ValueError(
            f"{folder} belongs to a learner with other settings: {listed}. Build the learner with the settings of the"
            " folder, or use another folder"
        )


def _differences(name: str, saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    old, new = saved[name], given[name]
    if name in ("layers", "parameters") and isinstance(old, dict) and isinstance(new, dict):
        names = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        return [f"{name[:-1]} {key} is {old.get(key)} in the folder and {new.get(key)} here" for key in names]
    return [f"{name} is {old!r} in the folder and {new!r} here"] if old != new else []


def _described(value: Any) -> Any:
    """A value that JSON does not know, in words that are the same in every process."""
    if isinstance(value, functools.partial):
        arguments = [*map(_plain, value.args), *(f"{name}={_plain(item)}" for name, item in value.keywords.items())]
        return f"{_name(value.func)}({', '.join(arguments)})"
    if isinstance(value, Tensor):
        return value.tolist()
    return _name(value) if callable(value) else _name(type(value))


def _plain(value: Any) -> str:
    return json.dumps(value, default=_described)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
