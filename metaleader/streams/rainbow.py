"""Rainbow digits: digit recognition with a different background colour, size and rotation per task (section 6.1).

7 colours x 2 sizes x 4 rotations give 56 tasks. An image is the white digit blended linearly over a solid colour. A
half-size digit is the centred mean over blocks of 2x2 pixels. Pixels are computed in integers, so they are the same on
every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from metaleader.streams.base import BaseStream
from metaleader.streams.datasets.mnist import read_mnist
from metaleader.streams.datasets.registry import Folder
from metaleader.streams.nway import Labelled
from metaleader.streams.order import arrange
from metaleader.tasks import Batch, Task, rng

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "orange": (247, 127, 0),
    "yellow": (230, 188, 10),
    "green": (44, 150, 75),
    "blue": (30, 125, 214),
    "indigo": (60, 40, 130),
    "violet": (170, 75, 190),
}


class Look(NamedTuple):
    """The transformation of a task: the colour's name, whether the digit has half size, and left quarter turns."""

    colour: str
    half: bool
    turns: int

    def __str__(self) -> str:
        return f"{self.colour}, {'half' if self.half else 'full'} size, {90 * self.turns}°"


# The order of attributes that are text
_CATEGORIES = {"colour": tuple(COLOURS), "scale": ("full", "half")}
LOOKS = [Look(*options) for options in itertools.product(COLOURS, (False, True), range(4))]


