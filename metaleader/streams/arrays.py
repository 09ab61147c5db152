"""A stream of your own data: a folder of npz files, one a task, or arrays in memory.

A task has `x` and `y`, and `test_x` and `test_y` where its held-out data is given; otherwise a fraction of its rows is
held out. Shapes and dtypes are the same for all tasks.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from metaleader.tasks import Batch, Task, Tree, check_alike, check_batch, num_rows, rng, rows

_PARTS = ("x", "y", "test_x", "test_y")


class ArrayStream:
    """A stream over arrays.

    The arrays of a folder are read when their task is asked for, pickles never; only their shapes and dtypes are read
    at once.

    Args:
        source: a folder of npz files, in the order of their names, numbers in them by value; or tasks in memory: names
            and, for each, `x` and `y`, optionally `test_x` and `test_y`, as arrays or tensors.
        held_out: the fraction of a task's rows that become its test data where none is given, at least one row, chosen
            by seed and task; the others stay in their order.
        order: "given" or "random".
        seed: `stream[t]` depends on the seed and t alone.

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
            [(name, _in_memory(name, parts)) for name, parts in source.items()]
            if isinstance(source, Mapping)
            else [(path.stem, path) for path in _files(Path(source))]
        )
        if not self._tasks:
            raise ValueError("there are no tasks: pass at least one")
        first: dict[str, Any] = {}
        for name, parts in self._tasks:
            _check_shapes(name, _headers(parts) if isinstance(parts, Path) else parts, first)
        num = len(self._tasks)
        self._order = rng("array order", seed).permutation(num) if order == "random" else np.arange(num)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, t: int) -> Task:
        if not 0 <= t < len(self):
            raise IndexError(f"round {t} of a stream of {len(self)} tasks")
        index = int(self._order[t])
        name, parts = self._tasks[index]
        if isinstance(parts, Path):
            parts = _load(parts)
        data = Batch(parts["x"], parts["y"])
        if "test_x" in parts:
            return Task(name, data, Batch(parts["test_x"], parts["test_y"]))
        num = num_rows(data)
        shuffled = torch.from_numpy(rng("held out", self.seed, index).permutation(num))
        size = min(max(1, round(self.held_out * num)), num - 1)
        return Task(name, rows(data, shuffled[size:].sort().values), rows(data, shuffled[:size].sort().values))


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    found = sorted(folder.glob("*.npz"), key=lambda path: _natural(path.stem))
    if not found:
        raise FileNotFoundError(f"{folder} has no npz files; save one for each task with np.savez(file, x=..., y=...)")
    return found


def _natural(name: str) -> list[Any]:
    """A key by which task_2 comes before task_10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def _in_memory(name: str, parts: Mapping[str, Tree]) -> dict[str, Tree]:
    checked: dict[str, Tree] = {}
    _check_parts(name, parts)
    for x, y in (("x", "y"), ("test_x", "test_y")):
        if x in parts:
            checked[x], checked[y] = check_batch(Batch(parts[x], parts[y]), f"task {name!r}")
    return checked


def _headers(path: Path) -> dict[str, Tree]:
    """Empty tensors of the row counts, shapes and dtypes in a file: they take no memory."""
    with _Reading(path), path.open("rb") as opened, zipfile.ZipFile(opened) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        _check_parts(str(path), names)
        return {name: _header(archive, name) for name in _PARTS if name in names}


def _header(archive: zipfile.ZipFile, name: str) -> torch.Tensor:
    with archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"{name} has version {version} of the npy format")
        shape, _, dtype = read(file)
    if dtype.kind not in "biuf":
        raise ValueError(f"{name} is not numeric but {dtype}; only numbers are read")
    if not shape:
        raise ValueError(f"{name} is a single value; the first dimension must be the datapoints")
    return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype, device="meta")


def _load(path: Path) -> dict[str, Tree]:
    with _Reading(path), path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        arrays = {name: file[name] for name in _PARTS if name in file.files}
    return {name: torch.from_numpy(array.astype(array.dtype.newbyteorder("="))) for name, array in arrays.items()}


class _Reading:
    """Turns what a damaged file raises into an error that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        damaged = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, TypeError, KeyError, NotImplementedError)
        if isinstance(error, damaged):
            raise ValueError(f"{self.path} cannot be read as a task: {error}") from error


def _check_parts(name: str, parts: Any) -> None:
    if "x" not in parts or "y" not in parts:
        raise ValueError(f"{name} has {sorted(parts)}; a task has x and y, and optionally test_x and test_y")
    if ("test_x" in parts) != ("test_y" in parts):
        raise ValueError(f"{name} has only one of test_x and test_y; give both or none")


def _check_shapes(name: str, parts: dict[str, Tree], first: dict[str, Any]) -> None:
    """Compare a task with the first one, which is noted in `first`."""
    reference = first.setdefault("batch", Batch(parts["x"], parts["y"]))
    for prefix in ("", "test_"):
        if f"{prefix}x" in parts:
            batch = Batch(parts[f"{prefix}x"], parts[f"{prefix}y"])
            check_alike(batch, reference, f"task {name!r}, {prefix}x and {prefix}y")
            if len({leaf.shape[0] for leaf in tree_leaves(batch)}) > 1:
                raise ValueError(f"task {name!r}: {prefix}x and {prefix}y have unequal numbers of rows")
    if "test_x" not in parts and num_rows(parts["x"]) < 2:
        raise ValueError(f"task {name!r} has {num_rows(parts['x'])} rows; holding some out needs two or more")
