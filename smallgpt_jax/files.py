"""Paths that users name, and files that more than one program may reach for: replaced whole, and locked."""

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
    """Returns the path that a user gave in `field`, a flag or config field, with `~` expanded.

    Raises UserError for a URL, which would else become a local folder of that name.
    """
    if re.match(r"[A-Za-z][\w+.-]*://", str(name)):
        raise UserError(f"{field}: {str(name)!r} is a URL, and object storage is not supported yet; mount the bucket "
                        "or copy the files, and give a local path")
    return Path(name).expanduser()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file by `content`: afterwards, whatever happens, it is the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    rename(partial, path)


def rename(path: Path, target: Path) -> None:
    """Gives a file or folder another name, which a loss of power does not undo."""
    path.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError:  # not on every file system
        pass
    finally:
        os.close(folder)


def safe_name(text: str) -> str:
    """As a name for a file or folder."""
    return "".join(c if c.isalnum() or c in "-_.=" else "_" for c in text)


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which gets the name `folder` at the end; in case of an error there is
    nothing. What has that name has to be an empty folder, or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        partial.chmod(0o777 & ~current_umask())
        yield partial
        rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


class InUse(Exception):
    """Another process holds a lock; its name is the message."""


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Holds the lock that is the file at `path`, which is removed afterwards.

    The system frees the lock when its process ends, however it ends. Raises InUse if another process
    has it, unless it is to wait for that one. File systems without locks get none.
    """
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise InUse(file.read().strip() or "another process") from None
        except OSError:  # no locks here
            break
        # The one that had it may have removed the file meanwhile, and a third one made it anew.
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
