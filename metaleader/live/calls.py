"""The records of a session's journal: calls that change a learner, with their tensors.

A record begins with its kind. Tensors are stored as in the data section of a safetensors file: the bytes of each
tensor, one after the other. Their names, dtypes and row shapes are a record of their own, a schema, written before its
first use, so that a call costs its data, its task's name and a few bytes. Keys are stored as digests of 16 bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metaleader.tasks import Tree, num_rows

_SETTINGS, _STATE, _SCHEMA, _OBSERVE, _PREDICT, _UPDATE, _RELEASE = range(1, 8)
# Added to the kind of an observation
_HAS_KEY, _UPDATES = 0x80, 0x40
_KEY = 16


class Settings(NamedTuple):
    """The settings of the learner that the journal belongs to."""

    values: dict[str, Any]


class State(NamedTuple):
    """Everything up to this record, as the bytes of a file of `files.save_tree`."""

    tree: bytes


class Observe(NamedTuple):
    """Datapoints of a task.

    Attributes:
        task: the name.
        x: inputs.
        y: targets.
        key: the digest of the call's key, or None.
        updates: whether the learner then takes its updates.
    """

    task: str
    x: Tree
    y: Tree
    key: bytes | None
    updates: bool


class Predict(NamedTuple):
    """Inputs whose targets come later.

    Attributes:
        task: the name.
        x: inputs.
        key: the digest of the prediction's name.
    """

    task: str
    x: Tree
    key: bytes


class Update(NamedTuple):
    """Updates on all data before this record.

    Attributes:
        step: the number of updates that the learner had made.
        steps: the number of updates to make.
    """

    step: int
    steps: int


class Release(NamedTuple):
    """A task that was set aside is drawn again."""

    task: str


Call = Settings | State | Observe | Predict | Update | Release


class Codec:
    """Calls as bytes. One codec reads or writes all records of a journal, in order, because it numbers the schemas."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._schemas: list[dict[str, Any]] = []

    def encode(self, call: Call) -> list[bytes]:
        """The records of a call: its schema if that is new, and the call."""
        match call:
            case Settings(values):
                return [bytes([_SETTINGS]) + json.dumps(values).encode()]
            case State(tree):
                return [bytes([_STATE]) + tree]
            case Update(step, steps):
                return [bytes([_UPDATE]) + _integer(step) + _integer(steps)]
            case Release(task):
                return [bytes([_RELEASE]) + task.encode()]
            case Observe(task, x, y, key, updates):
                kind = _OBSERVE | (_HAS_KEY if key else 0) | (_UPDATES if updates else 0)
                return self._with_schema(kind, key or b"", task, {"x": x, "y": y})
            case Predict(task, x, key):
                return self._with_schema(_PREDICT, key, task, {"x": x})

    def _with_schema(self, kind: int, key: bytes, task: str, tree: dict[str, Tree]) -> list[bytes]:
        tensors: list[Tensor] = []
        text, name = json.dumps(_described(tree, tensors)), task.encode()
        records = []
        if text not in self._numbers:
            self._learn(text)
            records.append(bytes([_SCHEMA]) + text.encode())
        head = bytes([kind]) + key + _integer(self._numbers[text]) + _integer(num_rows(tree))
        return [*records, b"".join((head, _integer(len(name)), name, *map(_bytes, tensors)))]

    def decode(self, content: bytes) -> Call | None:
        """The call of a record; None for a schema.

        Raises:
            ValueError: for a record that this release does not know.
        """
        kind, body = content[0] if content else 0, memoryview(content)[1:]
        match kind & ~(_HAS_KEY | _UPDATES):
            case 1:
                return Settings(json.loads(bytes(body)))
            case 2:
                return State(bytes(body))
            case 3:
                self._learn(bytes(body).decode())
                return None
            case 4:
                key, task, tree = self._parts(body, bool(kind & _HAS_KEY))
                return Observe(task, tree["x"], tree["y"], key, bool(kind & _UPDATES))
            case 5:
                key, task, tree = self._parts(body, True)
                assert key is not None
                return Predict(task, tree["x"], key)
            case 6:
                step, at = _read_integer(body, 0)
                return Update(step, _read_integer(body, at)[0])
            case 7:
                return Release(bytes(body).decode())
        raise ValueError(f"a record of the journal is of kind {kind}, which this release does not know; upgrade")

    def _parts(self, body: memoryview, has_key: bool) -> tuple[bytes | None, str, dict[str, Tree]]:
        at = _KEY if has_key else 0
        key = bytes(body[:at]) if has_key else None
        schema, at = _read_integer(body, at)
        rows, at = _read_integer(body, at)
        length, at = _read_integer(body, at)
        task, data = bytes(body[at : at + length]).decode(), body[at + length :]
        tree, end = _restored(self._schemas[schema], rows, data, 0)
        if end != len(data):
            raise ValueError(f"a record of task {task!r} holds {len(data)} bytes of data, its schema says {end}")
        return key, task, tree

    def _learn(self, text: str) -> None:
        self._numbers[text] = len(self._schemas)
        self._schemas.append(json.loads(text))


def digest(kind: str, key: str) -> bytes:
    """The digest under which a key is stored."""
    return hashlib.blake2b(f"{kind} {key}".encode(), digest_size=_KEY).digest()


def _described(tree: Tree, tensors: list[Tensor]) -> dict[str, Any]:
    """The structure of a tree, with dtypes and row shapes; the tensors are appended to a list."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"tensor": [str(tree.dtype).removeprefix("torch."), list(tree.shape[1:])]}
    if isinstance(tree, dict) and all(isinstance(name, str) for name in tree):
        return {"dict": {name: _described(item, tensors) for name, item in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_described(item, tensors) for item in tree]}
    raise ValueError(
        f"x and y must be tensors, or lists, tuples or dicts by name of tensors; got {type(tree).__name__}"
    )


def _restored(node: dict[str, Any], rows: int, data: memoryview, at: int) -> tuple[Any, int]:
    """The tree of a description, and the position after its data."""
    ((kind, content),) = node.items()
    if kind == "tensor":
        dtype, shape = getattr(torch, content[0]), [rows, *content[1]]
        size = torch.Size(shape).numel() * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype), at
        # A copy, which is writable and aligned.
        return torch.frombuffer(bytearray(data[at : at + size]), dtype=dtype).reshape(shape), at + size
    items: Iterator[tuple[str | int, Any]] = iter(content.items() if kind == "dict" else enumerate(content))
    restored: dict[str | int, Any] = {}
    for name, item in items:
        restored[name], at = _restored(item, rows, data, at)
    if kind == "dict":
        return restored, at
    return (tuple if kind == "tuple" else list)(restored.values()), at


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _integer(value: int) -> bytes:
    """A number in groups of seven bits, the lowest first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def _read_integer(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte <= 0x7F:
            return value, at
