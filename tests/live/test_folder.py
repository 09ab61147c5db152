"""The folder of a session: what may be in it."""

import pytest
from sessions import batch, make

from metaleader.live.journal import NAME
from metaleader.live.mark import MARK, Mark
from metaleader.live.session import Session


@pytest.mark.parametrize("other", ["config.json", "records.csv", "service.json"])
def test_a_folder_with_other_files_is_refused_and_left_as_it_was(other, tmp_path):
    (tmp_path / other).touch()
    with pytest.raises(ValueError, match=rf"holds no session \(it has {other}\); name a new or an empty folder"):
        Session(tmp_path, make)
    assert [path.name for path in tmp_path.iterdir()] == [other]


def test_a_folder_within_the_folder_is_refused(tmp_path):
    Session(tmp_path / "a", make).close()
    with pytest.raises(ValueError, match=r"holds no session \(it has a\)"):
        Session(tmp_path, make)


@pytest.mark.parametrize("left", [(), (".lock", f".{MARK}.abcdefgh.part"), (".lock", MARK), (".lock", MARK, NAME)])
def test_a_session_that_was_killed_when_it_was_created(left, tmp_path):
    for name in left:
        (tmp_path / name).touch()
    if MARK in left:
        Mark(tmp_path).create()
    with Session(tmp_path, make) as session:
        assert session.observe(*batch(0), task="a")


def test_an_empty_disk_and_a_session_with_other_files(tmp_path):
    """Files that were put beside those of a session do no harm."""
    (tmp_path / "lost+found").mkdir()
    Session(tmp_path, make).close()
    (tmp_path / "notes.txt").touch()
    with Session(tmp_path, make) as session:
        assert session.observe(*batch(0), task="a")
