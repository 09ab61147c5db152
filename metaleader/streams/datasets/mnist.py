"""A reader of MNIST's four original gzipped idx files, with checks of their magic numbers and sizes."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from metaleader.streams.datasets.registry import Folder, find
from metaleader.streams.nway import Labelled
from metaleader.system.files import open_regular

# The third byte of the magic number is the data type, the fourth the number of dimensions.
_UNSIGNED_BYTES = 0x08


def read_mnist(data: Folder = None) -> Labelled:
    """Read MNIST from the data folder: images uint8 (N, 28, 28), bright digits on black, and labels uint8.

    Raises:
        FileNotFoundError: if files are missing; the message says how to get them.
        ValueError: if a file is damaged or not the published one.
    """
    try:
        train_images, train_labels, test_images, test_labels = find("mnist", data)
    except ValueError as error:
        raise ValueError(
            f"{error}. For another data set in this format, such as Fashion-MNIST, use metaleader.streams.rainbow with"
            " metaleader.streams.read_idx"
        ) from error
    digits = Labelled(
        read_idx(train_images, 3), read_idx(train_labels, 1), read_idx(test_images, 3), read_idx(test_labels, 1)
    )
    for images, labels, path in (
        (digits.x, digits.labels, train_labels),
        (digits.test_x, digits.test_labels, test_labels),
    ):
        if len(images) != len(labels):
            raise ValueError(f"{path} has {len(labels)} labels for {len(images)} images; use the files of one data set")
        if labels.max(initial=0) > 9:
            raise ValueError(f"{path} has label {labels.max()}; digits are 0 to 9")
    return digits


def read_idx(path: str | Path, dimensions: int | None = None) -> np.ndarray:
    """Read a gzipped idx file of unsigned bytes, the format of MNIST.

    Args:
        path: the file.
        dimensions: the number of dimensions that the file must have; None allows any.

    Raises:
        ValueError: if the file is truncated, too long, not gzip, or of another type or number of dimensions.
    """
    try:
        with open_regular(path) as opened, gzip.open(opened, "rb") as file:
            start = file.read(4)
            dimensions = start[3] if dimensions is None and len(start) == 4 else dimensions or 0
            header = start + file.read(4 * dimensions)
            magic = bytes([0, 0, _UNSIGNED_BYTES, dimensions])
            if header[:4] != magic:
                raise ValueError(f"{path} is not an idx file of {dimensions} dimensions: it begins with {header[:4]!r}")
            if len(header) < 4 + 4 * dimensions:
                raise ValueError(f"{path} is truncated in its header; use an intact copy")
            shape = tuple(int(n) for n in np.frombuffer(header, ">u4", offset=4))
            size = int(np.prod(shape, dtype=object))
            # Reading one extra byte detects a file that is too long. The limit bounds the memory that a damaged header
            # can request.
            content = file.read(size + 1) if size < 1 << 31 else b""
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        raise ValueError(f"{path} is truncated or not gzip ({error}); use an intact copy") from error
    if len(content) != size or size == 0:
        raise ValueError(f"{path} does not hold the {shape} values that its header announces; use an intact copy")
    return np.frombuffer(content, np.uint8).reshape(shape)
