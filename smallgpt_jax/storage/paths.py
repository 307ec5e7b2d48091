"""Paths that users give."""

import re
from pathlib import Path

from smallgpt_jax.errors import UserError
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.cache import local_copy
from smallgpt_jax.storage.object_storage import SCHEME, is_remote, list_files, require_bucket


def as_path(field: str, name: str | Path) -> Path:
    """Returns a user's path, with `~` expanded. `field` is the flag or config field that names it.
    Raises UserError for other URLs than gs://.
    """
    if is_remote(name):
        return object_storage.remote_path(field, str(name))
    refuse_url(
        field,
        name,
        f"and only {SCHEME} URLs are supported; copy the files to such a URL or to a local path",
    )
    return Path(name).expanduser()


def refuse_url(
    field: str, name: str | Path, advice: str = "which is not supported here; use a local path"
) -> None:
    if re.match(r"[A-Za-z][\w+.-]*://", str(name)):
        raise UserError(f"{field}: {str(name)!r} is a URL, {advice}")


def local_path(field: str, name: str | Path) -> Path:
    """Returns a user's path or, of a remote file or folder, that of its cached copy."""
    path = as_path(field, name)
    if not is_remote(path):
        return path
    with object_storage.name_path_in_errors(f"{field}={name}"):
        return local_copy(path)


def resolve(path: Path) -> Path:
    return path if is_remote(path) else path.resolve()


def new_folder(field: str, name: str | Path | None) -> Path:
    """Returns the path of a folder to write. Raises UserError unless it is new or empty, and not
    the current one.
    """
    if not name:
        raise UserError(f"{field}: must be given; name a new folder")
    folder = resolve(as_path(field, name))
    if is_remote(folder):
        require_bucket(field, folder)
        is_free = not list_files(folder)
    elif folder == Path.cwd():  # it would be replaced, and the shell would stay in the removed one
        raise UserError(f"{field}={name}: this is the current folder; choose another")
    else:
        is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free:
        raise UserError(f"{field}={name}: folder is not empty; choose another")
    return folder


def new_file(field: str, name: str | Path | None, suffix: str) -> Path:
    """Returns the path of a file to write. Raises UserError unless new and with `suffix`."""
    if not name or not str(name).endswith(suffix):
        shown = f"{field}={name}" if name else field
        raise UserError(f"{shown}: must be the name of a new file that ends in {suffix}")
    path = resolve(as_path(field, name))
    if is_remote(path):
        require_bucket(field, path)
        exists = bool(list_files(path))
    else:
        exists = path.exists()
    if exists:
        raise UserError(f"{field}={name}: exists; choose another name")
    return path
