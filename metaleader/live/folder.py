"""The folder of a session: what it may hold when it is opened, and the room on its disk."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from metaleader.live import checkpoints
from metaleader.live.journal import NAME
from metaleader.live.mark import MARK


def check_folder(folder: Path) -> None:
    """Reject a folder with other files than those of a session.

    Hidden files are ignored: a session that was killed when it was created may have left a lock and a part of a file.

    Raises:
        ValueError: with the name of one of the files.
    """
    if not folder.is_dir() or (folder / NAME).exists() or (folder / MARK).exists() or checkpoints.paths(folder):
        return
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    others = [name for name in others if name != "lost+found"]  # of a disk of its own
    if others:
        raise ValueError(
            f"{folder} is not empty and holds no session (it has {others[0]}); name a new or an empty folder, or that"
            " of a session"
        )


def check_new(folder: Path) -> None:
    """Reject a folder for a backup that exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists; name a new folder for the backup")


def check_room(folder: Path, needed: int, call: str) -> None:
    """Raise an OSError if the disk of a folder has fewer free bytes than a call needs."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{call} needs {needed} bytes on the disk of {folder}, {free} are free; free some")
