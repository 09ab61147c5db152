"""Object pose: the position and azimuth of an object on a table, predicted from one image (section 6.3).

A task is one object seen by one camera. MuJoCo (the extra `pose`) draws the images once into a cache. A stream with a
complete cache needs neither MuJoCo nor OpenGL.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from metaleader.streams.base import BaseStream, check_round
from metaleader.streams.datasets.registry import Folder
from metaleader.streams.order import arrange
from metaleader.streams.pose.cache import claim_view, read_view, write_view
from metaleader.streams.pose.camera import Camera, View, draw_labels, draw_view
from metaleader.streams.pose.objects import Objects, builtin_objects, pascal3d_objects
from metaleader.streams.pose.scene import SCENE_VERSION, Scene, check_visible, colour_of, view_camera
from metaleader.system.machine import cache_folder
from metaleader.tasks import Batch, Task, rng

# The number of tasks in the paper's stream.
BLOCK = 90


@dataclass(frozen=True)
class PoseStream(BaseStream):
    """A stream of objects on a table: x is images (N, 3, size, size), uint8, and y is poses (N, 4), float32.

    A pose is x and y, uniform in [-1, 1], and the sine and cosine of a uniform azimuth. A red dot at one corner of the
    table marks its coordinate system. The 90 tasks are 50 objects, each seen by one or two cameras. The camera is as
    near as possible with the table and all poses in its frame.

    `stream[t]` draws the images that are not in the cache; `prepare` draws those of all tasks. Images stay in memory
    once they are read. An OpenGL implementation draws the same pixels every time. Two implementations may differ in
    pixels at edges, and by at most one grey level in the mean of 16x16 pixels; MUJOCO_GL=osmesa draws in software.

    Attributes:
        tasks: the number of tasks.
        images: the number of datapoints per task.
        train: the number of training datapoints per task; the others are held out.
        size: the width and height of the images, which are drawn at twice this size and averaged.
        objects: "builtin", which needs no data, or "pascal3d".
        order: "random"; "class", grouped by object class; "scale", from small to large; or one of the other orders of
            `reorder`, also by "azimuth" or "elevation" of the camera.
        seed: `stream[t]` depends on the seed, t, `images`, `size` and `objects`; in random order not on `tasks`.
        data: the folder with `pascal3d/`; METALEADER_DATA or the user's cache if None.
        cache: the folder for drawn images; METALEADER_CACHE or ~/.cache/metaleader if None. Each stream uses a
            subfolder. Damaged files are drawn again, with a warning.
    """

    tasks: int = BLOCK
    images: int = 1000
    train: int = 400
    size: int = 64
    objects: Literal["builtin", "pascal3d"] = "builtin"
    order: str = "random"
    seed: int = 0
    data: Folder = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        if self.tasks < 1 or self.seed < 0:
            raise ValueError(f"tasks must be at least 1 and seed at least 0, got {self.tasks} and {self.seed}")
        if not 1 <= self.train < self.images:
            raise ValueError(f"train must be from 1 to below images = {self.images}, got {self.train}")
        if not 16 <= self.size <= 1024:
            raise ValueError(f"size must be from 16 to 1024, got {self.size}")
        if self.objects not in ("builtin", "pascal3d"):
            raise ValueError(f"objects must be one of builtin, pascal3d, got {self.objects!r}")
        _ = self.folder, self.views  # raises an error if data is missing or the order is unknown

    def __len__(self) -> int:
        return self.tasks

    def task(self, t: int) -> Task:
        """The task of round t."""
        view = self.views[t]
        x = torch.from_numpy(self._images(view))
        y = torch.from_numpy(self._labels(view))
        return Task(str(view), Batch(x[: self.train], y[: self.train]), Batch(x[self.train :], y[self.train :]))

    def camera(self, t: int) -> Camera:
        """Return the camera of a task, whose method `arrows` projects poses into the images."""
        view = self.views[check_round(self, t)]
        return view_camera(view, self._collection.load(view.name))

    def prepare(self) -> None:
        """Draw all tasks that are not in the cache, with a progress bar; concurrent processes share the work."""
        self._draw([view for view in self.views if not self._path(view).exists()])

    @cached_property
    def views(self) -> tuple[View, ...]:
        """The views in the order of the stream."""
        names = self._collection.names
        objects = rng("pose objects", self.seed).permutation(len(names))
        # Each block of 90 rounds has its own permutation, so the first tasks do not depend on the number of tasks.
        blocks = range(-(-self.tasks // BLOCK))
        order = np.concatenate([BLOCK * b + rng("pose order", self.seed, b).permutation(BLOCK) for b in blocks])
        views = []
        for i in order[: self.tasks].tolist():
            index = int(objects[i % len(names)])
            views.append(draw_view(self.seed, names[index], index, i // len(names)))
        if self.order != "random":
            categories = {"class": list(dict.fromkeys(name.split()[0] for name in names))}
            permutation = arrange(self.order, _attributes(views), self.seed, others=("random",), categories=categories)
            views = [views[i] for i in permutation]
        return tuple(views)

    @property
    def attributes(self) -> Mapping[str, Sequence[Any]]:
        """The class and the scale of the objects, and the angles of the cameras in degrees."""
        return _attributes(self.views)

    @cached_property
    def folder(self) -> Path:
        """The cache folder of this stream, named after a hash of everything that determines the images."""
        return Path(self.cache or cache_folder()) / f"pose-{self._key}"

    @cached_property
    def _collection(self) -> Objects:
        if self.objects == "builtin":
            return builtin_objects()
        return pascal3d_objects(self.data)

    @cached_property
    def _key(self) -> str:
        inputs = {"scene": SCENE_VERSION, "objects": self._collection.digest}
        inputs |= {"seed": self.seed, "images": self.images, "size": self.size}
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def _loaded(self) -> dict[View, np.ndarray]:
        return {}

    def _path(self, view: View) -> Path:
        return self.folder / f"{view.name.replace(' ', '-')}-{view.number}.view"

    def _labels(self, view: View) -> np.ndarray:
        return draw_labels(self.seed, self._collection.names.index(view.name), view.number, self.images)

    def _images(self, view: View) -> np.ndarray:
        if view not in self._loaded:
            try:
                self._loaded[view] = self._read(view)
            except (FileNotFoundError, ValueError) as error:
                if isinstance(error, ValueError):
                    warnings.warn(f"{error}; it is drawn again", RuntimeWarning, stacklevel=3)
                self._draw([view])
                self._loaded[view] = self._read(view)
        return self._loaded[view]

    def _read(self, view: View) -> np.ndarray:
        return read_view(self._path(view), self._key, self.images, self.size)

    def _draw(self, views: list[View]) -> None:
        columns = (TextColumn("drawing poses"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            job = bar.add_task("", total=len(views) * self.images)
            # The first pass skips views that other processes are drawing; the second waits for them.
            for wait in (False, True):
                views = [view for view in views if not self._draw_view(view, wait, lambda num: bar.advance(job, num))]

    def _draw_view(self, view: View, wait: bool, advance: Callable[[int], None]) -> bool:
        """Draw a view into the cache; returns False if another process is drawing it and `wait` is False."""
        path = self._path(view)
        with claim_view(path, wait) as file:
            if file is None:
                return False
            with contextlib.suppress(FileNotFoundError, ValueError):
                self._read(view)
                advance(self.images)
                return True
            names = self._collection.names
            with Scene(view, self._collection.load(view.name), colour_of(view.name, names), self.size) as scene:
                empty = scene.draw_empty()
                images = np.empty((self.images, *empty.shape), np.uint8)
                for i, label in enumerate(self._labels(view)):
                    images[i] = scene.draw(label)
                    advance(1)
            check_visible(images, empty, str(view))
            write_view(file, path, self._key, images, empty)
        return True


def _attributes(views: Sequence[View]) -> dict[str, list[Any]]:
    return {
        "class": [view.name.split()[0] for view in views],
        "scale": [view.scale for view in views],
        "azimuth": [float(np.degrees(view.azimuth)) for view in views],
        "elevation": [float(np.degrees(view.elevation)) for view in views],
    }
