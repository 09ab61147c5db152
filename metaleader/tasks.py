"""A batch of datapoints, a task, a stream of tasks: the inputs of the library, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset

# A tensor, or a dict, list or tuple of tensors, all with the same number of rows.
Tree = Any

_DISPATCH = "__torch_dispatch__"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Batch(NamedTuple):
    """Datapoints of one task.

    Attributes:
        x: inputs: a tensor, or a dict or tuple of tensors, with one row per datapoint.
        y: targets, with one row per datapoint.
    """

    x: Tree
    y: Tree


class ClassBatch(NamedTuple):
    """Datapoints of one n-way task, for a network that has an output for each global class.

    Attributes:
        x: inputs.
        y: labels, positions in `classes`.
        classes: (n,) the global class behind each label.
    """

    x: Tree
    y: Tree
    classes: Tensor


class WeightedBatch(NamedTuple):
    """Datapoints of one task, some of which do not count.

    Attributes:
        x: inputs.
        y: targets.
        weights: one per datapoint: 0 for a repetition or for padding.
    """

    x: Tree
    y: Tree
    weights: Tensor


@dataclass(frozen=True)
class Task:
    """One task of a stream: datapoints to reveal, and held-out datapoints to measure on.

    Arrays and data frames become tensors, those of float64 in torch's default dtype; tensors keep their dtype.

    Attributes:
        name: a label for records and figures; names need not be unique.
        train: the datapoints that are revealed, in this order.
        test: held-out datapoints that a learner never sees.
        classes: for n-way streams, the global class behind each local label, in local order.
        ids: for n-way streams, one integer per training datapoint that names it across tasks.
    """

    name: str
    train: Batch
    test: Batch
    classes: tuple[int, ...] | None = None
    ids: Tensor | None = None

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            batch = getattr(self, part)
            if not (isinstance(batch, tuple) and len(batch) == 2):
                raise ValueError(f"task {self.name!r}: {part} must be a Batch(x, y), got {type(batch).__name__}")
            where = f"task {self.name!r}, {part}"
            object.__setattr__(self, part, check_batch(Batch(*batch), where, torch.get_default_dtype()))
        if self.ids is not None and len(self.ids) != num_rows(self.train):
            raise ValueError(f"task {self.name!r}: {len(self.ids)} ids for {num_rows(self.train)} training datapoints")


@runtime_checkable
class TaskStream(Protocol):
    """A sequence of tasks: `stream[t]` returns the same task at every call. A list of tasks is a stream."""

    def __len__(self) -> int: ...

    def __getitem__(self, t: int, /) -> Task: ...


def rng(purpose: str, *key: int) -> np.random.Generator:
    """Random numbers that depend on a purpose and a key alone: the same on every machine."""
    words = [*purpose.encode(), *key]
    # NumPy reads an array twice as fast as a list, to the same numbers.
    small = all(isinstance(word, int | np.integer) and 0 <= word < 2**32 for word in words)
    return np.random.default_rng(np.array(words, dtype=np.uint32) if small else words)


def as_name(value: Any, kind: str = "the name of a task") -> str:
    """A name as text. An integer is the text of its digits, so that 3 and "3" are one name.

    Raises:
        ValueError: for anything else, such as None or NaN of a table, of which all rows would be one task.
    """
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (is_integer or isinstance(value, str)):
        raise ValueError(f"{kind} must be a string or an integer, got {value!r}")
    name = str(value)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{kind} must be text that UTF-8 can express, got {name!r}") from error
    return name


def num_rows(tree: Tree) -> int:
    """The number of datapoints in a tree of tensors."""
    first = tree.x if isinstance(tree, Batch) else tree
    return (first if isinstance(first, Tensor) else tree_leaves(tree)[0]).shape[0]


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of nested dicts, sorted by name, and tuples; faster than torch's pytree."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [leaf for name in sorted(tree) for leaf in tensors_of(tree[name])]
    if isinstance(tree, tuple | list):
        return [leaf for item in tree for leaf in tensors_of(item)]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def rows(tree: Tree, index: int | slice | Tensor) -> Tree:
    """The datapoints at an index, in every tensor of a tree."""
    return tree_map(lambda leaf: leaf[index], tree)


def double(tree: Tree) -> Tree:
    """The same numbers in float64; integers stay as they are."""
    return tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """Move every tensor of a tree."""
    return tree_map(lambda leaf: leaf.to(device), tree)


def check_batch(batch: Batch, where: str, dtype: torch.dtype | None = None) -> Batch:
    """Convert array-likes to tensors and reject invalid batches.

    Args:
        batch: the datapoints.
        where: the start of error messages, such as "observe".
        dtype: that float64 arrays get; see `as_tensors`.

    Raises:
        ValueError: for an empty batch, unequal numbers of rows, NaN or infinite values, or values that are not numeric.
    """
    checked = Batch(as_tensors(batch.x, f"{where}: x", dtype), as_tensors(batch.y, f"{where}: y", dtype))
    sizes = {leaf.shape[0] for leaf in tree_leaves(checked)}
    if len(sizes) > 1:
        raise ValueError(
            f"{where}: x and y must have one row per datapoint, got {sorted(sizes)} rows; shapes {shapes(checked)}"
        )
    if sizes == {0}:
        raise ValueError(f"{where}: the batch is empty; pass at least one datapoint")
    return checked


def check_alike(batch: Batch, reference: Batch, where: str) -> None:
    """Reject a batch whose tree, row shapes or dtypes differ from those of an earlier one."""
    for name, part, expected in zip("xy", batch, reference, strict=True):
        if isinstance(part, Tensor) and isinstance(expected, Tensor):
            is_alike = part.dtype == expected.dtype and part.shape[1:] == expected.shape[1:]
        else:
            is_alike = row_signature(part) == row_signature(expected)
        if not is_alike:
            raise ValueError(
                f"{where}: {name} has rows of {row_signature(part)}, but earlier datapoints have"
                f" {row_signature(expected)}; all tasks of a learner share one shape and dtype"
            )


def shapes(tree: Tree) -> Tree:
    """The shapes in a tree, for messages."""
    return tree_map(lambda leaf: tuple(leaf.shape), tree)


def row_signature(tree: Tree) -> str:
    """The tree of one datapoint with shape and dtype in place of tensors, as text."""
    if type(tree) is Batch:  # faster than torch's pytree, to the same text
        return f"Batch(x={row_signature(tree.x)}, y={row_signature(tree.y)})"
    if isinstance(tree, Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape[1:])}"
    described = tree_map(lambda leaf: f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[1:])}", tree)
    return str(described).replace("'", "")


def as_array(leaf: Any) -> Any:
    """A data frame or series as its values, and an array that torch can share; anything else unchanged."""
    if not isinstance(leaf, Tensor | np.ndarray) and callable(getattr(leaf, "to_numpy", None)):
        leaf = leaf.to_numpy()
    if isinstance(leaf, np.ndarray) and (not leaf.flags.writeable or any(stride < 0 for stride in leaf.strides)):
        return leaf.copy()
    return leaf


def as_tensors(tree: Tree, where: str, dtype: torch.dtype | None = None) -> Tree:
    """Convert the array-likes of a tree to tensors; rejects values that are not finite numbers.

    float64 arrays, which NumPy and pandas make by default, get the given dtype. Tensors keep theirs.
    """
    if not tree_leaves(tree):
        raise ValueError(f"{where} holds no tensor; pass tensors or arrays")

    def convert(leaf: Any) -> Tensor:
        if isinstance(leaf, np.ma.MaskedArray):
            raise ValueError(f"{where} is a masked array, whose mask would be lost; drop the masked rows, or fill them")
        if isinstance(leaf, Tensor) and not _is_plain(leaf):
            raise ValueError(
                f"{where} is a {'nested ' * leaf.is_nested}{type(leaf).__name__} of {leaf.dtype}; pass a dense tensor"
                " of integers or of float16, bfloat16, float32 or float64"
            )
        tensor = leaf.detach() if isinstance(leaf, Tensor) else _converted(leaf, where, dtype)
        is_dense = tensor.layout is torch.strided and not tensor.is_meta and tensor.ndim > 0
        if not is_dense or tensor.is_complex():
            raise _fault(tensor, where)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise _fault(tensor, where)
        return tensor

    return tree_map(convert, tree)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has numbers that torch computes with; not for nested, quantised, masked and fake tensors."""
    simulated = getattr(type(tensor), _DISPATCH) is not getattr(Tensor, _DISPATCH)
    is_small_float = tensor.dtype.is_floating_point and tensor.dtype not in _FLOATS
    return not (simulated or is_small_float or tensor.is_nested or tensor.is_quantized)


