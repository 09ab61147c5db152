"""`metaleader show`: a contact sheet of a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def show(
    stream: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STREAM")] = "rainbow-digits",
    *,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    tasks: int = 8,
    examples: int = 10,
    order: Annotated[str | None, tyro.conf.arg(metavar="ORDER")] = None,
    seed: int = 0,
    data: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
) -> int:
    """Draw a contact sheet of a stream: tasks in rows, examples with their labels, as PNG.

    Args:
        stream: rainbow-digits, rainbow-mnist, cifar100 or sinusoid.
        out: where to write the sheet; STREAM.png in this folder if not given.
        tasks: how many tasks, spread evenly over the stream.
        examples: how many training examples of each.
        order: the order of the tasks, such as colour (rainbow), superclass (cifar100) or amplitude (sinusoid).
        seed: of the stream.
        data: the folder with the data sets; METALEADER_DATA, or a folder in your cache, if not given.

    Returns:
        The exit status.
    """
    from metaleader.sheet import contact_sheet
    from metaleader.streams import make_stream

    options = {} if order is None else {"order": order}
    made = make_stream(stream, seed, data, **options)
    path = out or Path(f"{stream}.png")
    title = f"{stream}, {len(made)} tasks" + (f", by {order}" if order not in (None, "random") else "")
    contact_sheet(made, path, tasks, examples, title)
    print(path)
    return 0
