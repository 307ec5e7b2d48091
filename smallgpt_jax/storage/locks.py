"""Locks on files, on local disks and in object storage."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from smallgpt_jax.errors import LockHeldError
from smallgpt_jax.storage.object_lock import object_lock
from smallgpt_jax.storage.object_storage import is_remote


@contextlib.contextmanager
def file_lock(path: Path, wait: bool = False) -> Iterator[None]:
    """Holds an exclusive lock on the file at `path`, and removes the file on exit.

    If another process holds the lock, waits for it (`wait=True`) or raises LockHeldError
    (`wait=False`). The operating system releases the lock when this process ends. On file systems
    without locks, no lock is held. For a path in object storage, see `object_lock`.
    """
    if is_remote(path):
        with object_lock(path, wait):
            yield
        return
    while True:
        file = open(path, "a+", encoding="utf-8", opener=_open_without_links)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise LockHeldError(file.read().strip() or "another process") from None
        except OSError:  # the file system has no locks: continue without one
            break
        # The previous holder may have removed the file, and another process may have created a new
        # one. A lock on the old file is then useless, so try again.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _open_without_links(path: str, flags: int) -> int:
    """A symbolic link in a folder of somebody else could name any file of this user."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