def _converted(leaf: Any, where: str, dtype: torch.dtype | None) -> Tensor:
    """An array-like as a tensor."""
    if isinstance(leaf, Dataset | DataLoader):  # torch would convert some of them as sequences
        raise ValueError(f"{where} is not numeric: got {stream_advice(leaf)}")
    try:
        array = as_array(leaf)
        is_double = isinstance(array, np.ndarray) and array.dtype == np.float64
        return torch.as_tensor(array, dtype=dtype if is_double else None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where} is not numeric: got {_described(leaf)}") from error


def _fault(tensor: Tensor, where: str) -> ValueError:
    """The error for a tensor that cannot be datapoints."""
    if tensor.ndim == 0:
        return ValueError(
            f"{where} holds a single value; pass a tensor or array whose first dimension is the datapoints (a list"
            " is taken for several inputs)"
        )
    if tensor.is_complex():
        return ValueError(f"{where} is complex ({tensor.dtype}); pass real numbers")
    if tensor.layout is not torch.strided or tensor.is_meta:
        return ValueError(f"{where} is {tensor.layout} on {tensor.device}; pass dense tensors that hold their values")
    bad = int((~torch.isfinite(tensor)).sum())
    return ValueError(f"{where} holds {bad} NaN or infinite values; clean or drop these datapoints")


