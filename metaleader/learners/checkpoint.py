"""The file of a learner: one safetensors file with state, data and settings."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from metaleader.engine.determinism import tf32
from metaleader.learners.data import memory_by_task, new_memory_by_class
from metaleader.learners.optimizer import state_from_tree
from metaleader.learners.options import Model
from metaleader.losses import Loss
from metaleader.memory.contract import Memory
from metaleader.memory.fields import integer, mapping, text_or_none
from metaleader.nets.functional import scale_uint8
from metaleader.system.trees import is_savable, load_tree, save_tree

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner

L = TypeVar("L", bound="Learner")

_log = logging.getLogger("metaleader")

_FILE, _FILE_VERSION = "metaleader-learner", 2
# The functions among the settings: they are not saved and must be passed to `load` again.
_CALLABLES = ("optimizer", "weights", "preprocess", "adaptation")
# Attributes of the learner that share a name with a constructor argument
_NO_SETTINGS = ("model", "loss", "device", "engine", "data_folder", "round", "task")


def load_state(learner: Learner, state: Mapping[str, Any]) -> None:
    """Put a learner into a state: `Learner.load_state_dict`."""
    try:
        restored = state_from_tree(state, learner.definition.objective, learner.state, learner.rule)
        memory = _memory_of_state(learner, mapping(state, "buffer"))
        skipped = integer(state, "skipped", low=0) if "skipped" in state else 0
        t, task = integer(state, "round", low=-1), text_or_none(state, "task")
        frozen = mapping(state, "frozen") if "frozen" in state else {}
        learner.network.check_frozen(frozen)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a learner's state_dict: {error!r}") from error
    learner.network.set_frozen(frozen)
    # One call: an interrupt comes before or after it.
    vars(learner).update(memory=memory, state=restored, round=t, task=task, skipped=skipped)


def _memory_of_state(learner: Learner, state: Mapping[str, Any]) -> Memory:
    """A memory with a state; that of the learner is not changed."""
    memory = learner.memory
    kinds: dict[str, Callable[[Learner], Memory]] = {"tasks": memory_by_task, "classes": new_memory_by_class}
    if memory.kind == state["kind"]:
        restored = copy.copy(memory)
        vars(restored)["store"] = copy.copy(memory.store)
    else:
        restored = kinds[state["kind"]](learner)
    restored.load_state_dict(dict(state))
    return restored


def save_learner(learner: Learner, path: str | os.PathLike[str]) -> None:
    """Write a learner's file: `Learner.save`."""
    hyperparameters = subclass_settings(learner) | learner.options.plain()
    functions = [name for name in _CALLABLES if callable(hyperparameters.get(name))]
    for name in functions:
        del hyperparameters[name]
    if learner.options.preprocess is scale_uint8:
        functions.remove("preprocess")
    tree = {"learner": type(learner).__name__, "hyperparameters": hyperparameters, "callables": functions}
    loss = None
    with contextlib.suppress(Exception):  # a failed comparison must not prevent saving
        loss = _latest_loss(learner)
    group = learner.sharding.group
    if group.size == 1:
        state = learner.state_dict()
    else:
        with learner.locks.changing:
            state = learner.state_dict(data=False)
            state["buffer"] = learner.memory.state_dict(here=group.rank == 0)
    tree |= {"loss": loss, "state": state}
    group.on_first(lambda: save_tree(path, tree, _FILE, _FILE_VERSION), f"saving {path}")


def subclass_settings(learner: Learner) -> dict[str, Any]:
    """The constructor arguments of a user's subclass that the learner stores as attributes of the same name."""
    settings = {}
    options = learner.options.plain()
    for name, parameter in inspect.signature(type(learner)).parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if variadic or name in _NO_SETTINGS or name in options or name not in vars(learner):
            continue
        value = vars(learner)[name]
        value = value.item() if isinstance(value, np.generic) else value
        if is_savable(value):
            settings[name] = value
        else:
            _log.warning("%s=%r is not saved with the learner: it is neither a tensor nor a plain value", name, value)
    return settings


def load_learner(
    kind: type[L], path: str | os.PathLike[str], model: Model, loss: Loss, callables: Mapping[str, Any]
) -> L:
    """Build the learner of a file: `Learner.load`."""
    tree = load_tree(path, _FILE, _FILE_VERSION)
    try:
        saved, hyperparameters, given, state = (
            tree[key] for key in ("learner", "hyperparameters", "callables", "state")
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} has a damaged header ({error!r}); use an intact copy") from error
    if saved != kind.__name__:
        raise ValueError(f"{path} holds a {saved}, not a {kind.__name__}; load it with {saved}.load")
    takes = inspect.signature(kind).parameters
    _require_functions(path, [name for name in given if name in takes and name not in callables])
    outside = {"device", "engine", "data_folder"}
    unknown = set(callables) - set(given) - outside
    if unknown & hyperparameters.keys():
        raise ValueError(f"{sorted(unknown)} come from the file; build a new learner to change them")
    if unknown:
        raise ValueError(f"load takes {', '.join(sorted(outside | set(given)))}, not {', '.join(sorted(unknown))}")
    try:
        learner = kind(model, loss, **hyperparameters, **callables)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not give a {kind.__name__} ({error}): it was saved with {', '.join(sorted(hyperparameters))};"
            " load it with the class that saved it, or use an intact copy"
        ) from error
    # A user's subclass may supply functions that its constructor does not take.
    options = learner.options.plain()
    supplied = {name for name in given if callable(options.get(name)) and options[name] is not scale_uint8}
    _require_functions(path, [name for name in given if name not in supplied | callables.keys()])
    learner.load_state_dict(state)
    _compare_losses(path, tree.get("loss"), learner)
    return learner


def _require_functions(path: str | os.PathLike[str], missing: list[str]) -> None:
    if missing:
        raise ValueError(
            f"{path} was saved with functions, which no file holds; pass {', '.join(f'{name}=...' for name in missing)}"
        )


def _compare_losses(path: str | os.PathLike[str], before: Any, learner: Learner) -> None:
    """Warn if the loss of the latest datapoints differs from the one in the file; refuse a loss that fails on them."""
    if not isinstance(before, float) or not math.isfinite(before):
        return
    precision = torch.finfo(next(iter(learner.params.values())).dtype).eps
    try:
        now = _latest_loss(learner)
        text = None if now is None else f"{now:.4g}"
        same = now is None or math.isclose(before, now, rel_tol=max(1e-3, 4 * precision), abs_tol=1e-6)
    except Exception as error:  # from the user's network or loss
        raise ValueError(
            f"the model or the loss fails on the data of {path}: {error}; pass those that it was saved with"
        ) from error
    if not same:
        _log.warning(
            "%s was saved with a loss of %.4g on its latest datapoints, here it is %s; are these the model, the loss"
            " and the preprocess that it was saved with?",
            *(path, before, text),
        )


@torch.no_grad()
def _latest_loss(learner: Learner) -> float | None:
    """The unadapted loss of the latest datapoints, which reveals another network, loss or preprocessing."""
    data = learner.memory.latest(8)
    if data is None:
        return None
    with tf32(False):
        prediction = learner.network.predict(learner.params, data.x, None, learner.chosen_classes())
    return float(learner.network.mean_loss(prediction, data.y))
