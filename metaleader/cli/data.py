"""`metaleader data`: list the data sets, and download them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from metaleader.streams.datasets.registry import DATA_SETS, data_folder, fetch, how_to_get, status

Folder = Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]


def data(
    action: tyro.conf.Positional[Literal["list", "fetch"]] = "list",
    name: Annotated[
        Literal["mnist", "cifar100"] | None,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[mnist|cifar100]", help_behavior_hint=""),
    ] = None,
    *,
    data: Folder = None,
) -> int:
    """List the data sets with their folders and states, or fetch one.

    Verified: the SHA-256 of every file is the expected one. Present: it differs, or none is known.

    Args:
        action: list all data sets, or fetch one from its canonical source; an interrupted download is resumed.
        name: the data set to fetch: mnist (12 MB) or cifar100 (169 MB).
        data: the data folder; METALEADER_DATA or a folder in your cache if not given.

    Returns:
        The exit status: 1 if a data set is damaged.
    """
    if action == "list":
        if name is not None:
            raise ValueError(f"did you mean `metaleader data fetch {name}`? `metaleader data` lists all data sets")
        return _list(data)
    if name is None:
        fetchable = " or ".join(key for key, data_set in DATA_SETS.items() if data_set.files)
        raise ValueError(f"say which data set to fetch: {fetchable}")
    _fetch(name, data)
    return 0


def _list(folder: Path | None) -> int:
    # Plain prints: rich would wrap paths.
    print(f"data sets in {data_folder(folder)}")
    states = {name: status(name, folder) for name in DATA_SETS}
    for name, data_set in states.items():
        print(f"  {name:<10}{data_set.state:<10}{data_set.folder}: {data_set.detail}")
    for name, data_set in states.items():
        if data_set.state in ("missing", "damaged"):
            print(f"{name}: {how_to_get(name)}; without it, use {DATA_SETS[name].offline}")
    return int(any(data_set.state == "damaged" for data_set in states.values()))


def _fetch(name: str, folder: Path | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        bars: dict[str, TaskID] = {}

        def progress(file: str, received: int, total: int) -> None:
            if file not in bars:
                bars[file] = bar.add_task(file, total=total)
            bar.update(bars[file], completed=received)

        path = fetch(name, folder, progress)
    print(f"{name} is in {path}, verified")
