"""Paths given by users, atomic writes and file locks."""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from smallgpt_jax.errors import UserError


def local_path(field: str, name: str | Path) -> Path:
    """Returns the path `name` with `~` expanded.

    Raises UserError if `name` is a URL. The message contains `field`, the name of the flag or config field.
    """
    if re.match(r"[A-Za-z][\w+.-]*://", str(name)):
        raise UserError(f"{field}: {str(name)!r} is a URL, and object storage is not supported; mount the bucket or "
                        "copy the files, and use a local path")
    return Path(name).expanduser()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file atomically: after a crash, it has either the old or the new content."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    rename(partial, path)


def rename(path: Path, target: Path) -> None:
    """Renames a file or folder durably: the rename survives a power loss."""
    path.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError:  # some file systems cannot sync folders
        pass
    finally:
        os.close(folder)


def safe_name(text: str) -> str:
    """Returns `text` as a valid file name: replaces all characters except letters, digits and "-_.=" by underscores."""
    return "".join(c if c.isalnum() or c in "-_.=" else "_" for c in text)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty temporary folder that is renamed to `folder` on success and removed on error.

    `folder` must not exist yet, or must be empty. Missing parents are created, and also removed on error.
    """
    missing_parents = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        partial.chmod(0o777 & ~current_umask())
        yield partial
        rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.exists():
            with contextlib.suppress(OSError):  # another process has put files into the new parents
                for parent in missing_parents:
                    parent.rmdir()


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


class LockHeldError(Exception):
    """Another process, named in the message, holds the lock."""


@contextlib.contextmanager
def file_lock(path: Path, wait: bool = False) -> Iterator[None]:
    """Holds an exclusive lock on the file at `path`, and removes the file on exit.

    If another process holds the lock, waits for it (`wait=True`) or raises LockHeldError (`wait=False`). The operating
    system releases the lock when this process ends. On file systems without locks, no lock is held.
    """
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise LockHeldError(file.read().strip() or "another process") from None
        except OSError:  # the file system has no locks: continue without one
            break
        # The previous holder may have removed the file, and another process may have created a new one. A lock on the
        # old file is then useless, so try again.
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
