"""`metaleader status`: the state of a folder of `ml.Session`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from metaleader.live.serve.history import NAME, History
from metaleader.live.status import read_status

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]


def status(folder: Folder, *, json_: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """Print the state of a folder of ml.Session, also while it is in use.

    Args:
        folder: the folder of the session.
        json_: print one line of JSON.
    """
    state = read_status(folder)
    if (folder / NAME).is_file():
        blocks = History(folder).curves()["observations"]
        _, state["loss"], state["loss_unadapted"], _ = blocks[-1] if blocks else (None,) * 4
    if json_:
        print(json.dumps(state))
        return
    aside = state["set_aside"]
    state["set_aside"] = len(aside)
    width = max(map(len, state))
    for name, value in state.items():
        print(f"{name.replace('_', ' '):<{width}}  {_text(value)}")
    for task, reason in aside.items():
        print(f"set aside: {task}: {reason}")


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else value