def stream_advice(value: Any) -> str:
    """How to make a stream from a data frame or a dataset; empty for anything else."""
    kind = f"a {type(value).__name__}"
    if isinstance(value, Dataset | DataLoader):
        return f"{kind} of torch; make a stream with metaleader.streams.from_dataset(dataset, task=...)"
    if hasattr(value, "columns") and hasattr(value, "to_numpy"):
        return f"{kind}; make a stream with metaleader.streams.from_frame(frame, group=..., target=...)"
    return ""


def check_streams(streams: Sequence[Any], num_learners: int, start: int) -> int:
    """Reject what is not one stream per learner of equal lengths, or has no round `start`; returns the length."""
    for stream in streams:
        if advice := stream_advice(stream):
            raise ValueError(f"a stream is a sequence of tasks, got {advice}")
        if not hasattr(stream, "__len__"):
            raise ValueError(
                "a stream must have a length and be indexed by round: pass a list of tasks, not an iterator"
            )
    lengths = [len(stream) for stream in streams]
    if len(set(lengths)) != 1 or len(lengths) != num_learners:
        raise ValueError(
            "there must be one stream per learner, all of the same length; got"
            f" {len(lengths)} streams of {lengths} tasks for {num_learners} learners"
        )
    if not lengths[0]:
        raise ValueError("the stream has no tasks")
    if not 0 <= start <= lengths[0]:
        raise ValueError(f"start must be a round of the stream's {lengths[0]} tasks, got {start}")
    return lengths[0]


def check_tasks(tasks: Sequence[Any], t: int) -> int:
    """Reject what is not one task per stream of round t, of equal sizes; returns the number of datapoints."""
    for task in tasks:
        if not isinstance(task, Task):
            raise ValueError(f"stream[{t}] is a {type(task).__name__}, not a Task(name, train, test)")
    sizes = {num_rows(task.train) for task in tasks}
    if len(sizes) > 1:
        raise ValueError(
            f"streams played together must have tasks of equal size; round {t} has {sorted(sizes)} datapoints"
        )
    return sizes.pop()


def _described(leaf: Any) -> str:
    """An object that holds no numbers, and the remedy."""
    if hasattr(leaf, "columns") and hasattr(leaf, "to_numpy"):
        wrong = [str(name) for name in leaf.columns if np.asarray(leaf[name].to_numpy()).dtype.kind not in "iuf"]
        return f"a {type(leaf).__name__} whose columns {', '.join(wrong)} are not numbers; convert or drop them"
    dtype = f" of dtype {leaf.dtype}" if isinstance(leaf, np.ndarray) else ""
    return f"{type(leaf).__name__}{dtype}; pass tensors or arrays"
