"""The cache folder, and the copies of remote files in it."""

import hashlib
import os
import shutil
from pathlib import Path

from smallgpt_jax.formatting import safe_name
from smallgpt_jax.output import print_error
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.atomic import rename
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.storage.object_storage import is_remote


def cache_folder() -> Path:
    # as the XDG base directory specification says
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "smallgpt_jax"


def local_copy(path: Path) -> Path:
    """Returns `path` if it is local, and otherwise its copy in the cache folder. Each version is
    copied once per machine. If `path` does not exist, neither does the returned path.
    """
    if not is_remote(path):
        return path
    files = object_storage.list_files(path)
    # Sizes and generations are part of the name, so a changed file gets another copy.
    version = repr((str(path), sorted(files.items())))
    identity = hashlib.sha256(version.encode()).hexdigest()[:12]
    copy = cache_folder() / "copies" / f"{safe_name(path.name)}-{identity}" / path.name
    if not files or copy.exists():
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(copy.parent.with_name(f"{copy.parent.name}.lock"), wait=True):
        if not copy.exists():
            size = f"{sum(file.size for file in files.values()) / 1e6:,.1f} MB"
            print_error(f"copying {path} ({size}) to {copy.parent}")
            partial = copy.parent / ".partial" / path.name
            shutil.rmtree(partial.parent, ignore_errors=True)  # left by a killed process
            object_storage.download(path, partial, files)
            rename(partial, copy)
            partial.parent.rmdir()
    return copy
