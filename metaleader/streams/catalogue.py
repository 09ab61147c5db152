"""Streams by name, for the command line and experiments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from metaleader.streams.base import BaseStream
from metaleader.streams.datasets.cifar import cifar100
from metaleader.streams.datasets.registry import Folder
from metaleader.streams.pose.stream import PoseStream
from metaleader.streams.rainbow import rainbow_digits, rainbow_mnist
from metaleader.streams.sinusoid import SinusoidStream
from metaleader.system.builders import unknown


def pose(data: Folder = None, **options: Any) -> PoseStream:
    """Return the pose stream: over PASCAL3D+ in the folder `data`, or over the built-in objects if `data` is None.

    METALEADER_DATA does not influence this choice, so the same call gives the same images on every machine. The option
    `objects` of `PoseStream` overrides it.
    """
    return PoseStream(**{"objects": "builtin" if data is None else "pascal3d", "data": data, **options})


# Each function is called with the data folder and the options of the stream, including `seed`.
STREAMS: dict[str, Callable[..., BaseStream]] = {
    "rainbow-digits": lambda data, **options: rainbow_digits(**options),
    "rainbow-mnist": rainbow_mnist,
    "cifar100": cifar100,
    "pose": pose,
    "sinusoid": lambda data, **options: SinusoidStream(**options),
}


# The functions and classes that take the options.
_MAKERS: dict[str, Callable[..., BaseStream]] = {
    "rainbow-digits": rainbow_digits,
    "rainbow-mnist": rainbow_mnist,
    "cifar100": cifar100,
    "pose": PoseStream,
    "sinusoid": SinusoidStream,
}


def make_stream(name: str, seed: int = 0, data: Folder = None, **options: Any) -> BaseStream:
    """Return the stream of a name.

    Args:
        name: one of `STREAMS`.
        seed: the seed of the stream.
        data: the folder with the data sets; METALEADER_DATA or the user's cache if None. For pose, a folder selects the
            objects of PASCAL3D+.
        options: options of the stream, such as `order`.

    Raises:
        ValueError: if the name or an option is unknown; the message suggests the nearest one.
        FileNotFoundError: if data is missing; the message says how to get it, and which stream needs none.

    >>> make_stream("rainbow-digits", order="colour")[0].name
    'red, full size, 270°'
    """
    if name not in STREAMS:
        close = difflib.get_close_matches(name.lower(), STREAMS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? The names are" if close else "the names are"
        raise ValueError(f"unknown stream {name!r}; {hint} {', '.join(STREAMS)}")
    valid = [option for option in inspect.signature(_MAKERS[name]).parameters if option not in ("seed", "data")]
    for option in options:
        if option not in valid:
            raise ValueError(unknown(f"option of the stream {name}", option, valid))
    return STREAMS[name](data, seed=seed, **options)
