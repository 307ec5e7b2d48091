"""Writes that an interruption leaves whole or undone, on local disks and in object storage."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from smallgpt_jax.formatting import find_errno
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.locks import require_locks
from smallgpt_jax.storage.object_storage import is_remote
from smallgpt_jax.storage.temporary import temporary_folder

_UPLOAD_PREFIX = "smallgpt_jax-upload-"  # of temporary folders whose files are uploaded
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file. After a crash, it has either the old or the new content."""
    if isinstance(content, str):
        content = content.encode()
    if is_remote(path):
        object_storage.writer.write(path, content)
        return
    require_locks(path)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        # Before the renaming, which could reach the disk before the content.
        os.fsync(file.fileno())
    rename(partial, path)


def append_line(path: Path, line: str) -> None:
    # A killed process may have left a part of a line. It is ended first.
    text = line.encode() + b"\n"
    if is_remote(path):  # objects cannot be appended to
        before = path.read_bytes() if path.exists() else b""
        write_atomically(path, before + _missing_newline(before[-1:]) + text)
        return
    require_locks(path)
    with path.open("a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        last_byte = file.read()
        file.write(_missing_newline(last_byte) + text)


def _missing_newline(last_byte: bytes) -> bytes:
    return b"" if last_byte in (b"", b"\n") else b"\n"


def rename(path: Path, target: Path) -> None:
    """Renames a local file or folder durably: the rename survives a power loss."""
    path.replace(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Syncs a folder: after a power loss, it still has the same files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems cannot sync folders
        pass
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Syncs all files of a folder: after a power loss, it still has its whole content. Object
    storage needs no call.
    """
    if is_remote(folder):
        return
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)
    _sync_folder(folder.parent)


@contextlib.contextmanager
def atomic_folder(folder: Path, last: str = "config.json") -> Iterator[Path]:
    """Yields an empty temporary folder that is renamed to `folder` on success and removed on error.

    `folder` must be missing or empty. If it is in object storage, the temporary folder is local, and
    its files are uploaded on success, the file `last` after all others: a folder without it is
    neither a workdir nor an exported model.
    """
    with _temporary_path(folder) as partial:
        partial.mkdir()
        yield partial
        if is_remote(folder):
            with removed_on_error(folder):
                object_storage.upload_folder(partial, folder, last)
        else:
            rename(partial, folder)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a local path to write, which is renamed or uploaded on success, removed on error."""
    with _temporary_path(path) as partial:
        yield partial
        if is_remote(path):
            object_storage.file_system().put_file(str(partial), str(path))
        else:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            rename(partial, path)


@contextlib.contextmanager
def _temporary_path(path: Path) -> Iterator[Path]:
    """Yields a path of the same name in a temporary folder of this process: on the disk of `path`,
    if that is local. Missing parent folders are created, and removed again if `path` does not exist
    at the end.
    """
    if is_remote(path):
        place = Path(tempfile.gettempdir())
        with _name_full_disk(place), temporary_folder(place, _UPLOAD_PREFIX) as folder:
            yield folder / path.name
        return
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        prefix = f".{path.name}.partial-"
        with _name_full_disk(path), temporary_folder(path.parent, prefix) as folder:
            yield folder / path.name
    finally:
        if not path.exists():
            with contextlib.suppress(OSError):  # another process has put files into the new parents
                for parent in missing:
                    parent.rmdir()


@contextlib.contextmanager
def _name_full_disk(path: Path) -> Iterator[None]:
    """Raises an OSError with `path` if a library raises an error of its own for a full disk."""
    try:
        yield
    except Exception as error:
        number = find_errno(error)
        if number not in _FULL_DISK:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@contextlib.contextmanager
def removed_on_error(folder: Path) -> Iterator[Path]:
    try:
        yield folder
    except BaseException:
        remove_folder(folder)
        raise


def remove_folder(path: Path) -> None:
    if is_remote(path):
        # clients of object storage raise many types of exceptions
        with contextlib.suppress(Exception):
            path.rmtree()
    else:
        shutil.rmtree(path, ignore_errors=True)
