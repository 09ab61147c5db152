"""The lock of a folder: one holder, whatever happens to its file."""

import errno
import fcntl
import os

import pytest

from metaleader.system.lock import FolderLock


def refused(folder):
    with pytest.raises(BlockingIOError):
        FolderLock(folder)


def test_one_holder(tmp_path):
    lock = FolderLock(tmp_path)
    refused(tmp_path)
    lock.check()
    lock.close()
    lock.close()
    FolderLock(tmp_path).close()


@pytest.mark.parametrize("again", [False, True])
def test_deleting_the_file_admits_nobody(again, tmp_path):
    lock = FolderLock(tmp_path)
    (tmp_path / ".lock").unlink()
    if again:
        (tmp_path / ".lock").touch()
    refused(tmp_path)
    lock.check()
    lock.close()
    FolderLock(tmp_path).close()


def test_a_release_that_locks_the_file_alone_is_respected(tmp_path):
    with open(tmp_path / ".lock", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused(tmp_path)
    FolderLock(tmp_path).close()


def test_a_file_that_was_made_anew_between_open_and_lock(tmp_path, monkeypatch):
    original, calls = fcntl.flock, []

    def late(handle, operation):
        calls.append(handle)
        if len(calls) == 2:
            (tmp_path / ".lock").unlink()
        original(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = FolderLock(tmp_path)
    assert len(calls) == 3
    with open(tmp_path / ".lock") as other, pytest.raises(BlockingIOError):
        original(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.close()


def test_where_folders_cannot_be_locked_a_deleted_file_is_noticed(tmp_path, monkeypatch):
    original = fcntl.flock

    def files_only(handle, operation):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EBADF, "Bad file descriptor")
        original(handle, operation)

    monkeypatch.setattr(fcntl, "flock", files_only)
    lock = FolderLock(tmp_path)
    refused(tmp_path)
    lock.check()
    (tmp_path / ".lock").unlink()
    with pytest.raises(OSError, match=r"\.lock was deleted, so another process may write"):
        lock.check()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_something_else_under_its_name(make, tmp_path):
    make(tmp_path / ".lock")
    with pytest.raises(OSError, match=r"\.lock is not a regular file; remove it"):
        FolderLock(tmp_path)
    (tmp_path / ".lock").rmdir() if (tmp_path / ".lock").is_dir() else (tmp_path / ".lock").unlink()
    FolderLock(tmp_path).close()
