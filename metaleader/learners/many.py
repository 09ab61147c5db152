"""Predictions for many tasks of unequal sizes, as a few batched programs.

Tasks of similar sizes are adapted together. Smaller ones are padded with datapoints of their own, which have weight
zero in the loss. Sizes must be equal if the output or the loss of a datapoint depends on other rows (batch norm, a loss
that returns a scalar), and for an `Adaptation`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.engine.determinism import repeatable
from metaleader.engine.objective import Adaptation
from metaleader.gradient.meta import descend
from metaleader.gradient.selection import Params
from metaleader.learners.data import inputs_of
from metaleader.learners.prediction import dropout_seeds, not_finite, run_model
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, Tree, as_array, as_name, num_rows, row_signature, rows, tensors_of

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner

# The numbers in one program, parameters or inputs of all its tasks: what fits into the cache of a CPU.
_CHUNK = {"cpu": 2**20, "cuda": 2**26}
# Up to this many numbers, padding costs less than another program.
_FREE_PADDING = 2**15
# Sizes from this fraction of the largest on are padded to it.
_SIMILAR = 0.75


class _Weighted(NamedTuple):
    """Datapoints of one task, padded; the weights add up to one, and are zero for padding."""

    x: Tree
    y: Tree
    weights: Tensor


def inputs_by_name(xs: Mapping[str, Tree]) -> Mapping[str, Tree]:
    """Inputs by name of the task, checked."""
    if not isinstance(xs, Mapping):
        raise ValueError(f"predict_many takes inputs by name of the task, as a dict; got {type(xs).__name__}")
    return xs


def predict_many(learner: Learner, xs: Mapping[str, Tree]) -> dict[str, Any]:
    """Predictions by name; see `Learner.predict_many`."""
    with learner.locks.reading:
        stored = learner.memory.store.data
        empty = learner.task if learner.num_datapoints == 0 else None
    dims = [] if stored is None else [leaf.ndim for leaf in tensors_of(stored.x)]
    batched = {name: x for name, x in xs.items() if name != empty and _has_rows(x, dims)}
    found = _predict_many(learner, batched) if batched else {}
    return {name: found[name] if name in found else learner.predict(x, task=name) for name, x in xs.items()}


def _has_rows(x: Tree, dims: list[int]) -> bool:
    """Whether inputs have one row or more; a single datapoint without the dimension of rows has none."""
    leaves = [x] if hasattr(x, "shape") else tree_leaves(x)
    return [len(leaf.shape) if hasattr(leaf, "shape") else 0 for leaf in leaves] == dims and len(leaves[0]) > 0


def _predict_many(learner: Learner, xs: Mapping[str, Tree]) -> dict[str, Tensor]:
    names = list(xs)
    x, x_sizes = _joined(learner, xs)
    with learner.locks.reading:
        data, sizes = learner.memory.of_names([as_name(name) for name in names])
        params, t = learner.layout.named(learner.state.flat), max(learner.round, 0)
    many = _Many(learner, params, data, t)
    x_starts, starts = np.cumsum(x_sizes) - x_sizes, np.cumsum(sizes) - sizes
    out: Tensor | None = None
    with repeatable(learner.device):
        for size, group in _groups(sizes, many.pads, _numel(data.x)):
            for members in _chunks(group, max(many.num_params, size * _numel(data.x)), learner.device.type):
                batch = many.padded(starts[members], sizes[members], size)
                adapted = many.adapted(batch, sizes[members], [names[i] for i in members])
                for x_size, some in _groups(x_sizes[members], many.pads_x, _numel(x)):
                    at = _index(x_starts[members[some]], x_sizes[members[some]], x_size).to(learner.device)
                    found = many.predictions(adapted, torch.from_numpy(some), batch, rows(x, at))
                    out = found.new_empty((num_rows(x), *found.shape[2:])) if out is None else out
                    # Padding repeats the last row, and gives its prediction again.
                    out[at] = found
    assert out is not None
    return dict(zip(names, out.split(x_sizes.tolist()), strict=True))


class _Many:
    """The adaptation of a learner, batched over tasks.

    Attributes:
        pads: whether tasks of unequal sizes are adapted together.
        pads_x: whether tasks with unequal numbers of inputs are predicted together.
        num_params: the number of parameters of a task.
    """

    def __init__(self, learner: Learner, params: Params, data: Batch, t: int) -> None:
        self.learner, self.params, self.data, self.round = learner, params, data, t
        self.network, self.adaptation = learner.network, learner.definition.adaptation
        separate = self.network.separates_rows(params, rows(data, slice(0, 3)))
        self.pads = separate and not isinstance(self.adaptation, Adaptation)
        self.pads_x = separate or self.network.has_batch_norm  # with the statistics of the task's data
        self.num_params = learner.state.flat.numel()

    def padded(self, starts: np.ndarray, sizes: np.ndarray, size: int) -> _Weighted:
        """The datapoints of some tasks, (tasks, size, ...)."""
        batch = rows(self.data, _index(starts, sizes, size).to(self.learner.device))
        weights = (np.arange(size) < sizes[:, None]) / sizes[:, None]
        dtype = self.learner.state.flat.dtype
        return _Weighted(batch.x, batch.y, torch.from_numpy(weights).to(self.learner.device, dtype))

    def adapted(self, batch: _Weighted, sizes: np.ndarray, names: list[str]) -> Params | None:
        """The parameters adapted to each task, (tasks, ...); None for a learner that is used unadapted."""
        network, adaptation, params = self.network, self.adaptation, self.params
        if adaptation is None:
            return None
        if isinstance(adaptation, Adaptation):
            adapt = vmap(lambda data: adaptation(network, params, data))
            try:
                moved = adapt(Batch(batch.x, batch.y))
            except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
                raise not_finite([name for i, name in enumerate(names) if not _works(adapt, batch, i)]) from None
            moved = {n: moved[n] if n in moved else v.expand(len(sizes), *v.shape) for n, v in params.items()}
            return _check_finite(moved, names)
        loss_fn = functools.partial(_weighted_loss, network) if self.pads else network.loss_fn
        steps, rates = range(adaptation.steps), adaptation.rates(params)
        seeds = [dropout_seeds(self.learner, [self.round, int(size)], len(steps)) for size in sizes]
        noise = () if seeds[0] is None else (torch.stack([row for row in seeds if row is not None]),)

        def one_task(data: _Weighted, *noise: Tensor) -> Params:
            return descend(loss_fn, params, rates, data if self.pads else Batch(data.x, data.y), steps, *noise)

        return _check_finite(vmap(one_task)(batch, *noise), names)

    def predictions(self, adapted: Params | None, some: Tensor, batch: _Weighted, x: Tree) -> Tensor:
        """Predictions of some of the tasks for their rows of x, (tasks, rows, ...)."""
        some = some.to(self.learner.device)
        params = self.params if adapted is None else {name: value[some] for name, value in adapted.items()}
        dim = None if adapted is None else 0
        if self.network.has_batch_norm:
            call = vmap(self.network.predict_with_statistics_of, in_dims=(0, dim, 0))
            return run_model(call, "predict_many", rows(batch.x, some), params, x, x=rows(x, 0))
        return run_model(vmap(self.network.predict, in_dims=(dim, 0)), "predict_many", params, x, x=rows(x, 0))


def _check_finite(adapted: Params, names: list[str]) -> Params:
    """Reject adapted parameters that are not finite."""
    finite = torch.stack([torch.isfinite(value).reshape(len(value), -1).all(1) for value in adapted.values()]).all(0)
    if not bool(finite.all()):
        raise not_finite([name for name, good in zip(names, finite.tolist(), strict=True) if not good])
    return adapted


def _works(adapt: Callable[[Batch], Params], batch: _Weighted, i: int) -> bool:
    """Whether the adaptation to one of the tasks can be computed."""
    try:
        adapt(rows(Batch(batch.x, batch.y), slice(i, i + 1)))
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return False
    return True


def _weighted_loss(network: Network, params: Params, batch: _Weighted, noise: Tensor | None = None) -> Tensor:
    return (network.loss(network.predict(params, batch.x, noise), batch.y) * batch.weights).sum()


def _joined(learner: Learner, xs: Mapping[str, Tree]) -> tuple[Tree, np.ndarray]:
    """The inputs of all tasks in one tree of tensors, and the number of rows of each task."""
    arrays = [as_array(x) for x in xs.values()]
    try:
        if all(isinstance(x, np.ndarray) for x in arrays):
            joined = inputs_of(learner, np.concatenate(arrays), "predict_many")
        elif all(isinstance(x, Tensor) for x in arrays) and len({x.dtype for x in arrays}) == 1:
            joined = inputs_of(learner, torch.cat(arrays), "predict_many")
        else:
            trees = [inputs_of(learner, x, "predict_many") for x in arrays]
            if len({row_signature(tree) for tree in trees}) > 1:
                raise ValueError("rows differ")
            arrays = [tensors_of(tree)[0] for tree in trees]
            joined = tree_map(lambda *leaves: torch.cat(leaves), *trees)
    except (RuntimeError, ValueError) as error:
        first = next(iter(xs))
        expected = row_signature(inputs_of(learner, xs[first], f"predict_many, task {first!r}"))
        for name, x in xs.items():
            signature = row_signature(inputs_of(learner, x, f"predict_many, task {name!r}"))
            if signature != expected:
                raise ValueError(
                    f"predict_many: task {name!r} has rows of {signature}, and task {first!r} of {expected}; pass rows"
                    " of one shape and dtype"
                ) from error
        raise
    return joined, np.array([len(x) for x in arrays], dtype=np.int64)


def _groups(sizes: np.ndarray, padded: bool, numel: int) -> Iterator[tuple[int, np.ndarray]]:
    """Group tasks by size, or by similar sizes; yields the largest size of each group, and its tasks."""
    order = np.argsort(-sizes, kind="stable")
    distinct, firsts = np.unique(-sizes[order], return_index=True)
    ends = [*firsts[1:].tolist(), len(order)]
    start, largest = 0, 0
    for size, first, end in zip((-distinct).tolist(), firsts.tolist(), ends, strict=True):
        joins = padded and (size >= _SIMILAR * largest or (end - start) * largest * numel <= _FREE_PADDING)
        if first > start and not joins:
            yield largest, order[start:first]
            start = first
        largest = size if first == start else largest
    if len(order) > start:
        yield largest, order[start:]


def _chunks(members: np.ndarray, numbers: int, device: str) -> Iterator[np.ndarray]:
    """Divide the tasks of a group, by the numbers that a task has."""
    step = max(1, _CHUNK.get(device, 2**20) // numbers)
    for start in range(0, len(members), step):
        yield members[start : start + step]


def _index(starts: np.ndarray, sizes: np.ndarray, size: int) -> Tensor:
    """The rows of tasks, (tasks, size); the last row of a smaller task is repeated."""
    return torch.from_numpy(starts[:, None] + np.minimum(np.arange(size), sizes[:, None] - 1))


def _numel(tree: Tree) -> int:
    """The numbers in one row."""
    return sum(leaf[0].numel() for leaf in tensors_of(tree)) if num_rows(tree) else 1
