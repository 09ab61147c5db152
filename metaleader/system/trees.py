"""State trees as safetensors files, which run no code when they are loaded."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from metaleader.system.files import Content, write_atomic

# The version of the way in which a tree becomes a file. In the first, the digest covered the values only, was optional,
# and all lists were in the header.
_LAYOUT = "2"
_METADATA = {"format", "version", "tree"}
# The digest of a file is taken with zeros in its place.
_DIGEST_KEY, _NO_DIGEST = b'"sha256":"', b"0" * 64
_HEADER_LIMIT = 100_000_000  # of safetensors, in bytes
# Lists and dicts of this many plain values or more become tensors.
_LONG, _PLAIN = 100, (bool, int, float, str, type(None))


def save_tree(path: str | os.PathLike[str], tree: dict[str, Any], kind: str, version: int) -> None:
    """Save nested dicts, lists and tuples of tensors and plain values as one safetensors file.

    Each tensor is stored under its path in the tree. The metadata holds the other values as JSON, the name and version
    of the format, and the SHA-256 of the file. Equal trees give equal files. The file is read back before it replaces
    an old one.

    Raises:
        ValueError: if the tree has other values, or too many tensors for one file.
        OSError: if the file cannot be written; the old file is unchanged.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_take_tensors(tree, "", tensors))
    try:
        content = _encoded(text, tensors, kind, version)
    except ValueError as error:
        raise ValueError(f"cannot save {path}: {error}; use fewer or shorter names") from error
    write_atomic(path, *content, check=_check_file)


def tree_to_bytes(tree: dict[str, Any], kind: str, version: int) -> bytes:
    """The content of the file that `save_tree` writes."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_take_tensors(tree, "", tensors))
    return b"".join(_encoded(text, tensors, kind, version))


def _encoded(text: str, tensors: dict[str, Tensor], kind: str, version: int) -> list[Content]:
    """The content of a file, in pieces: those of tensors are views of them."""
    metadata = {"format": kind, "layout": _LAYOUT, "sha256": _NO_DIGEST.decode(), "tree": text, "version": str(version)}
    header: dict[str, Any] = {"__metadata__": metadata}
    pieces, end = [], 0
    for name, dtype in _in_order(tensors):
        data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
        pieces.append(data)
        offsets, end = [end, end + len(data)], end + len(data)
        header[name] = {"data_offsets": offsets, "dtype": dtype, "shape": list(tensors[name].shape)}
    plain = json.dumps(header, separators=(",", ":")).encode()
    plain += b" " * (-len(plain) % 8)
    if len(plain) > _HEADER_LIMIT:
        raise ValueError(
            f"the names and plain values take {len(plain)} bytes, a safetensors file has room for {_HEADER_LIMIT}"
        )
    start = len(plain).to_bytes(8, "little")
    digest = hashlib.sha256(start + plain)
    for data in pieces:
        digest.update(data)
    plain = plain.replace(_DIGEST_KEY + _NO_DIGEST, _DIGEST_KEY + digest.hexdigest().encode(), 1)
    return [start + plain, *pieces]


def _in_order(tensors: dict[str, Tensor]) -> list[tuple[str, str]]:
    """The names of tensors in the order of safetensors, and the names that it gives to their dtypes."""
    try:
        content = save({name: torch.zeros((), dtype=tensor.dtype) for name, tensor in tensors.items()})
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    places = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return sorted(
        ((name, place["dtype"]) for name, place in places.items()), key=lambda p: places[p[0]]["data_offsets"]
    )


def _check_file(path: Path) -> None:
    """Read a new file back; raises OSError if it is not complete."""
    try:
        with safe_open(path, framework="pt") as file:
            problem = _problem(path, file.metadata())
    except SafetensorError as error:
        problem = str(error)
    if problem is not None:
        raise OSError(errno.EIO, f"the file that was written cannot be read back: {problem}")


def _problem(path: Path, metadata: dict[str, str]) -> str | None:
    """Describe how a file of this layout differs from the one that was saved; None if it is intact."""
    if metadata.keys() != _METADATA | {"layout", "sha256"}:
        return f"its metadata has the keys {sorted(metadata)}"
    digest = hashlib.sha256()
    with path.open("rb") as file:
        start = file.read(8)
        plain = file.read(int.from_bytes(start, "little"))
        digest.update(start + plain.replace(_DIGEST_KEY + metadata["sha256"].encode(), _DIGEST_KEY + _NO_DIGEST, 1))
        while piece := file.read(1 << 20):
            digest.update(piece)
    return None if digest.hexdigest() == metadata["sha256"] else "its checksum does not match"


def is_savable(tree: Any) -> bool:
    """Return whether `save_tree` can save a tree."""
    try:
        _take_tensors(tree, "", {})
    except (ValueError, RecursionError):
        return False
    return True


def load_tree(path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """Load a tree that `save_tree` has written.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is truncated, altered, of another format or of a newer version.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}" if not path.exists() else f"{path} is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}); use an intact copy") from error
    plain, layout = _header(metadata, str(path), kind, version)
    problem = _problem(path, metadata) if layout == int(_LAYOUT) else _problem_of_first_layout(metadata, tensors)
    if problem is not None:
        raise ValueError(f"{path} is damaged: {problem}; use an intact copy")
    return _tree(plain, tensors, str(path))


