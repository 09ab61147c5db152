"""Object pose: from one image, where an object stands on a table and which way it faces (the paper's third experiment).

A task is one object seen by one camera. Images are drawn by MuJoCo (the extra `pose`) once, and kept in a cache; a
stream whose cache is complete needs neither MuJoCo nor OpenGL.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from metaleader.streams.datasets.registry import Folder
from metaleader.streams.pose.cache import claim_view, read_view, write_view
from metaleader.streams.pose.camera import Camera, View, draw_labels, draw_view
from metaleader.streams.pose.objects import Objects, builtin_objects, pascal3d_objects
from metaleader.streams.pose.scene import SCENE_VERSION, Scene, check_visible, colour_of, view_camera
from metaleader.system.machine import cache_folder
from metaleader.tasks import Batch, Task, rng

# The tasks of the paper's stream.
BLOCK = 90


@dataclass(frozen=True)
class PoseStream:
    """A stream of objects on a table: x is images (N, 3, size, size), uint8, y poses (N, 4), float32.

    A pose is x and y in [-1, 1], uniform, and the sine and cosine of the azimuth, uniform too; all in the frame of the
    table, which a red dot at one corner shows. The 90 tasks are 50 objects seen by one or two cameras. A camera is as
    near as it can be with the table and every pose in its frame, so no image cuts the object.

    `stream[t]` draws the images when they are not in the cache; `prepare` draws all that are missing. Images that were
    read stay in memory. One OpenGL draws the same every time; another may differ in pixels at edges, and by at most a
    grey level in the mean of 16x16 pixels (MUJOCO_GL=osmesa always draws in software).

    Attributes:
        tasks: the number of tasks.
        images: datapoints of each task.
        train: how many of them are revealed; the others are the test set.
        size: width and height of the images; drawn at twice this size and averaged.
        objects: "builtin", which needs no data, or "pascal3d".
        order: "random", "class" (one class of objects after the other) or "scale" (from small to large).
        seed: `stream[t]` depends on it, on t and on what the images show; in random order not on the number of tasks.
        data: the folder with `pascal3d/`; METALEADER_DATA or the user's cache if None.
        cache: the folder to keep drawn images in, in a subfolder of their own; by default METALEADER_CACHE or
            ~/.cache/metaleader. A damaged file in it is drawn again, with a warning.
    """

    tasks: int = BLOCK
    images: int = 1000
    train: int = 400
    size: int = 64
    objects: Literal["builtin", "pascal3d"] = "builtin"
    order: Literal["random", "class", "scale"] = "random"
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
        for name, options in (("objects", ("builtin", "pascal3d")), ("order", ("random", "class", "scale"))):
            if getattr(self, name) not in options:
                raise ValueError(f"{name} must be one of {', '.join(options)}, got {getattr(self, name)!r}")
        _ = self.folder  # missing data is noticed here

    def __len__(self) -> int:
        return self.tasks

    def __getitem__(self, t: int) -> Task:
        view = self.views[self._check(t)]
        x = torch.from_numpy(self._images(view))
        y = torch.from_numpy(self._labels(view))
        return Task(str(view), Batch(x[: self.train], y[: self.train]), Batch(x[self.train :], y[self.train :]))

    def camera(self, t: int) -> Camera:
        """The camera of a task, to draw poses into its images: see `Camera.arrows`."""
        view = self.views[self._check(t)]
        return view_camera(view, self._collection.load(view.name))

    def prepare(self) -> None:
        """Draw every task that is not in the cache, with a progress bar; other processes may do so at the same time."""
        self._draw([view for view in self.views if not self._path(view).exists()])

    @cached_property
    def views(self) -> tuple[View, ...]:
        """The views in the order of the stream."""
        names = self._collection.names
        objects = rng("pose objects", self.seed).permutation(len(names))
        # Every 90 rounds have a permutation of their own, so the first tasks do not depend on how many follow.
        blocks = range(-(-self.tasks // BLOCK))
        order = np.concatenate([BLOCK * b + rng("pose order", self.seed, b).permutation(BLOCK) for b in blocks])
        views = []
        for i in order[: self.tasks].tolist():
            index = int(objects[i % len(names)])
            views.append(draw_view(self.seed, names[index], index, i // len(names)))
        if self.order == "class":
            classes = [name.split()[0] for name in names]
            views.sort(key=lambda view: classes.index(view.name.split()[0]))
        elif self.order == "scale":
            views.sort(key=lambda view: view.scale)
        return tuple(views)

    @cached_property
    def folder(self) -> Path:
        """Where the images of this stream are kept: named after all that determines them."""
        return Path(self.cache or cache_folder()) / f"pose-{self._key}"

    @cached_property
    def _collection(self) -> Objects:
        if self.objects == "builtin":
            return builtin_objects()
        return pascal3d_objects(self.data)

    @cached_property
    def _key(self) -> str:
        parts = {"scene": SCENE_VERSION, "objects": self._collection.digest}
        parts |= {"seed": self.seed, "images": self.images, "size": self.size}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def _loaded(self) -> dict[View, np.ndarray]:
        return {}

    def _check(self, t: int) -> int:
        if not 0 <= t < self.tasks:
            raise IndexError(f"round {t} of a stream of {self.tasks} tasks")
        return t

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
            # First what no other process is at, then wait for what is left.
            for wait in (False, True):
                views = [view for view in views if not self._draw_view(view, wait, lambda num: bar.advance(job, num))]

    def _draw_view(self, view: View, wait: bool, advance: Callable[[int], None]) -> bool:
        """Bring a view into the cache; false when another process is at it and we do not wait."""
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
