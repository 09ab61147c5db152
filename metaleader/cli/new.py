"""`metaleader new`: write an experiment file to start from."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path
from typing import Annotated

import tyro

from metaleader.system.files import write_atomic


def new(folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]) -> None:
    """Write a commented experiment into a folder; it runs as it is, within a minute on two cores.

    Args:
        folder: created if it does not exist; a file that exists is not overwritten.
    """
    path = folder / "experiment.py"
    if path.exists():
        raise ValueError(f"{path} exists already; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot create {folder}: {error.strerror}; choose another folder") from error
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"cannot write into {folder}; choose another folder")
    write_atomic(path, importlib.resources.files("metaleader.cli").joinpath("starter.py").read_bytes())
    print(f"run it with: metaleader run {path} --out {folder / 'run'}")
    print(path)
