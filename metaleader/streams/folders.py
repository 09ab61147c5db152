"""Streams over folders of images: n-way tasks over class folders, or one task per folder of class folders."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Literal

import numpy as np

from metaleader.streams.arrays import ArrayStream, natural_key
from metaleader.streams.nway import Labelled, NWayStream
from metaleader.tasks import rng

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
# The modes of Pillow with more than eight bits per channel, which a conversion would cut off
_DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
# Images in memory, so that streams of several seeds share them; freed when no stream uses them.
_LOADED: weakref.WeakValueDictionary[Any, np.ndarray] = weakref.WeakValueDictionary()


def from_folder(
    path: str | Path,
    tasks: Literal["n-way", "folders"] = "n-way",
    *,
    size: int | None = None,
    channels: Literal[1, 3] = 3,
    ways: int | None = None,
    per_class: int | None = None,
    held_out: float = 0.2,
    order: str = "random",
    seed: int = 0,
) -> NWayStream | ArrayStream:
    """Return a stream over a folder of images, which are read into memory as uint8 (N, channels, H, W).

    Folders and files are taken in the order of their names, with numbers compared by value; names that begin with a dot
    and files without the suffix of an image are ignored. Transparency is dropped.

    Args:
        path: the folder. For "n-way" it has one folder of images per class, CLASS/IMAGE; for "folders" one folder per
            task, TASK/CLASS/IMAGE.
        tasks: "n-way" for the tasks of `NWayStream`; "folders" for one classification per folder. Labels then are the
            positions of the classes' names among those of all tasks, `stream.names`.
        size: resize all images to this width and height; None keeps their size, which must be the same for all.
        channels: 3 for colour, 1 for grey.
        ways: for "n-way", the number of classes per task, 5 if None.
        per_class: for "n-way", the number of training images per class; those of the smallest class if None.
        held_out: the fraction of each class ("n-way", the same images for every seed) or of each task to hold out.
        order: for "n-way" the order of classes, as in `NWayStream`; for "folders" "given" or "random".
        seed: `stream[t]` depends only on the seed and t.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: for an unreadable image or an empty folder, which the message names.
    """
    root = Path(path)
    if channels not in (1, 3) or (size is not None and size < 1):
        raise ValueError(f"channels must be 1 or 3 and size positive, got {channels} and {size}")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must lie between 0 and 1, got {held_out}")
    if tasks == "n-way":
        return _n_way(root, (size, channels), ways or 5, per_class, held_out, order, seed)
    if tasks != "folders":
        raise ValueError(f"tasks must be 'n-way' or 'folders', got {tasks!r}")
    if ways is not None or per_class is not None:
        raise ValueError("ways and per_class belong to tasks='n-way'; with 'folders' a task has all its images")
    return _per_folder(root, (size, channels), held_out, order, seed)


def _n_way(
    root: Path,
    form: tuple[int | None, int],
    ways: int,
    per_class: int | None,
    held_out: float,
    order: str,
    seed: int,
) -> NWayStream:
    files = {folder.name: _images(folder, "tasks='folders' takes TASK/CLASS/IMAGE") for folder in _folders(root)}
    if len(files) < ways:
        raise ValueError(f"{root} has {len(files)} class folders, {', '.join(files)}; tasks of {ways} ways need {ways}")
    single = [name for name, paths in files.items() if len(paths) < 2]
    if single:
        raise ValueError(f"{root / single[0]} has 1 image; a class needs one to train on and one to hold out")
    splits: tuple[list[tuple[int, Path]], list[tuple[int, Path]]] = ([], [])
    for label, paths in enumerate(files.values()):
        num = min(max(1, round(held_out * len(paths))), len(paths) - 1)
        is_test = set(rng("folder held out", label).permutation(len(paths))[:num].tolist())
        for i, path in enumerate(paths):
            splits[i in is_test].append((label, path))
    x = _read([path for split in splits for _, path in split], *form)
    labels, test_labels = (np.asarray([label for label, _ in split]) for split in splits)
    data = Labelled(x[: len(labels)], labels, x[len(labels) :], test_labels)
    per_class = int(np.bincount(labels).min()) if per_class is None else per_class
    return NWayStream(data, ways, per_class, None, order, names=list(files), seed=seed)


def _per_folder(root: Path, form: tuple[int | None, int], held_out: float, order: str, seed: int) -> ArrayStream:
    files: dict[str, list[tuple[str, Path]]] = {}
    for i, task in enumerate(_folders(root)):
        classes = {folder.name: _images(folder, "the classes of a task are folders") for folder in _folders(task)}
        listed = [(name, path) for name, paths in classes.items() for path in paths]
        # Shuffled, so that every reveal has several classes.
        files[task.name] = [listed[row] for row in rng("folder rows", i).permutation(len(listed))]
    names = sorted({name for listed in files.values() for name, _ in listed}, key=natural_key)
    x = _read([path for listed in files.values() for _, path in listed], *form)
    parts = np.split(x, np.cumsum([len(listed) for listed in files.values()])[:-1])
    source = {
        task: {"x": part, "y": np.asarray([names.index(name) for name, _ in listed])}
        for (task, listed), part in zip(files.items(), parts, strict=True)
    }
    stream = ArrayStream(source, held_out, order, seed)  # pyright: ignore[reportArgumentType]
    stream.names = dict(enumerate(names))
    return stream


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    found = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    if not found:
        raise ValueError(f"{folder} has no folders; put the images of each class into a folder of its own")
    return sorted(found, key=lambda path: natural_key(path.name))


def _images(folder: Path, layout: str) -> list[Path]:
    found = [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    ]
    if not found:
        advice = f"; it has folders, and {layout}" if any(path.is_dir() for path in folder.iterdir()) else ""
        raise ValueError(f"{folder} has no images, files that end in {', '.join(sorted(SUFFIXES))}{advice}")
    return sorted(found, key=lambda path: natural_key(path.name))


def _read(paths: list[Path], size: int | None, channels: int) -> np.ndarray:
    """The images as (N, channels, H, W); those already in memory if no file has changed."""
    stats = [path.stat() for path in paths]
    key = (
        size,
        channels,
        *((str(path.resolve()), s.st_mtime_ns, s.st_size) for path, s in zip(paths, stats, strict=True)),
    )
    images = _LOADED.get(key)
    if images is None:
        first = _read_image(paths[0], size, channels)
        images = np.empty((len(paths), *first.shape), np.uint8)
        for i, path in enumerate(paths):
            image = _read_image(path, size, channels)
            if image.shape != first.shape:
                sizes = [f"{shape[2]}x{shape[1]}" for shape in (image.shape, first.shape)]
                raise ValueError(
                    f"{path} is {sizes[0]} pixels, {paths[0]} is {sizes[1]}; pass size=... to resize all images"
                )
            images[i] = image
        _LOADED[key] = images
    return images


def _read_image(path: Path, size: int | None, channels: int) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("from_folder needs Pillow; install it with: pip install pillow") from error
    try:
        with Image.open(path) as image:
            if image.mode in _DEEP:
                raise ValueError(f"it has more than 8 bits per channel (mode {image.mode})")
            converted = image.convert("RGB" if channels == 3 else "L")
            if size is not None:
                converted = converted.resize((size, size), Image.Resampling.BILINEAR)
            pixels = np.asarray(converted)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a damaged image can raise any exception in Pillow's readers
        raise ValueError(f"{path} cannot be read as an image: {error}; replace or remove it") from error
    return np.moveaxis(pixels.reshape(*pixels.shape[:2], channels), 2, 0)
