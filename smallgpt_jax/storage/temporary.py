"""Temporary folders, which later processes remove if theirs was killed.

A process holds a lock in each of its folders. The folder around them may be shared with other
users.
"""

import contextlib
import glob
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from smallgpt_jax.errors import LockHeldError
from smallgpt_jax.storage.locks import file_lock

_LOCK_FILE = ".lock"  # in a temporary folder


@contextlib.contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yields a new folder in `parent`, which is removed at the end."""
    remove_abandoned(parent, prefix)
    held = contextlib.ExitStack()
    folder = new_locked_folder(parent, prefix, held)
    try:
        yield folder
    finally:
        with held:
            shutil.rmtree(folder, ignore_errors=True)
        # Again: on NFS, a file that is open, as that of the lock, is renamed instead of removed.
        _remove(folder)


def new_locked_folder(parent: Path, prefix: str, held: contextlib.ExitStack) -> Path:
    """Returns a new folder, whose lock `held` releases."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            held.enter_context(file_lock(folder / _LOCK_FILE))
            return folder
        except (LockHeldError, FileNotFoundError):
            # Another process that starts now has found the lock file before its lock was held, and
            # removes the folder.
            continue


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes folders whose lock no process holds; none where the file system has no locks."""
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        lock = folder / _LOCK_FILE
        # A user's folder of such a name has no lock, and another process may be removing this one.
        with contextlib.suppress(LockHeldError, OSError):
            if _is_own_folder(folder) and lock.exists():
                with file_lock(lock) as is_locked:
                    if is_locked:
                        shutil.rmtree(folder)


def _remove(folder: Path) -> None:
    # After a failure, a library may go on writing there for a moment, in its threads.
    for pause in (0.1, 0.5, 2.0, 0.0):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(pause)


def _is_own_folder(path: Path) -> bool:
    status = path.lstat()  # not stat: a symbolic link may lead anywhere
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