class RainbowStream(BaseStream):
    """A stream of up to 56 tasks over grey digit images; images are uint8 (N, 3, H, H), labels int64.

    The training sets of consecutive tasks are disjoint until the images run out; then all images are reshuffled and
    used again. Test images are transformed held-out digits.

    Args:
        digits: square grey images of even size, uint8 (N, H, H), bright on black, and their labels.
        tasks: the number of tasks; a smaller number selects the first tasks of the order.
        train: the number of training datapoints per task.
        test: the number of held-out datapoints per task.
        order: "random"; grouped by "colour", "scale" or "rotation" and random within a group; or one of the other
            orders of `reorder`.
        seed: `stream[t]` depends only on the seed and t.
    """

    def __init__(
        self,
        digits: Labelled,
        tasks: int = len(LOOKS),
        train: int = 900,
        test: int = 500,
        order: str = "random",
        seed: int = 0,
    ) -> None:
        for images, labels in (digits[:2], digits[2:]):
            if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1] != images.shape[2]:
                raise ValueError(
                    f"images must be grey, square and uint8, (N, H, H), got {images.dtype} {images.shape}; pad them to"
                    " squares, and multiply values in [0, 1] by 255"
                )
            if images.shape[1] % 2 or images.shape[1:] != digits.x.shape[1:]:
                raise ValueError(
                    f"images must all have the same even size, got {images.shape[1:]} and {digits.x.shape[1:]}; pad"
                    " odd sizes by a row and a column"
                )
            if labels.shape != images.shape[:1]:
                raise ValueError(f"there are labels {labels.shape} for {len(images)} images; give one per image")
            if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0:
                raise ValueError(f"labels must be integers from 0, got {labels.dtype} from {labels.min(initial=0)}")
        for name, value, most in (
            ("tasks", tasks, len(LOOKS)),
            ("train", train, len(digits.x)),
            ("test", test, len(digits.test_x)),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"{name} must lie in 1..{most}, got {value}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.digits, self.tasks, self.train, self.test, self.seed = digits, tasks, train, test, seed
        shuffled = [LOOKS[i] for i in rng("rainbow order", seed).permutation(len(LOOKS))]
        if order != "random":
            permutation = arrange(order, _attributes(shuffled), seed, others=("random",), categories=_CATEGORIES)
            shuffled = [shuffled[i] for i in permutation]
        self.looks = shuffled[:tasks]

    def __len__(self) -> int:
        return self.tasks

    @property
    def attributes(self) -> Mapping[str, Sequence[Any]]:
        """The colours, scales and rotations of the tasks."""
        return _attributes(self.looks)

    def task(self, t: int) -> Task:
        """The task of round t."""
        per_pass = len(self.digits.x) // self.train
        shuffled = rng("rainbow train", self.seed, t // per_pass).permutation(len(self.digits.x))
        train = shuffled[t % per_pass * self.train :][: self.train]
        test = rng("rainbow test", self.seed, t).permutation(len(self.digits.test_x))[: self.test]
        look = self.looks[t]
        return Task(
            str(look),
            _batch(self.digits.x[train], self.digits.labels[train], look),
            _batch(self.digits.test_x[test], self.digits.test_labels[test], look),
        )


def rainbow(
    images: Any,
    labels: Any,
    test_images: Any = None,
    test_labels: Any = None,
    *,
    tasks: int = len(LOOKS),
    train: int | None = None,
    test: int | None = None,
    held_out: float = 0.2,
    order: str = "random",
    seed: int = 0,
) -> RainbowStream:
    """Return a rainbow stream over any grey images, such as those of Fashion-MNIST.

    Args:
        images: square images of even size, bright on black, uint8 (N, H, H), an array or a tensor.
        labels: integers from 0, (N,).
        test_images: held-out images; if None, a fraction `held_out` of the images, the same for every seed.
        test_labels: their labels.
        tasks: the number of tasks, at most 56.
        train: the number of training datapoints per task; if None, as many as allow disjoint training sets for 56
            tasks, at most 900.
        test: the number of held-out datapoints per task; if None, all, at most 500.
        held_out: the fraction of images to hold out if there are no test images.
        order: as in `RainbowStream`.
        seed: `stream[t]` depends only on the seed and t.

    >>> images, labels = np.full((280, 8, 8), 255, np.uint8), np.arange(280) % 3
    >>> stream = rainbow(images, labels)
    >>> len(stream), stream[0].train.x.shape, stream[0].test.x.shape
    (56, torch.Size([4, 3, 8, 8]), torch.Size([56, 3, 8, 8]))
    """
    if (test_images is None) != (test_labels is None):
        raise ValueError("give both test_images and test_labels, or neither")
    images, labels = np.asarray(images), np.asarray(labels)
    if test_images is None:
        if not 0 < held_out < 1 or len(images) < 2:
            raise ValueError(
                f"held_out must lie between 0 and 1, of two or more images; got {held_out} of {len(images)}"
            )
        if len(labels) != len(images):
            raise ValueError(f"there are {len(labels)} labels for {len(images)} images; give one per image")
        size = min(max(1, round(held_out * len(images))), len(images) - 1)
        tests, trains = np.split(rng("rainbow held out").permutation(len(images)), [size])
        digits = Labelled(images[trains], labels[trains], images[tests], labels[tests])
    else:
        digits = Labelled(images, labels, np.asarray(test_images), np.asarray(test_labels))
    train = min(900, max(1, len(digits.x) // len(LOOKS))) if train is None else train
    return RainbowStream(digits, tasks, train, min(500, len(digits.test_x)) if test is None else test, order, seed)


def rainbow_mnist(
    data: Folder = None,
    tasks: int = len(LOOKS),
    train: int = 900,
    test: int = 500,
    order: str = "random",
    seed: int = 0,
) -> RainbowStream:
    """Return the paper's Rainbow MNIST: 28x28 images, with test images from MNIST's test set."""
    return RainbowStream(read_mnist(data), tasks, train, test, order, seed)


def rainbow_digits(
    tasks: int = len(LOOKS), train: int = 60, test: int = 300, order: str = "random", seed: int = 0
) -> RainbowStream:
    """Return a rainbow stream over scikit-learn's bundled handwritten digits at 16x16, which needs no download.

    300 of the 1,797 images are held out, the same for every seed. Each of the others occurs in two or three tasks.
    """
    return RainbowStream(bundled_digits(), tasks, train, test, order, seed)


def bundled_digits() -> Labelled:
    """Return scikit-learn's 8x8 digits, enlarged to 16x16: 1,497 for training and 300 held out."""
    from sklearn.datasets import load_digits  # a slow import: half a second

    flat, labels = (np.asarray(array) for array in load_digits(return_X_y=True))
    sixteenths, labels = flat.reshape(-1, 8, 8).astype(np.int64), labels.astype(np.uint8)
    doubled = _doubled(_doubled(sixteenths, 1), 2)  # values up to 16 x 4 x 4
    images = ((doubled * 255 + 128) // 256).astype(np.uint8)
    held_out, kept = np.split(rng("digits held out").permutation(len(images)), [300])
    return Labelled(images[kept], labels[kept], images[held_out], labels[held_out])


def paint(images: np.ndarray, look: Look) -> np.ndarray:
    """Apply a task's transformation to grey images (N, H, H); the result is (N, 3, H, H)."""
    grey = images.astype(np.uint16)
    if look.half:
        quarter = images.shape[1] // 4
        small = (grey[:, ::2, ::2] + grey[:, 1::2, ::2] + grey[:, ::2, 1::2] + grey[:, 1::2, 1::2] + 2) // 4
        grey = np.zeros_like(grey)
        grey[:, quarter : quarter + small.shape[1], quarter : quarter + small.shape[2]] = small
    grey = np.rot90(grey, look.turns, axes=(1, 2))[:, None]
    colour = np.asarray(COLOURS[look.colour], dtype=np.uint16)[None, :, None, None]
    return ((grey * 255 + (255 - grey) * colour + 127) // 255).astype(np.uint8)


def _attributes(looks: Sequence[Look]) -> dict[str, list[Any]]:
    return {
        "colour": [look.colour for look in looks],
        "scale": ["half" if look.half else "full" for look in looks],
        "rotation": [90 * look.turns for look in looks],
    }


def _batch(images: np.ndarray, labels: np.ndarray, look: Look) -> Batch:
    return Batch(torch.from_numpy(paint(images, look)), torch.from_numpy(labels.astype(np.int64)))


def _doubled(images: np.ndarray, axis: int) -> np.ndarray:
    """Double the resolution along an axis by linear interpolation with repeated edges; values are multiplied by 4."""
    last = images.shape[axis] - 1
    index = np.arange(last + 1)
    before = images.take(np.maximum(index - 1, 0), axis) + 3 * images
    after = images.take(np.minimum(index + 1, last), axis) + 3 * images
    return np.stack([before, after], axis + 1).reshape(
        [n * (2 if i == axis else 1) for i, n in enumerate(images.shape)]
    )
