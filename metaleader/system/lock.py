"""An exclusive lock of a folder, between processes and between objects of one process."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

# What file systems answer that cannot lock a folder, such as NFS
_NO_FOLDER_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_ATTEMPTS = 100


class FolderLock:
    """The lock of a folder, held until `close` or the end of the process.

    The folder itself is locked: a file of that purpose could be deleted, and a second writer could then lock a new one.
    A file named `.lock` in it is locked too, for earlier releases and for file systems that cannot lock folders.

    Args:
        folder: an existing folder.

    Raises:
        BlockingIOError: if it is locked.
        OSError: if the lock file cannot be opened, or is not a regular file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"
        self._folder: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._file: int | None = None
        try:
            self._lock_folder()
            self._lock_file()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        handles, self._folder, self._file = (self._folder, self._file), None, None
        for handle in handles:
            if handle is not None:
                os.close(handle)

    def check(self) -> None:
        """Raise an OSError if another process may hold the lock by now.

        That is possible only where folders cannot be locked, after the lock file was deleted.
        """
        if self._folder is None and (self._file is None or not _is_at(self._file, self._path)):
            raise OSError(
                f"{self._path} was deleted, so another process may write into the folder; stop all, then resume"
            )

    def _lock_folder(self) -> None:
        assert self._folder is not None
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in _NO_FOLDER_LOCKS:
                raise
            os.close(self._folder)
            self._folder = None

    def _lock_file(self) -> None:
        for _ in range(_ATTEMPTS):
            # Without O_NONBLOCK, opening a FIFO would wait for a second process.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            try:
                self._file = os.open(self._path, flags, 0o666)
                regular = stat.S_ISREG(os.fstat(self._file).st_mode)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                    raise
                regular = False
            if not regular:
                raise OSError(errno.EINVAL, f"{self._path} is not a regular file; remove it")
            assert self._file is not None
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and lock, the file may have been deleted and made anew.
            if _is_at(self._file, self._path):
                return
            os.close(self._file)
            self._file = None
        raise BlockingIOError(errno.EAGAIN, f"{self._path} changes all the time")


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
