"""Prepares token stores from text. An interrupted preparation can be resumed.

A store is written to the folder STORE.partial, which is renamed to STORE on completion. A store in object storage is
prepared in the cache folder and then uploaded.
"""

import dataclasses
import os
from pathlib import Path

from smallgpt_jax.data.journal import JOURNAL_FILE
from smallgpt_jax.data.store import METADATA_FILE, STORE_FILES, TokenStore
from smallgpt_jax.data.store_spec import StoreSpec
from smallgpt_jax.data.unfinished_store import write_store
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.atomic import rename
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.storage.object_storage import is_remote, list_files, require_bucket, upload_folder


def prepare_store(spec: StoreSpec, workers: int | None = None, log=print) -> TokenStore:
    """Prepares the token store of `spec`, or resumes its preparation (see journal.py).

    `workers` is the number of tokenizer threads (None: one per core); the content of the store does not depend on it.
    The preparation needs about 10 MB of memory per worker, plus a few times the size of the longest document. Raises
    UserError if another process has made a store with another source or settings meanwhile.
    """
    if not is_remote(spec.folder):
        return prepare_local_store(spec, workers, log)
    require_free_prefix(spec.folder)
    spec.check_source(spec.folder)
    local = prepare_local_store(dataclasses.replace(spec, store=""), workers, log)
    return upload_store(local, spec, log)


def prepare_local_store(spec: StoreSpec, workers: int | None, log) -> TokenStore:
    folder = Path(os.path.realpath(spec.folder))  # if it is a link, the unfinished store is where the link points
    require_free_path(folder)
    spec.check_source(folder)
    name = spec.partial_name(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.with_name(f".{name}.lock"), wait=True):
            if not (folder / METADATA_FILE).is_file():  # another process may have finished the store meanwhile
                for message in spec.source.messages():
                    log(message)
                partial = folder.with_name(f"{name}.partial")
                write_store(partial, spec, workers or os.cpu_count(), log)
                require_free_path(folder)
                rename(partial, folder)
                (folder / JOURNAL_FILE).unlink()
    except OSError as error:
        if error.filename and folder.parent not in Path(error.filename).parents:
            raise  # the file named in the error belongs to the source or the tokenizer, not to the store
        raise UserError(f"config.data.store: cannot write to {error.filename or folder.parent}: "
                        f"{error.strerror}; rerun the same command to resume") from None
    return spec.open()


def upload_store(local: TokenStore, spec: StoreSpec, log) -> TokenStore:
    folder = spec.folder
    with file_lock(folder.with_name(f".{folder.name}.lock"), wait=True):
        if store := spec.open():  # uploaded by another process meanwhile
            return store
        log(f"uploading {local.folder} to {folder}")
        upload_folder(local.folder, folder, last=METADATA_FILE)
    return dataclasses.replace(local, folder=folder)


def require_free_prefix(folder: Path) -> None:
    require_bucket("config.data.store", folder)
    if any(path.relative_to(folder).parts[:1] not in {(name,) for name in STORE_FILES} for path in list_files(folder)):
        raise UserError(f"config.data.store={str(folder)!r}: exists and is not a token store; choose another folder")


def require_free_path(folder: Path) -> None:
    """Raises UserError if something other than a store or an empty folder exists at `folder`.

    A mount point is refused even if it is empty, because a finished store cannot be renamed to it.
    """
    if (folder / METADATA_FILE).is_file() or not os.path.lexists(folder):
        return
    if os.path.ismount(folder):
        raise UserError(f"config.data.store={str(folder)!r}: is a mount point, which a finished store cannot replace; "
                        f"choose a subfolder: --config.data.store={folder / 'store'}")
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(f"config.data.store={str(folder)!r}: exists and is not a token store; choose another folder")
