"""Paths that users give."""

import contextlib
import re
from pathlib import Path

from smallgpt_jax.errors import UserError
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.cache import local_copy
from smallgpt_jax.storage.object_storage import SCHEME, is_remote


def as_path(field: str, name: str | Path) -> Path:
    """Expands `~`. Raises UserError for URLs other than gs://; `field` is the name of the flag or
    config field.
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
    path = as_path(field, name)
    with (
        object_storage.name_path_in_errors(f"{field}={name}")
        if is_remote(path)
        else contextlib.nullcontext()
    ):
        return local_copy(path)


def resolve(path: Path) -> Path:
    return path if is_remote(path) else path.resolve()
