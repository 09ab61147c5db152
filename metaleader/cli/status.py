"""`metaleader status`: the state of a folder of `ml.Session`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

from metaleader.live.status import read_status

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]


def status(folder: Folder, *, json_: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """Print the state of a folder of ml.Session, also while it is in use.

    Args:
        folder: the folder of the session.
        json_: print one line of JSON.
    """
    state = read_status(folder)
    if json_:
        print(json.dumps(state))
        return
    width = max(map(len, state))
    for name, value in state.items():
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        print(f"{name.replace('_', ' '):<{width}}  {'no' if value is False else 'yes' if value is True else text}")
