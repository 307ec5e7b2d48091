"""Locks on files, on local disks and in object storage."""

import contextlib
import fcntl
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from smallgpt_jax.errors import LockHeldError, LockLostError
from smallgpt_jax.output import print_error
from smallgpt_jax.storage.object_lock import object_lock
from smallgpt_jax.storage.object_storage import is_remote

QUIET_SECONDS = 2.0  # a wait that takes longer is reported


class _LocalLock:
    """A lock on the open `file`, which was at `path` when it was locked."""

    def __init__(self, path: Path, file: IO[str]):
        self.path = path
        self._file = file
        # unique, so that a lock of another process is not taken for this one
        self._content = f"process {os.getpid()} on {socket.gethostname()}\n{uuid.uuid4().hex}\n"

    def write_holder(self) -> None:
        self._file.truncate(0)
        self._file.write(self._content)
        self._file.flush()  # others read the holder while this process has the file open

    def is_at_path(self) -> bool:
        """Whether no other file has taken the place of the locked one."""
        try:
            if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                return True
            return self.path.read_text("utf-8") == self._content  # some file systems renumber files
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # cannot be seen at the moment; the write will show the error
            return True

    def release(self) -> None:
        # Removed before it is closed, which unlocks it: another process may lock it at once.
        if self.is_at_path():
            self.path.unlink(missing_ok=True)
        self._file.close()


_held: list[_LocalLock] = []  # of this process


@contextlib.contextmanager
def file_lock(path: Path, wait: bool = False) -> Iterator[bool]:
    """Holds an exclusive lock on the file at `path`, and removes the file on exit. Yields whether
    the file system has locks.

    If another process holds the lock, waits for it (`wait=True`) or raises LockHeldError
    (`wait=False`). The operating system releases the lock when this process ends. On file systems
    without locks, no lock is held. For a path in object storage, see `object_lock`.
    """
    if is_remote(path):
        with object_lock(path, wait):
            yield True
        return
    lock, is_locked = _acquire(path.absolute(), wait)
    # Without locks, a missing file is no sign of another process; see `require_locks`.
    if is_locked:
        _held.append(lock)
    try:
        lock.write_holder()
        yield is_locked
    finally:
        if is_locked:
            _held.remove(lock)
        lock.release()


def _acquire(path: Path, wait: bool) -> tuple[_LocalLock, bool]:
    """Returns the lock, and whether the file system has locks."""
    while True:
        file = open(path, "a+", encoding="utf-8", opener=_open_without_links)  # noqa: SIM115
        lock = _LocalLock(path, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.readline(200).strip() or "another process"
            if not wait:
                raise LockHeldError(holder) from None
            _wait_for(file, f"{path}: locked by {holder}; waiting until it releases the lock")
        except OSError:
            return lock, False
        # The previous holder may have removed the file, and another process may have created a new
        # one. A lock on the old file is then useless, so try again.
        if lock.is_at_path():
            return lock, True
        file.close()


def _wait_for(file: IO[str], message: str) -> None:
    timer = threading.Timer(QUIET_SECONDS, print_error, [message])
    timer.start()
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    finally:
        timer.cancel()


def require_locks(path: Path) -> None:
    """Raises LockLostError if `path` is below a lock that this process holds, but whose file is no
    longer at its place: another process may write there. Call it before each write.
    """
    if is_remote(path):  # object_storage.Writer has a check of its own
        return
    for lock in list(_held):
        folder = lock.path.parent
        if folder in path.absolute().parents and not lock.is_at_path():
            raise LockLostError(
                f"{folder}: was moved, or its file {lock.path.name} removed, while this process "
                "used it. The process ends without saving; move the folder back to resume"
            )


def _open_without_links(path: str, flags: int) -> int:
    # A symbolic link in a folder of somebody else could name any file of this user.
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
