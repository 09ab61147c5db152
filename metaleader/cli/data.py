"""`metaleader data`: what data sets are here, and fetching those that are not."""

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
    """List the data sets: where each is looked for, whether it is there and verified. Or fetch one.

    Verified: the SHA-256 of every file is the known one. Present: there is none to compare with, or it is another.

    Args:
        action: list all data sets, or fetch one from its canonical source; a broken-off download is resumed.
        name: the data set to fetch: mnist (12 MB) or cifar100 (169 MB).
        data: the data folder; METALEADER_DATA or a folder in your cache if not given.

    Returns:
        The exit status: 1 when a data set is damaged.
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
    found = {name: status(name, folder) for name in DATA_SETS}
    for name, here in found.items():
        print(f"  {name:<10}{here.state:<10}{here.folder}: {here.detail}")
    for name, here in found.items():
        if here.state in ("missing", "damaged"):
            print(f"{name}: {how_to_get(name)}; without it, use {DATA_SETS[name].offline}")
    return int(any(here.state == "damaged" for here in found.values()))


def _fetch(name: str, folder: Path | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown: dict[str, TaskID] = {}

        def progress(file: str, here: int, total: int) -> None:
            if file not in shown:
                shown[file] = bar.add_task(file, total=total)
            bar.update(shown[file], completed=here)

        where = fetch(name, folder, progress)
    print(f"{name} is in {where}, verified")
