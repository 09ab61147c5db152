"""`metaleader show`: a contact sheet of a stream."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import tyro


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
) -> int:
    """Draw a contact sheet of a stream: tasks in rows, examples with their labels, as PNG.

    A pose is drawn into its image: an arrow from where the object stands to where its front points.

    Args:
        stream: rainbow-digits (if not given), rainbow-mnist, cifar100, pose or sinusoid.
        out: where to write the sheet; STREAM.png in this folder if not given.
        tasks: how many tasks, spread evenly over the stream.
        examples: how many training examples of each.
        order: random if not given; rainbow: colour, scale, rotation; cifar100: given, superclass; pose: class, scale; sinusoid: amplitude.
        seed: of the stream.
        data: the data folder; METALEADER_DATA or a folder in your cache if not given. With pose: draw the PASCAL3D+ objects in it, not the built-in ones.

    Returns:
        The exit status.
    """  # noqa: E501 (a line break would show in the help)
    from metaleader.report.sheet import HELD_OUT, contact_sheet
    from metaleader.streams import PoseStream, make_stream
    from metaleader.system.files import check_target

    options: dict[str, Any] = {} if order is None else {"order": order}
    path = out or Path(f"{stream}.png")
    check_target(path)
    with tempfile.TemporaryDirectory() as folder:
        if stream == "pose":
            # A short stream of its own, drawn now: the same objects, cameras and first images.
            train = max(examples, 1)
            options |= {"images": train + HELD_OUT, "train": train, "cache": Path(folder)}
        made = make_stream(stream, seed, data, **options)
        title = f"{stream}, {len(made)} tasks" + (f", by {order}" if order not in (None, "random") else "")
        if isinstance(made, PoseStream):
            title += ", built-in objects" if made.objects == "builtin" else ", objects of PASCAL3D+"
        print(title, file=sys.stderr)
        contact_sheet(made, path, tasks, examples, title)
    print(path)
    return 0
