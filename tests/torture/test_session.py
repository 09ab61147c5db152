"""A session on a disk that fails: errors that say what to do, and a folder that can be opened again."""

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sessions

from metaleader.live.session import Session


def test_a_session_whose_first_files_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            Session(tmp_path / "session", sessions.make)
    with Session(tmp_path / "session", sessions.make, updates="inline") as session:
        assert session.observe(*sessions.batch(0), task="a", key="event")


def test_errors_of_the_database_are_errors_of_files(tmp_path: Path) -> None:
    def fails() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with (
        Session(tmp_path / "session", sessions.make) as session,
        pytest.raises(OSError, match=r"disk I/O error.*open the folder again"),
    ):
        session._writer.run(fails)
