"""Paths given by users, atomic writes and locks, on local disks and in object storage."""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from smallgpt_jax.errors import LockHeldError, UserError
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.object_lock import object_lock
from smallgpt_jax.storage.object_storage import SCHEME, is_remote

# The last file that `atomic_folder` uploads: a folder without it is neither a workdir nor an exported model.
LAST_FILE = "config.json"


def as_path(field: str, name: str | Path) -> Path:
    """Expands `~`. Raises UserError for URLs other than gs://; `field` is the name of the flag or config field."""
    if is_remote(name):
        return object_storage.remote_path(field, str(name))
    refuse_url(field, name, f"and only {SCHEME} URLs are supported; copy the files to such a URL or to a local path")
    return Path(name).expanduser()


def refuse_url(field: str, name: str | Path, advice: str = "which is not supported here; use a local path") -> None:
    if re.match(r"[A-Za-z][\w+.-]*://", str(name)):
        raise UserError(f"{field}: {str(name)!r} is a URL, {advice}")


def local_path(field: str, name: str | Path) -> Path:
    path = as_path(field, name)
    with object_storage.name_path_in_errors(f"{field}={name}") if is_remote(path) else contextlib.nullcontext():
        return local_copy(path)


def local_copy(path: Path) -> Path:
    """Returns `path` if it is local. Otherwise copies the file or folder to the cache folder; returns the copy.

    Each version of the file or folder is copied once per machine. If `path` does not exist, the returned path does not
    exist either.
    """
    if not is_remote(path):
        return path
    found = sorted(object_storage.list_files(path).items())
    identity = hashlib.sha256(repr((str(path), found)).encode()).hexdigest()[:12]
    copy = cache_folder() / "copies" / f"{safe_name(path.name)}-{identity}" / path.name
    if not found or copy.exists():
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(copy.parent.with_name(f"{copy.parent.name}.lock"), wait=True):
        if not copy.exists():
            size = sum(file.size for _, file in found)
            print(f"copying {path} ({size / 1e6:,.1f} MB) to {copy.parent}", file=sys.stderr, flush=True)
            partial = copy.parent / ".partial" / path.name  # a killed process may have left a part of the copy
            shutil.rmtree(partial.parent, ignore_errors=True)
            object_storage.download(path, partial, dict(found))
            rename(partial, copy)
            partial.parent.rmdir()
    return copy


def cache_folder() -> Path:
    """Follows the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "smallgpt_jax"


def write_atomically(path: Path, content: str | bytes) -> None:
    """After a crash, the file has either the old or the new content."""
    content = content.encode() if isinstance(content, str) else content
    if is_remote(path):
        return object_storage.write(path, content)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rename(partial, path)


def append_line(path: Path, line: str) -> None:
    """Ends the last line first if a killed process has not."""
    text = line.encode() + b"\n"
    if is_remote(path):
        before = path.read_bytes() if path.exists() else b""
        return write_atomically(path, before + (b"" if before[-1:] in (b"", b"\n") else b"\n") + text)
    with path.open("a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        file.write((b"" if file.read() in (b"", b"\n") else b"\n") + text)


def resolve(path: Path) -> Path:
    return path if is_remote(path) else path.resolve()


def rename(path: Path, target: Path) -> None:
    """Renames a local file or folder durably: the rename survives a power loss."""
    path.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError:  # some file systems cannot sync folders
        pass
    finally:
        os.close(folder)


def remove_folder(path: Path) -> None:
    if is_remote(path):
        with contextlib.suppress(Exception):  # clients of object storage raise many types of exceptions
            path.rmtree()
    else:
        shutil.rmtree(path, ignore_errors=True)


def safe_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_.=" else "_" for c in text)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty temporary folder that is renamed to `folder` on success and removed on error.

    `folder` must be missing or empty. Missing parent folders are created, and removed again on error. If `folder` is in
    object storage, the temporary folder is local. Its files are uploaded on success, LAST_FILE last.
    """
    if is_remote(folder):
        with tempfile.TemporaryDirectory() as partial, removed_on_error(folder):
            yield Path(partial)
            object_storage.upload_folder(Path(partial), folder, LAST_FILE)
        return
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


@contextlib.contextmanager
def removed_on_error(folder: Path) -> Iterator[Path]:
    try:
        yield folder
    except BaseException:
        remove_folder(folder)
        raise


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@contextlib.contextmanager
def file_lock(path: Path, wait: bool = False) -> Iterator[None]:
    """Holds an exclusive lock on the file at `path`, and removes the file on exit.

    If another process holds the lock, waits for it (`wait=True`) or raises LockHeldError (`wait=False`). The operating
    system releases the lock when this process ends. On file systems without locks, no lock is held. For a path in
    object storage, see `object_lock`.
    """
    if is_remote(path):
        with object_lock(path, wait):
            yield
        return
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
