"""Atomic file writes, and state trees as safetensors files, which run no code when they are loaded."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically: after a kill at any moment the file has the old content or the new.

    Raises:
        OSError: if the folder cannot be written or the disk is full; the old file is unchanged.
    """
    # A symbolic link is kept, and its target is written.
    path = Path(os.path.realpath(path))
    check_target(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        hint = "an existing file is unchanged; free some space, or choose another path"
        raise OSError(error.errno, f"cannot write {path} ({error.strerror}); {hint}") from error
    sync_folder(path.parent)


def write_drawn(path: str | os.PathLike[str], draw: Callable[[IO[bytes]], object]) -> None:
    """Write atomically the bytes that `draw` writes to a binary file object, such as a figure."""
    buffer = io.BytesIO()
    draw(buffer)
    write_atomic(path, buffer.getvalue())


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise an OSError if the folder of a path does not exist, or the path is not a regular file."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if path.exists() and not path.is_file():
        raise OSError(
            f"cannot write {path}: it is {'a folder' if path.is_dir() else 'not a regular file'}; name a file"
        )


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, which makes a rename in it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, durably."""
    missing, path = [], folder.absolute()
    while not path.exists():
        missing.append(path)
        path = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_folder(path.parent)


def save_tree(path: str | os.PathLike[str], tree: dict[str, Any], kind: str, version: int) -> None:
    """Save nested dicts, lists and tuples of tensors and plain values as one safetensors file.

    Each tensor is stored under its path in the tree. The metadata holds the other values as JSON, and the name and
    version of the format.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_take_tensors(tree, "", tensors))
    metadata = {"format": kind, "version": str(version), "tree": text, "sha256": _digest(text, tensors)}
    write_atomic(path, save(tensors, metadata=metadata))


def is_savable(tree: Any) -> bool:
    """Return whether `save_tree` can save a tree."""
    try:
        _take_tensors(tree, "", {})
    except ValueError:
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
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}); use an intact copy") from error
    if metadata.get("format") != kind:
        raise ValueError(f"{path} is not a {kind} file: its format is {metadata.get('format')!r}")
    try:
        file_version = int(metadata["version"])
        plain = json.loads(metadata["tree"])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header ({error!r}); use an intact copy") from error
    if file_version > version:
        raise ValueError(
            f"{path} has version {file_version} of the {kind} format, this release reads up to {version}; upgrade"
        )
    if "sha256" in metadata and metadata["sha256"] != _digest(metadata["tree"], tensors):
        raise ValueError(f"{path} is damaged: its checksum does not match; use an intact copy")
    tree = _put_tensors(plain, tensors, path)
    if not isinstance(tree, dict):
        raise ValueError(f"{path} has a damaged header (no dict at its root); use an intact copy")
    return tree


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of a tree's JSON text and its tensors."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _take_tensors(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Move the tensors of a tree into `tensors`, and return the rest as values that JSON can represent."""
    if isinstance(tree, Tensor):
        # Copied, because safetensors refuses tensors that share memory or are not contiguous.
        tensors[path] = tree.detach().cpu().contiguous().clone()
        return {"tensor": path}
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


def _put_tensors(plain: Any, tensors: dict[str, Tensor], path: Path) -> Any:
    """Invert `_take_tensors`."""
    try:
        ((kind, content),) = plain.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "dict":
            return {key: _put_tensors(value, tensors, path) for key, value in content.items()}
        if kind in ("list", "tuple"):
            items = [_put_tensors(value, tensors, path) for value in content]
            return items if kind == "list" else tuple(items)
        if kind == "value":
            return content
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ValueError) and "damaged" in str(error):
            raise
        raise ValueError(f"{path} has a damaged header ({error!r}); use an intact copy") from error
    raise ValueError(f"{path} has a damaged header (unknown node {kind!r}); use an intact copy")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