def tree_from_bytes(content: bytes, where: str, kind: str, version: int) -> dict[str, Any]:
    """Decode the content of a file, without comparing its digest; `where` begins error messages.

    Raises:
        ValueError: if the content is truncated, of another format or of a newer version.
    """
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        tensors = load(content)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{where} is truncated or not in the safetensors format ({error})") from error
    return _tree(_header(header.get("__metadata__", {}), where, kind, version)[0], tensors, where)


def _header(metadata: dict[str, str], where: str, kind: str, version: int) -> tuple[Any, int]:
    """The plain values of a tree, and the layout of its file."""
    if metadata.get("format") != kind:
        raise ValueError(f"{where} is not a {kind} file: its format is {metadata.get('format')!r}")
    try:
        file_version, layout = int(metadata["version"]), int(metadata.get("layout", 1))
        plain = json.loads(metadata["tree"])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} has a damaged header ({error!r}); use an intact copy") from error
    if file_version > version or layout > int(_LAYOUT):
        raise ValueError(
            f"{where} has version {file_version} of the {kind} format, this release reads up to {version}; upgrade"
        )
    if file_version < 1:
        raise ValueError(f"{where} is damaged: version {file_version}; use an intact copy")
    return plain, layout


def _tree(plain: Any, tensors: dict[str, Tensor], where: str) -> dict[str, Any]:
    tree = _put_tensors(plain, tensors, where)
    if not isinstance(tree, dict):
        raise ValueError(f"{where} has a damaged header (no dict at its root); use an intact copy")
    return tree


def _problem_of_first_layout(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str | None:
    """As `_problem`, for files of earlier releases, of which the first had no digest."""
    if "layout" in metadata or metadata.keys() - {"sha256"} != _METADATA:
        return f"its metadata has the keys {sorted(metadata)}"
    digest = hashlib.sha256(metadata["tree"].encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return None if metadata.get("sha256", digest.hexdigest()) == digest.hexdigest() else "its checksum does not match"


def _take_tensors(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Move the tensors of a tree into `tensors`, and return the rest as values that JSON can represent."""
    if isinstance(tree, Tensor):
        return {"tensor": _store(tree.detach().cpu().resolve_neg().resolve_conj().contiguous(), path, tensors)}
    if isinstance(tree, list | dict) and len(tree) >= _LONG and _is_plain(tree):
        # The header has a limit of 100 MB.
        text = np.frombuffer(json.dumps(tree).encode(), np.uint8)
        return {"json": _store(torch.from_numpy(text.copy()), path, tensors)}
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise ValueError(f"keys must be strings at {path!r}, got {list(tree)}")
        return {
            "dict": {key: _take_tensors(value, f"{path}/{key}".lstrip("/"), tensors) for key, value in tree.items()}
        }
    if isinstance(tree, list | tuple):
        items = [_take_tensors(value, f"{path}/{i}".lstrip("/"), tensors) for i, value in enumerate(tree)]
        return {"list" if isinstance(tree, list) else "tuple": items}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    raise ValueError(
        f"cannot save {type(tree).__name__} at {path!r}: only tensors, numbers, strings, dicts, lists and tuples"
    )


def _is_plain(tree: Any) -> bool:
    """Whether JSON gives the same lists, dicts and values back."""
    if type(tree) is list:
        return all(_is_plain(item) for item in tree)
    if type(tree) is dict:
        return all(type(key) is str and _is_plain(value) for key, value in tree.items())
    return type(tree) in _PLAIN


def _store(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Store a tensor under its path, or under a similar name if another path is spelt the same; returns the name."""
    name = path
    while name in tensors or name == "__metadata__":
        name += "'"
    tensors[name] = tensor
    return name


def _put_tensors(plain: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Invert `_take_tensors`."""
    try:
        ((kind, content),) = plain.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "dict":
            return {key: _put_tensors(value, tensors, where) for key, value in content.items()}
        if kind == "json":
            return json.loads(tensors[content].numpy().tobytes())
        if kind in ("list", "tuple"):
            items = [_put_tensors(value, tensors, where) for value in content]
            return items if kind == "list" else tuple(items)
        if kind == "value":
            return content
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ValueError) and "damaged" in str(error):
            raise
        raise ValueError(f"{where} has a damaged header ({error!r}); use an intact copy") from error
    raise ValueError(f"{where} has a damaged header (unknown node {kind!r}); use an intact copy")
