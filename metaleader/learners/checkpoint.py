"""A learner's state taken up again, and its file: one safetensors file with state, data and hyperparameters."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from metaleader.engine.determinism import tf32
from metaleader.learners.options import Model
from metaleader.losses import Loss
from metaleader.memory.by_class import ClassBuffer
from metaleader.memory.by_task import TaskBuffer
from metaleader.nets.functional import scale_uint8
from metaleader.system.files import is_savable, load_tree, save_tree
from metaleader.tasks import Batch, rows

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner

L = TypeVar("L", bound="Learner")

_log = logging.getLogger("metaleader")

_FILE, _FILE_VERSION = "metaleader-learner", 1
# The callables among the hyperparameters: they are not saved, and must be passed again to `load`.
_CALLABLES = ("optimizer", "weights", "preprocess")
# What a learner has under names that an argument may have too.
_NO_SETTINGS = ("model", "loss", "device", "engine", "round", "task")


def load_state(learner: Learner, state: Mapping[str, Any]) -> None:
    """Put a state into a learner, or leave the learner as it is: `Learner.load_state_dict`."""
    before = learner.state_dict()
    try:
        _put_state(learner, state)
    except BaseException:
        _put_state(learner, before)
        raise


def _put_state(learner: Learner, state: Mapping[str, Any]) -> None:
    try:
        memory = ClassBuffer if state["buffer"]["kind"] == ClassBuffer.kind else TaskBuffer
        buffer = learner._buffer
        if not isinstance(buffer, memory):
            if learner._hyperparameters["max_tasks"] is not None:
                raise ValueError("a state of tasks with classes needs a learner without max_tasks")
            buffer = memory(learner.device, buffer.weights)
        buffer.load_state_dict(state["buffer"])
        learner._buffer = buffer
        learner._outer.load_state_dict(state)
        learner.round, learner.task = state["round"], state["task"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a learner's state_dict: {error!r}") from error


def save_learner(learner: Learner, path: str | os.PathLike[str]) -> None:
    """Write a learner's file: `Learner.save`."""
    hyperparameters = _own_settings(learner) | learner._hyperparameters
    given = [name for name in _CALLABLES if callable(hyperparameters[name])]
    for name in given:
        del hyperparameters[name]
    if learner._hyperparameters["preprocess"] is scale_uint8:
        given.remove("preprocess")
    tree = {"learner": type(learner).__name__, "hyperparameters": hyperparameters, "callables": given}
    found = None
    with contextlib.suppress(Exception):  # no file is lost to a check
        found = _loss_of(learner)
    save_tree(path, tree | {"loss": found, "state": learner.state_dict()}, _FILE, _FILE_VERSION)


def _own_settings(learner: Learner) -> dict[str, Any]:
    """What the constructor of a class of the user's own takes, and the learner keeps under the same name."""
    found = {}
    for name, parameter in inspect.signature(type(learner)).parameters.items():
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if several or name in _NO_SETTINGS or name in learner._hyperparameters or name not in vars(learner):
            continue
        value = vars(learner)[name]
        value = value.item() if isinstance(value, np.generic) else value
        if is_savable(value):
            found[name] = value
        else:
            _log.warning("%s=%r is not saved with the learner: it is no tensor and no plain value", name, value)
    return found


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
    unknown = set(callables) - set(given) - {"device", "engine"}
    if unknown:
        raise ValueError(f"{sorted(unknown)} come from the file; change them on the learner, or build a new one")
    try:
        learner = kind(model, loss, **hyperparameters, **callables)
    except TypeError as error:
        raise ValueError(
            f"{path} does not give a {kind.__name__} ({error}): it was saved with {', '.join(sorted(hyperparameters))};"
            " load it with the class that saved it, or use an intact copy"
        ) from error
    # A class of the user's own may bring functions that it does not take.
    brought = {name for name in given if callable(value := learner._hyperparameters[name]) and value is not scale_uint8}
    _require_functions(path, [name for name in given if name not in brought | callables.keys()])
    learner.load_state_dict(state)
    _compare_losses(path, tree.get("loss"), learner)
    return learner


def _require_functions(path: str | os.PathLike[str], missing: list[str]) -> None:
    if missing:
        raise ValueError(
            f"{path} was saved with functions, which no file holds; pass {', '.join(f'{name}=...' for name in missing)}"
        )


def _compare_losses(path: str | os.PathLike[str], before: Any, learner: Learner) -> None:
    """Warn where the loss of the latest datapoints is another than when the file was written."""
    if not isinstance(before, float) or not math.isfinite(before):
        return
    precision = torch.finfo(next(iter(learner.params.values())).dtype).eps
    try:
        now = _loss_of(learner)
        told = None if now is None else f"{now:.4g}"
        same = now is None or math.isclose(before, now, rel_tol=max(1e-3, 4 * precision), abs_tol=1e-6)
    except Exception as error:  # a network or a loss of the user's own
        told, same = f"not to be had ({error})", False
    if not same:
        _log.warning(
            "%s was saved with a loss of %.4g on its latest datapoints, here it is %s; are these the model, the loss"
            " and the preprocess that it was saved with?",
            *(path, before, told),
        )


@torch.no_grad()
def _loss_of(learner: Learner) -> float | None:
    """The loss of the latest datapoints, not adapted: by it another network, loss or preprocessing is found out."""
    buffer = learner._buffer
    length = buffer.store.length
    # A class's images have labels in their task only.
    data = buffer.current() if isinstance(buffer, ClassBuffer) else buffer.store.take(slice(max(0, length - 8), length))
    if data is None or length == 0:
        return None
    few = Batch(*rows(data, slice(0, 8)))
    with tf32(False):
        prediction = learner._network.predict(learner.params, few.x, None, learner._classes())
    return float(learner._network.mean_loss(prediction, few.y))
