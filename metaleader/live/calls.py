"""The records of a session's journal: calls that change a learner, with their tensors.

A record begins with its kind. Tensors are stored as in the data section of a safetensors file: the bytes of each
tensor, one after the other. Their names, dtypes and row shapes are a record of their own, a schema, written before its
first use, so that a call costs its data, its task's name and a few bytes. Keys are stored as digests of 16 bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metaleader.tasks import Tree, num_rows

Updates = Literal["none", "now", "later"]

_SETTINGS, _STATE, _SCHEMA, _OBSERVE, _PREDICT, _UPDATE, _READMIT = range(1, 8)
# Added to the kind of an observation: whether it has a key, and its updates. Added to that of updates: if exclusive.
_HAS_KEY = _EXCLUSIVE = 0x80
_UPDATES: dict[Updates, int] = {"none": 0, "now": 0x20, "later": 0x40}
_FLAGS = 0xE0
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
        updates: the updates after it: "none", "now", as part of this call, or "later", as records of their own.
    """

    task: str
    x: Tree
    y: Tree
    key: bytes | None
    updates: Updates

    @property
    def num_rows(self) -> int:
        """The number of datapoints."""
        return num_rows(self.x)

    def as_prediction(self) -> Predict:
        """The prediction that becomes this observation by a label; the two have one key."""
        assert self.key is not None
        return Predict(self.task, self.x, self.key)


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
        exclusive: whether no call is made meanwhile. Otherwise, updates that fail have no effect at all.
    """

    step: int
    steps: int
    exclusive: bool = False


class Readmit(NamedTuple):
    """A task that was set aside is drawn again."""

    task: str


Call = Settings | State | Observe | Predict | Update | Readmit


class Codec:
    """Calls as bytes.

    Args:
        schemas: the descriptions of tensors known so far, in the order of their numbers.
    """

    def __init__(self, schemas: Iterable[str] = ()) -> None:
        self._schemas: dict[int, dict[str, Any]] = {}
        self._numbers: dict[str, int] = {}
        for number, text in enumerate(schemas):
            self._learn(number, text)

    @property
    def schemas(self) -> list[str]:
        """The descriptions of tensors, in the order of their numbers."""
        return sorted(self._numbers, key=self._numbers.__getitem__)

    def encode(self, call: Call) -> list[bytes]:
        """The records of a call: its schema if that is new, and the call."""
        match call:
            case Settings(values):
                return [bytes([_SETTINGS]) + json.dumps(values).encode()]
            case State(tree):
                return [bytes([_STATE]) + tree]
            case Update(step, steps, exclusive):
                kind = _UPDATE | (_EXCLUSIVE if exclusive else 0)
                return [bytes([kind]) + _integer(step) + _integer(steps)]
            case Readmit(task):
                return [bytes([_READMIT]) + task.encode()]
            case Observe(task, x, y, key, updates):
                kind = _OBSERVE | (_HAS_KEY if key else 0) | _UPDATES[updates]
                return self._with_schema(kind, key or b"", task, {"x": x, "y": y})
            case Predict(task, x, key):
                return self._with_schema(_PREDICT, key, task, {"x": x})

    def _with_schema(self, kind: int, key: bytes, task: str, tree: dict[str, Tree]) -> list[bytes]:
        tensors: list[Tensor] = []
        text, name = json.dumps(_described(tree, tensors)), task.encode()
        records = []
        if text not in self._numbers:
            number = len(self._numbers)
            self._learn(number, text)
            records.append(bytes([_SCHEMA]) + _integer(number) + text.encode())
        head = bytes([kind]) + key + _integer(self._numbers[text]) + _integer(num_rows(tree))
        return [*records, b"".join((head, _integer(len(name)), name, *map(_bytes, tensors)))]

    def decode(self, content: bytes) -> Call | None:
        """The call of a record; None for a schema.

        Raises:
            ValueError: for a record that this release does not know, or of an unknown schema.
        """
        kind, body = content[0] if content else 0, memoryview(content)[1:]
        flags, kind = kind & _FLAGS, kind & ~_FLAGS
        if kind == _SETTINGS:
            return Settings(json.loads(bytes(body)))
        if kind == _STATE:
            return State(bytes(body))
        if kind == _SCHEMA:
            number, at = _read_integer(body, 0)
            self._learn(number, bytes(body[at:]).decode())
            return None
        if kind == _OBSERVE:
            key, task, tree = self._parts(body, bool(flags & _HAS_KEY))
            updates: Updates = next(name for name, flag in _UPDATES.items() if flag == flags & ~_HAS_KEY)
            return Observe(task, tree["x"], tree["y"], key, updates)
        if kind == _PREDICT:
            key, task, tree = self._parts(body, True)
            assert key is not None
            return Predict(task, tree["x"], key)
        if kind == _UPDATE:
            step, at = _read_integer(body, 0)
            return Update(step, _read_integer(body, at)[0], bool(flags & _EXCLUSIVE))
        if kind == _READMIT:
            return Readmit(bytes(body).decode())
        raise ValueError(f"a record of the journal is of kind {kind}, which this release does not know; upgrade")

    def _parts(self, body: memoryview, has_key: bool) -> tuple[bytes | None, str, dict[str, Tree]]:
        at = _KEY if has_key else 0
        key = bytes(body[:at]) if has_key else None
        schema, at = _read_integer(body, at)
        rows, at = _read_integer(body, at)
        length, at = _read_integer(body, at)
        task, data = bytes(body[at : at + length]).decode(), body[at + length :]
        if schema not in self._schemas:
            raise ValueError(f"the description of the tensors of a record of task {task!r} is missing")
        tree, end = _restored(self._schemas[schema], rows, data, 0)
        if end != len(data):
            raise ValueError(f"a record of task {task!r} holds {len(data)} bytes of data, its schema says {end}")
        return key, task, tree

    def _learn(self, number: int, text: str) -> None:
        self._numbers[text], self._schemas[number] = number, json.loads(text)


def fingerprint(call: Observe | Predict) -> bytes:
    """A digest of a task and of data, which tells whether a key was used for the same call before."""
    tensors: list[Tensor] = []
    described = _described([call.x, call.y] if isinstance(call, Observe) else [call.x], tensors)
    content = hashlib.blake2b(json.dumps([call.task, described]).encode(), digest_size=8)
    for tensor in tensors:
        content.update(_bytes(tensor))
    return content.digest()


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
