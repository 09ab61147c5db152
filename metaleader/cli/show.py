"""`metaleader show`: draw a contact sheet of a stream."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import tyro

from metaleader.report.sheet import HELD_OUT, contact_sheet
from metaleader.streams import PoseStream, make_stream
from metaleader.system.files import check_target


def show(
    stream: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="[STREAM]", help_behavior_hint="")
    ] = "rainbow-digits",
    *,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    tasks: int = 8,
    examples: int = 10,
    order: Annotated[str | None, tyro.conf.arg(metavar="ORDER", help_behavior_hint="")] = None,
    seed: int = 0,
    data: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None,
) -> None:
    """Draw a contact sheet of a stream as PNG: one row per task, examples with their labels.

    A pose is drawn as an arrow from the position of the object to where its front points.

    Args:
        stream: rainbow-digits (if not given), rainbow-mnist, cifar100, pose or sinusoid.
        out: the file to write; STREAM.png in the current folder if not given.
        tasks: number of tasks, evenly spaced over the stream.
        examples: number of training examples per task.
        order: random if not given; by an attribute: rainbow: colour, scale, rotation; cifar100: given, superclass; pose: class, scale, azimuth, elevation; sinusoid: amplitude, phase; or similar, drifting, recurring.
        seed: the seed of the stream.
        data: the data folder; METALEADER_DATA or a folder in your cache if not given. With pose: draw the PASCAL3D+ objects in it instead of the built-in ones.
    """  # noqa: E501 (the help would show line breaks)
    options: dict[str, Any] = {} if order is None else {"order": order}
    path = out or Path(f"{stream}.png")
    check_target(path)
    with tempfile.TemporaryDirectory() as folder:
        if stream == "pose":
            # A shorter stream with the same objects, cameras and first images.
            train = max(examples, 1)
            options |= {"images": train + HELD_OUT, "train": train, "cache": Path(folder)}
        stream_shown = make_stream(stream, seed, data, **options)
        title = f"{stream}, {len(stream_shown)} tasks" + (f", by {order}" if order not in (None, "random") else "")
        if isinstance(stream_shown, PoseStream):
            title += ", built-in objects" if stream_shown.objects == "builtin" else ", objects of PASCAL3D+"
        print(title, file=sys.stderr)
        contact_sheet(stream_shown, path, tasks, examples, title)
    print(path)
