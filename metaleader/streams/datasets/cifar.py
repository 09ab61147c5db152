"""CIFAR-100, read from the official archive of pickles or from an npz file, and the 5-way stream over it.

The archive is read in memory without extracting files, and its pickles cannot run code.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from metaleader.streams.datasets.pickles import load_pickle
from metaleader.streams.datasets.registry import Folder, find
from metaleader.streams.nway import Labelled, NWayStream
from metaleader.system.files import open_regular
from metaleader.system.npz import npz_arrays

# The official grouping. Classes are numbered in the alphabetical order of their names.
SUPERCLASSES: dict[str, tuple[str, ...]] = {
    "aquatic mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit and vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household electrical devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large man-made outdoor things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large natural outdoor scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large omnivores and herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium-sized mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles 1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles 2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}
NAMES = sorted(name for group in SUPERCLASSES.values() for name in group)
_GROUP_OF = {name: i for i, group in enumerate(SUPERCLASSES.values()) for name in group}
# The official superclass number of each class.
COARSE = [_GROUP_OF[name] for name in NAMES]

_MEMBERS = ("cifar-100-python/train", "cifar-100-python/test")
_PIXELS = 3 * 32 * 32
# In bytes. The official members have 155 and 31 MB.
_MEMBER_LIMIT, _ARCHIVE_LIMIT = 1 << 28, 1 << 29


def cifar100(
    data: Folder = None,
    ways: int = 5,
    per_class: int = 400,
    order: str | Sequence[int] = "random",
    seed: int = 0,
) -> NWayStream:
    """Return the paper's 5-way CIFAR-100: 96 tasks, measured on the CIFAR-100 test images of their classes."""
    return NWayStream(read_cifar100(data), ways, per_class, None, order, COARSE, NAMES, seed)


def read_cifar100(data: Folder = None) -> Labelled:
    """Read CIFAR-100 from the data folder: images uint8 (N, 3, 32, 32).

    Raises:
        FileNotFoundError: if there is no file; the message says how to get it.
        ValueError: if the file is damaged, hostile or not CIFAR-100.
    """
    (path,) = find("cifar100", data)
    labelled = _read_npz(path) if path.suffix == ".npz" else _read_archive(path)
    for labels in (labelled.labels, labelled.test_labels):
        classes = np.unique(labels)
        if len(classes) != len(NAMES) or classes[-1] != len(NAMES) - 1:
            absent = sorted(set(range(len(NAMES))) - set(classes.tolist()))
            raise ValueError(
                f"{path}: CIFAR-100 has the classes 0 to 99; the file {f'lacks {absent}' if absent else 'has others'}"
            )
    return labelled


def _read_npz(path: Path) -> Labelled:
    names = ("train_images", "train_labels", "test_images", "test_labels")
    try:
        arrays = npz_arrays(path, names, _MEMBER_LIMIT)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as CIFAR-100: {error}; use an intact copy") from error
    images, labels, test_images, test_labels = (arrays[name] for name in names)
    for array in (images, test_images):
        if array.dtype != np.uint8 or array.shape[1:] != (32, 32, 3):
            raise ValueError(f"{path}: images must be uint8 (N, 32, 32, 3), got {array.dtype} {array.shape}")
    # Transposed views; only the images of a task are copied.
    return _labelled(path, images.transpose(0, 3, 1, 2), labels, test_images.transpose(0, 3, 1, 2), test_labels)


def _read_archive(path: Path) -> Labelled:
    try:
        with open_regular(path) as file, gzip.open(file, "rb") as content:
            limited: Any = _Limited(content)
            with tarfile.open(fileobj=limited, mode="r:") as archive:
                members = _read_members(archive, path)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"{path} is truncated or not a gzipped archive ({error}); use an intact copy") from error
    absent = [name for name in _MEMBERS if name not in members]
    if absent:
        raise ValueError(f"{path} has no {', '.join(absent)}; use the official archive")
    (x, labels), (test_x, test_labels) = (members[name] for name in _MEMBERS)
    return _labelled(path, x, labels, test_x, test_labels)


class _Limited:
    """A file of which little can be read at once and in all, so that a damaged header allocates no memory."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self.tell = file.tell

    def read(self, size: int) -> bytes:
        """Read `size` bytes."""
        if not 0 <= size <= _MEMBER_LIMIT:
            raise tarfile.ReadError(f"a header announces {size} bytes")
        return self._file.read(size)

    def seek(self, position: int, whence: int = 0) -> int:
        """Move to a position."""
        if position > _ARCHIVE_LIMIT:
            raise tarfile.ReadError(f"it has more than {_ARCHIVE_LIMIT} bytes")
        return self._file.seek(position, whence)


def _read_members(archive: tarfile.TarFile, path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the images and labels of the members `_MEMBERS`."""
    members: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for member in archive:
        member_path = PurePosixPath(member.name)
        if member_path.is_absolute() or ".." in member_path.parts or not (member.isreg() or member.isdir()):
            raise ValueError(f"{path} is hostile: {member.name!r} is a link or leads out of the archive")
        if member.size > _MEMBER_LIMIT or member.name in members:
            raise ValueError(f"{path}: {member.name!r} is duplicated or too large; use the official archive")
        file = archive.extractfile(member)
        if member.name in _MEMBERS and file is not None:
            where = f"{path}: {member.name}"
            members[member.name] = _images_and_labels(load_pickle(file, member.size, where), where)
    return members


def _images_and_labels(content: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        images, labels = content[b"data"].array, content[b"fine_labels"]
        if type(labels) is not list or not all(type(label) is int for label in labels):
            raise TypeError("fine_labels must be a list of integers")
        labels = np.asarray(labels)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(f"{where} has no data and fine_labels ({error!r}); use the official archive") from error
    if images.ndim != 2 or images.shape[1] != _PIXELS:
        raise ValueError(f"{where}: data must be uint8 (N, {_PIXELS}), got {images.shape}")
    return images.reshape(-1, 3, 32, 32), labels


def _labelled(path: Path, x: np.ndarray, labels: np.ndarray, test_x: np.ndarray, test_labels: np.ndarray) -> Labelled:
    for images, classes in ((x, labels), (test_x, test_labels)):
        if classes.dtype.kind not in "iu" or classes.shape != (len(images),):
            raise ValueError(
                f"{path}: {len(images)} images need as many integer labels, got {classes.dtype} {classes.shape}"
            )
    return Labelled(x, labels.astype(np.int64), test_x, test_labels.astype(np.int64))
