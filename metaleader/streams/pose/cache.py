"""The cache of the pose stream: one file per view, written atomically by one process at a time.

A file has a line of JSON, followed by compressed data: the image of the empty table, the box (top, bottom, left, right)
in which each image differs from it, and the pixels of all boxes. The boxes are small, so files are small and fast to
read. While a process draws a view, it locks the view's `.part` file. A kill releases the lock, and the next process
draws the view from the beginning.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

FORMAT = "metaleader pose view 1"


def read_view(path: Path, key: str, num: int, size: int) -> np.ndarray:
    """Read the images of a view, (num, 3, size, size), uint8.

    Raises:
        FileNotFoundError: if the view has not been drawn yet.
        ValueError: if the file is truncated, damaged or of another stream.
    """
    line, _, content = path.read_bytes().partition(b"\n")
    try:
        header = json.loads(line)
        identity = [header[name] for name in ("format", "key", "view", "images", "size")]
        if identity != [FORMAT, key, path.stem, num, size]:
            raise ValueError(f"it holds {identity}")
        if hashlib.sha256(content).hexdigest() != header["sha256"]:
            raise ValueError("its checksum does not match")
        return _unpack(content, num, size)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged ({error})") from error


@contextlib.contextmanager
def claim_view(path: Path, wait: bool) -> Iterator[IO[bytes] | None]:
    """Lock a view for drawing, against other processes and threads; yields the file for `write_view`.

    Args:
        path: the file of the view.
        wait: whether to wait if the view is locked; if False, yields None instead.

    Raises:
        OSError: if the cache cannot be written.
    """
    part = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = open(part, "ab")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            yield None
            return
        if _is_at(file, part):
            break
        file.close()  # the previous owner renamed or removed the file in the meantime
    try:
        yield file
    finally:
        if _is_at(file, part):
            part.unlink()
        file.close()


def write_view(file: IO[bytes], path: Path, key: str, images: np.ndarray, empty: np.ndarray) -> None:
    """Store a locked view: its images (num, 3, size, size) and the empty table (3, size, size), uint8.

    Raises:
        OSError: if the disk is full; no file is left.
    """
    content = _pack(images, empty)
    header = {"format": FORMAT, "key": key, "view": path.stem, "images": len(images), "size": images.shape[-1]}
    header["sha256"] = hashlib.sha256(content).hexdigest()
    file.truncate(0)
    file.write(json.dumps(header).encode() + b"\n" + content)
    file.flush()
    os.fsync(file.fileno())
    os.replace(path.with_suffix(".part"), path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _pack(images: np.ndarray, empty: np.ndarray) -> bytes:
    changed = (images != empty).any(1)
    boxes = np.concatenate([_ends(changed.any(2)), _ends(changed.any(1))], 1)
    pixels = [
        image[:, top:bottom, left:right].tobytes()
        for image, (top, bottom, left, right) in zip(images, boxes.tolist(), strict=True)
    ]
    return zlib.compress(b"".join([empty.tobytes(), boxes.astype("<u2").tobytes(), *pixels]))


def _unpack(content: bytes, num: int, size: int) -> np.ndarray:
    # The limit keeps a foreign file from filling the memory.
    limit = (num + 1) * 3 * size * size + num * 8
    raw = np.frombuffer(zlib.decompressobj().decompress(content, limit + 1), np.uint8)
    empty, boxes, pixels = np.split(raw, [3 * size * size, 3 * size * size + num * 8])
    images = np.empty((num, 3, size, size), np.uint8)
    images[:] = empty.reshape(3, size, size)
    start = 0
    for image, (top, bottom, left, right) in zip(images, boxes.view("<u2").reshape(num, 4).tolist(), strict=True):
        end = start + 3 * (bottom - top) * (right - left)
        image[:, top:bottom, left:right] = pixels[start:end].reshape(3, bottom - top, right - left)
        start = end
    if start != len(pixels):
        raise ValueError(f"it holds {len(pixels)} bytes of pixels, not {start}")
    return images


def _ends(changed: np.ndarray) -> np.ndarray:
    """Return the first true index of each row (num, size) and one past the last, (num, 2); equal if none is true."""
    first, last = changed.argmax(1), changed.shape[1] - changed[:, ::-1].argmax(1)
    return np.column_stack([first, np.where(changed.any(1), last, first)])


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
