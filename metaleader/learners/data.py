"""A user's data as a learner takes it: checked and stored."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.learners.sharded import agree_on_batch
from metaleader.losses import squared_error
from metaleader.memory.by_class import ClassBuffer
from metaleader.memory.by_task import TaskBuffer
from metaleader.memory.contract import Memory
from metaleader.tasks import Batch, ClassBatch, Tree, as_tensors, check_alike, check_batch, to_device

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner

# Of targets that become numbers of the model's dtype; uint8 stays, as images are stored in it.
_INTEGERS = (torch.int16, torch.int32, torch.int64)


def inputs_of(learner: Learner, x: Tree, where: str) -> Tree:
    """Inputs as tensors; float64 arrays, which NumPy and pandas make by default, get the dtype of the model."""
    return to_device(as_tensors(x, f"{where}: x", learner.state.flat.dtype), learner.device)


def store(
    learner: Learner,
    x: Tree,
    y: Tree,
    task: str | None = None,
    ids: Sequence[int] | Tensor | None = None,
    update: bool = False,
) -> None:
    """Check and store datapoints within a change of the learner; `update` says whether an update follows."""
    check = functools.partial(checked_batch, learner, x, y, task)
    batch = check() if learner.sharding.group.size == 1 else agree_on_batch(learner, check, task, update)
    with learner.locks.reading:
        learner.memory.append(batch, ids, task)


def checked_batch(learner: Learner, x: Tree, y: Tree, task: str | None) -> Batch:
    """Datapoints as `observe` stores them; those that it refuses raise a ValueError."""
    if task is None and learner.task is None:
        raise ValueError("observe before begin: call begin(name) to open a task first, or pass task=name")
    if task is not None and learner.definition.restarts:
        raise ValueError(f"{type(learner).__name__} trains on the current task alone: call begin(name), not task=")
    batch = to_device(check_batch(Batch(x, y), "observe", learner.state.flat.dtype), learner.device)
    stored = learner.memory.store.data
    if learner.loss is squared_error and isinstance(batch.y, Tensor):
        batch = _with_targets(learner, batch, stored)
    if stored is not None:
        check_alike(batch, stored, "observe")
    layout = learner.definition.objective.layout
    learner.network.check(layout.named(learner.state.flat), batch, "observe")
    if stored is None:
        _check_first(learner, batch)
    return batch


def _with_targets(learner: Learner, batch: Batch, stored: Batch | None) -> Batch:
    """A batch whose targets are numbers of the model's dtype, and one column if the output is one column.

    Otherwise whole numbers in the first datapoints would exclude fractions in all others.
    """
    if batch.y.dtype in _INTEGERS and (
        stored is None or (isinstance(stored.y, Tensor) and stored.y.is_floating_point())
    ):
        batch = batch._replace(y=batch.y.to(learner.state.flat.dtype))
    if batch.y.ndim != 1:
        return batch
    if stored is not None:
        shape = stored.y.shape[1:] if isinstance(stored.y, Tensor) else None
    else:
        shape = learner.network.output_shape(learner.params, batch.x)
    return batch._replace(y=batch.y[:, None]) if shape == (1,) else batch


def _check_first(learner: Learner, batch: Batch) -> None:
    """Reject first datapoints that the adaptation does not support."""
    adaptation = learner.definition.objective.adaptation
    if adaptation is not None:
        adaptation.check_data(learner.network, learner.layout.named(learner.state.flat), batch)
    sizes = learner.definition.support
    if not isinstance(sizes, int) and len(sizes) > 1 and not (adaptation is not None and adaptation.takes_weights):
        _check_repeats(learner, batch, sizes)


@torch.no_grad()
def _check_repeats(learner: Learner, batch: Batch, sizes: tuple[int, ...]) -> None:
    """Reject several support sizes if repeating all datapoints changes the gradient, as with a sum over datapoints.

    Support sets of one update have the largest size; smaller ones are repeated to fill it.
    """
    params, classes = learner.layout.named(learner.state.flat), learner.chosen_classes()
    gradients = []
    for times in (1, 2):
        repeated = tree_map(lambda leaf: torch.cat([leaf] * times), batch)  # noqa: B023
        support, query = (b if classes is None else ClassBatch(b.x, b.y, classes) for b in (repeated, batch))
        with torch.enable_grad():
            _, gradient = learner.task_gradient(tree_map(torch.clone, params), support, query)
        gradients.append(learner.layout.flat(gradient).detach())
    once, twice = gradients
    if float((once - twice).norm()) > 1e-3 * float(once.norm()):
        raise ValueError(
            f"support={list(sizes)} needs a loss and an adaptation that are means over datapoints:"
            " repeating all datapoints changes the gradient; use one support size"
        )


def checked_folder(folder: str | os.PathLike[str]) -> Path:
    """A folder for data, which exists and can be written."""
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"data_folder must be a path or None, got {folder!r}")
    path = Path(folder).absolute()
    if not path.is_dir():
        raise FileNotFoundError(
            f"data_folder {folder} is {'not a folder' if path.exists() else 'missing'}; make it first"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"data_folder {folder} cannot be written; choose another")
    return path


def memory_by_task(learner: Learner) -> TaskBuffer:
    """A new memory by task."""
    options = learner.options
    return TaskBuffer(learner.device, options.weights, options.limits(), learner.sharding, learner.data_folder)


def memory_by_class(learner: Learner) -> Memory:
    """The memory for a task with classes, which is by class from the first task on."""
    memory = learner.memory
    is_fresh = type(memory) is TaskBuffer and learner.task is None and not memory.sizes()
    return new_memory_by_class(learner) if is_fresh else memory


def new_memory_by_class(learner: Learner) -> ClassBuffer:
    """A new memory by class."""
    options = learner.options
    if options.max_tasks is not None:
        raise ValueError(
            "tasks with classes keep their images by class, and one class belongs to many tasks: leave max_tasks at"
            " None, and limit the images with max_datapoints (of each class) or max_bytes"
        )
    return ClassBuffer(learner.device, options.weights, options.limits(), learner.data_folder)
