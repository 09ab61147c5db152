"""A learner's state taken up again, and its file: one safetensors file with state, data and hyperparameters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from metaleader.buffer import TaskBuffer
from metaleader.classes import ClassBuffer
from metaleader.learners.start import Model
from metaleader.losses import Loss
from metaleader.network import scale_uint8
from metaleader.store import load_tree, save_tree

if TYPE_CHECKING:
    from metaleader.learners.base import Learner

L = TypeVar("L", bound="Learner")

_FILE, _FILE_VERSION = "metaleader-learner", 1
# The callables among the hyperparameters: they are not saved, and must be passed again to `load`.
_CALLABLES = ("optimizer", "weights", "preprocess")


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
            buffer = memory(learner.device, buffer.weights)
        buffer.load_state_dict(state["buffer"])
        learner._buffer = buffer
        learner._outer.load_state_dict(state)
        learner.round, learner.task = state["round"], state["task"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a learner's state_dict: {error!r}") from error


def save_learner(learner: Learner, path: str | os.PathLike[str]) -> None:
    """Write a learner's file: `Learner.save`."""
    hyperparameters = dict(learner._hyperparameters)
    given = [name for name in _CALLABLES if callable(hyperparameters[name])]
    for name in given:
        del hyperparameters[name]
    if learner._hyperparameters["preprocess"] is scale_uint8:
        given.remove("preprocess")
    tree = {"learner": type(learner).__name__, "hyperparameters": hyperparameters, "callables": given}
    save_tree(path, tree | {"state": learner.state_dict()}, _FILE, _FILE_VERSION)


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
    missing = [name for name in given if name not in callables]
    if missing:
        raise ValueError(f"{path} was saved with functions of your own; pass {', '.join(f'{m}=...' for m in missing)}")
    unknown = set(callables) - set(given) - {"device", "engine"}
    if unknown:
        raise ValueError(f"{sorted(unknown)} come from the file; change them on the learner, or build a new one")
    try:
        learner = kind(model, loss, **hyperparameters, **callables)
    except TypeError as error:
        raise ValueError(f"{path} does not give a {kind.__name__} ({error}); use an intact copy") from error
    learner.load_state_dict(state)
    return learner
