"""A stream over your data: a folder of npz files, one per task, or arrays in memory.

A task has the arrays `x` and `y`, and optionally the held-out arrays `test_x` and `test_y`. Without held-out arrays, a
fraction of the rows is held out. Row shapes and dtypes are the same for all tasks.
"""

from __future__ import annotations

import contextlib
import numbers
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.streams.base import BaseStream
from metaleader.system.npz import Header, npz_arrays, npz_headers
from metaleader.tasks import Batch, Task, Tree, check_alike, check_batch, num_rows, rng, row_signature, rows

_FIELDS = ("x", "y", "test_x", "test_y")


class ArrayStream(BaseStream):
    """A stream over arrays.

    The constructor reads only the shapes and dtypes of the files in a folder; `stream[t]` reads the arrays of one task.
    Pickled arrays are refused.

    Args:
        source: a folder of npz files, sorted by name with embedded numbers compared by value; or a mapping from task
            names to `x`, `y` and optionally `test_x` and `test_y`, as arrays or tensors. float64 arrays get torch's
            default dtype.
        held_out: the fraction of rows to hold out, at least one row, for tasks without held-out arrays. The seed and
            the task determine the rows; the order of rows is kept.
        order: "given" or "random".
        seed: `stream[t]` depends only on the seed and t.

    >>> stream = ArrayStream({"a": {"x": np.zeros((10, 3)), "y": np.zeros(10)}})
    >>> stream[0].name, stream[0].train.x.shape, stream[0].test.x.shape
    ('a', torch.Size([8, 3]), torch.Size([2, 3]))
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Mapping[str, Mapping[str, Tree]],
        held_out: float = 0.2,
        order: Literal["given", "random"] = "given",
        seed: int = 0,
    ) -> None:
        if not 0 < held_out < 1:
            raise ValueError(f"held_out must lie between 0 and 1, got {held_out}")
        if order not in ("given", "random"):
            raise ValueError(f"order must be 'given' or 'random', got {order!r}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.held_out, self.seed = held_out, seed
        self._tasks: list[tuple[str, Path | dict[str, Tree]]] = (
            [(name, _checked(name, arrays)) for name, arrays in source.items()]
            if isinstance(source, Mapping)
            else [(path.stem, path) for path in _files(Path(source))]
        )
        if not self._tasks:
            raise ValueError("there are no tasks: pass at least one")
        reference = None
        for name, arrays in self._tasks:
            headers = _headers(arrays) if isinstance(arrays, Path) else arrays
            reference = reference or Batch(headers["x"], headers["y"])
            _check_shapes(name, headers, reference)
        num = len(self._tasks)
        self._order = rng("array order", seed).permutation(num) if order == "random" else np.arange(num)

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, t: int) -> Task:
        """The task of round t."""
        index = int(self._order[t])
        name, arrays = self._tasks[index]
        if isinstance(arrays, Path):
            arrays = _load(arrays)
        data = Batch(arrays["x"], arrays["y"])
        if "test_x" in arrays:
            return Task(name, data, Batch(arrays["test_x"], arrays["test_y"]))
        num = num_rows(data)
        shuffled = torch.from_numpy(rng("held out", self.seed, index).permutation(num))
        size = min(max(1, round(self.held_out * num)), num - 1)
        return Task(name, rows(data, shuffled[size:].sort().values), rows(data, shuffled[:size].sort().values))


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    paths = sorted(folder.glob("*.npz"), key=lambda path: natural_key(path.stem))
    if not paths:
        raise FileNotFoundError(f"{folder} has no npz files; save one per task with np.savez(file, x=..., y=...)")
    return paths


def from_dataset(
    dataset: Any,
    task: Callable[[int, Any, Any], Any],
    *,
    test: Any = None,
    held_out: float = 0.2,
    order: Literal["given", "random"] = "given",
    seed: int = 0,
) -> ArrayStream:
    """Return a stream over a `torch.utils.data.Dataset` of pairs (x, y), whose items are read once, into memory.

    Args:
        dataset: a dataset with a length; the x of its items are tensors, arrays or numbers, or a dict or tuple of them.
        task: called with the index, x and y of each item; returns the name of its task, or None to leave it out. Tasks
            are in the order of their first items.
        test: a dataset with the held-out items of all tasks.
        held_out: the fraction of items to hold out if there is no `test`.
        order: "given" or "random".
        seed: of the order and of the held-out items.

    >>> data = torch.utils.data.TensorDataset(torch.rand(12, 3), torch.arange(12) % 2)
    >>> stream = from_dataset(data, lambda i, x, y: f"third {i // 4}")
    >>> len(stream), stream[2].name, stream[2].train.x.shape
    (3, 'third 2', torch.Size([3, 3]))
    """
    train = _items_by_task(dataset, task, "dataset")
    if test is None:
        return ArrayStream({name: {"x": x, "y": y} for name, (x, y) in train.items()}, held_out, order, seed)
    tests = _items_by_task(test, task, "test")
    unmatched = sorted(train.keys() ^ tests.keys())
    if unmatched:
        side = "dataset" if unmatched[0] in train else "test"
        raise ValueError(f"task {unmatched[0]!r} has items only in {side}; dataset and test must have the same tasks")
    source = {
        name: {"x": x, "y": y, "test_x": tests[name][0], "test_y": tests[name][1]} for name, (x, y) in train.items()
    }
    return ArrayStream(source, held_out, order, seed)


def _items_by_task(dataset: Any, task: Callable[[int, Any, Any], Any], argument: str) -> dict[str, Batch]:
    try:
        num = len(dataset)
    except TypeError as error:
        raise ValueError(f"{argument} is a {type(dataset).__name__} without a length; pass list({argument})") from error
    items: dict[str, list[Batch]] = {}
    for i in range(num):
        item = dataset[i]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ValueError(
                f"{argument}[{i}] is a {type(item).__name__}, not a pair (x, y); wrap the dataset in one of pairs"
            )
        name = task(i, *item)
        if name is not None:
            where = f"{argument}[{i}]"
            batch = Batch(
                *(tree_map(_leaf_of(f"{where}: {part}"), value) for part, value in zip("xy", item, strict=True))
            )
            known = items.setdefault(str(name), [])
            known.append(batch)
            first = next(iter(items.values()))[0]
            if _unstacked(batch) != _unstacked(first):
                raise ValueError(f"{where} is {_unstacked(batch)}, earlier items are {_unstacked(first)}")
    if not items:
        raise ValueError(f"{argument} has no items that belong to a task")
    return {name: tree_map(lambda *leaves: torch.stack(leaves), *batches) for name, batches in items.items()}


def _leaf_of(where: str) -> Callable[[Any], torch.Tensor]:
    def make(leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, torch.Tensor | np.ndarray | np.generic | numbers.Real):
            raise ValueError(
                f"{where} is a {type(leaf).__name__}; give the dataset a transform that returns tensors, such as"
                " torchvision.transforms.PILToTensor() for images"
            )
        return torch.as_tensor(leaf)

    return make


def _unstacked(batch: Batch) -> str:
    """Shapes and dtypes of an item, as text."""
    return row_signature(tree_map(lambda leaf: leaf[None], batch))


def natural_key(name: str) -> list[Any]:
    """Return a sort key that puts task_2 before task_10."""
    return [int(piece) if i % 2 else piece for i, piece in enumerate(re.split(r"(\d+)", name))]


def _checked(name: str, arrays: Mapping[str, Tree]) -> dict[str, Tree]:
    _check_fields(name, arrays)
    checked: dict[str, Tree] = {}
    for x, y in (("x", "y"), ("test_x", "test_y")):
        if x in arrays:
            batch = Batch(arrays[x], arrays[y])
            checked[x], checked[y] = check_batch(batch, f"task {name!r}", torch.get_default_dtype())
    return checked


def _headers(path: Path) -> dict[str, Tree]:
    """Return meta tensors, which hold no data, with the shapes and dtypes of the arrays in a file."""
    with _named_errors(path):
        headers = npz_headers(path)
        _check_fields(str(path), headers)
        return {name: _like(name, headers[name]) for name in _FIELDS if name in headers}


def _like(name: str, header: Header) -> torch.Tensor:
    if header.dtype.kind not in "biuf":
        raise ValueError(f"{name} has dtype {header.dtype}, which is not numeric; save numbers")
    if not header.shape:
        raise ValueError(f"{name} is a single value; the first dimension must be the datapoints")
    return torch.empty(header.shape, dtype=_tensor(np.empty(0, header.dtype)).dtype, device="meta")


def _tensor(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor; float64, which NumPy makes by default, becomes torch's default dtype."""
    tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _load(path: Path) -> dict[str, Tree]:
    with _named_errors(path):
        present = npz_headers(path)
        arrays = npz_arrays(path, [name for name in _FIELDS if name in present])
    return {name: _tensor(array) for name, array in arrays.items()}


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Name the file in errors."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read as a task: {error}; save it again, or use an intact copy") from error


def _check_fields(name: str, fields: Collection[str]) -> None:
    if not {"x", "y"} <= set(fields):
        raise ValueError(f"{name} has {sorted(fields)}; a task has x and y, and optionally test_x and test_y")
    if others := sorted(set(fields) - set(_FIELDS)):
        raise ValueError(
            f"{name} has {others}, which no task has; its arrays are x and y, and optionally test_x and test_y"
        )
    if ("test_x" in fields) != ("test_y" in fields):
        raise ValueError(f"{name} has only one of test_x and test_y; give both or neither")


def _check_shapes(name: str, arrays: dict[str, Tree], reference: Batch) -> None:
    for x, y in (("x", "y"), ("test_x", "test_y")):
        if x in arrays:
            batch = Batch(arrays[x], arrays[y])
            check_alike(batch, reference, f"task {name!r}, {x} and {y}")
            if len({leaf.shape[0] for leaf in tree_leaves(batch)}) > 1:
                raise ValueError(f"task {name!r}: {x} and {y} have unequal numbers of rows")
    if "test_x" not in arrays and num_rows(arrays["x"]) < 2:
        raise ValueError(f"task {name!r} has {num_rows(arrays['x'])} rows; holding out rows needs at least two")
