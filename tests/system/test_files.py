"""Atomic writes: the old file or the new, and no partial files left behind."""

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metaleader.system import files as store
from metaleader.system.files import make_folder, write_atomic


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_alone(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "a"
    write_atomic(path, b"old")

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(store.os, step, fail)
    with pytest.raises(type(error)):
        write_atomic(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_content_is_whole_before_it_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, replace, seen = tmp_path / "a", os.replace, []

    def watched(source: str, target: Path) -> None:
        seen.append(Path(source).read_bytes())
        assert Path(source).parent == Path(target).parent
        replace(source, target)

    monkeypatch.setattr(store.os, "replace", watched)
    write_atomic(path, b"x" * 100_000)
    assert seen == [b"x" * 100_000] == [path.read_bytes()]


def test_the_file_has_ordinary_permissions(tmp_path: Path):
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    write_atomic(tmp_path / "a", b"")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path: Path):
    (tmp_path / "shared").mkdir()
    target, link = tmp_path / "shared" / "real", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert [path.name for path in target.parent.iterdir()] == ["real"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_files_are_replaced(make: Any, tmp_path: Path):
    """As root, a rename would replace a device too."""
    path = tmp_path / "there"
    make(path)
    with pytest.raises(OSError, match=r"cannot write .*there: it is (a folder|not a regular file); name a file"):
        write_atomic(path, b"")
    assert not path.is_file()


def test_a_link_to_nowhere(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "a")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere; make it first"):
        write_atomic(tmp_path / "link", b"")


def test_an_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*/a \(No space left on device\); .* free some space") as found:
        write_atomic(tmp_path / "a", b"new")
    assert found.value.errno == 28
    assert not list(tmp_path.iterdir())


# Partial files.


def dead(folder: Path, name: str) -> Path:
    """The partial file of a process that was killed while it wrote."""
    code = f"""
import os, signal
from metaleader.system import files
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
files.write_atomic({str(folder / name)!r}, b"x" * 1000)
"""
    before = set(folder.iterdir())
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (path,) = set(folder.iterdir()) - before
    return path


def test_the_next_write_removes_what_a_killed_process_left(tmp_path: Path):
    stale = dead(tmp_path, "a")
    kept = [
        tmp_path / name for name in (".a.part", ".a.12345678.par", ".ab.12345678.part", ".a.b.12345678.part", "a.part")
    ]
    for path in kept:
        path.write_bytes(b"")
    (tmp_path / ".a.fifo_fil.part").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / ".a.fifofile.part")
    write_atomic(tmp_path / "a", b"new")
    assert not stale.exists()
    assert all(path.exists() for path in kept)
    assert len(list(tmp_path.iterdir())) == len(kept) + 3


def test_a_file_that_another_process_is_writing_is_left_alone(tmp_path: Path):
    with open(tmp_path / ".a.12345678.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        write_atomic(tmp_path / "a", b"new")
        assert (tmp_path / ".a.12345678.part").exists()
    write_atomic(tmp_path / "a", b"newer")
    assert not (tmp_path / ".a.12345678.part").exists()


def test_two_writers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A second writer that comes between any two steps of the first removes nothing of it."""
    steps = []

    def second(name: str, call: Any):
        def wrapped(*arguments: Any, **options: Any):
            if name not in steps:
                steps.append(name)
                write_atomic(tmp_path / "a", b"second")
            return call(*arguments, **options)

        return wrapped

    for module, name in ((fcntl, "flock"), (os, "fstat"), (os, "fsync"), (os, "chmod"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, second(name, getattr(module, name)))
            write_atomic(tmp_path / "a", b"first")
        assert (tmp_path / "a").read_bytes() == b"first"
        assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    (tmp_path / ".a.12345678.part").write_bytes(b"")
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / ".a.12345678.part").exists()


def test_every_new_folder_is_synced_in_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced = []
    monkeypatch.setattr(store, "sync_folder", synced.append)
    make_folder(tmp_path / "a" / "b" / "c")
    make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert (tmp_path / "a" / "b" / "c").is_dir()
