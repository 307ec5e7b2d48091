"""Prepares token stores from text, on one machine or by joining the shards of several.

A store is written to the folder STORE.partial, which is renamed to STORE on completion. A store in
object storage is prepared in the cache folder and then uploaded.
"""

import dataclasses
import os

from smallgpt_jax.data.shards import find_shards, join_shards
from smallgpt_jax.data.store import METADATA_FILE, TokenStore, open_store
from smallgpt_jax.data.store_spec import StoreSpec
from smallgpt_jax.data.tokenizing import name_store_in_errors, write_store
from smallgpt_jax.data.unfinished_store import JOURNAL_FILE
from smallgpt_jax.storage.atomic import rename
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.storage.object_storage import is_remote, upload_folder


def prepare_store(spec: StoreSpec, workers: int | None = None, log=print) -> TokenStore:
    """Prepares the token store of `spec`, or resumes its preparation (see unfinished_store.py).
    Joins the shards of the store, if there are any.

    `workers` is the number of tokenizer threads (None: one per core); the content of the store does
    not depend on it. The preparation needs about 10 MB of memory per worker, plus a few times the
    size of the longest document. Raises UserError if another process has made a store with another
    source or settings meanwhile.
    """
    if shards := find_shards(spec):
        folder = spec.real_folder
        with file_lock(folder.with_name(f".{folder.name}.lock"), wait=True):
            if not (folder / METADATA_FILE).is_file():
                join_shards(spec, shards, log)
        return open_store(spec.folder, spec.made_from)
    spec.check()
    folder, partial = spec.real_folder, spec.partial
    lock = partial.with_name(f".{partial.stem}.lock")
    # Another process may finish or upload the store while this one waits for the lock.
    if is_remote(folder):  # tokens are appended to files, which objects do not allow
        local = prepare_store(dataclasses.replace(spec, store=""), workers, log)
        with file_lock(lock, wait=True):
            if not (folder / METADATA_FILE).is_file():
                log(f"uploading {local.folder} to {folder}")
                upload_folder(local.folder, folder, last=METADATA_FILE)
                return dataclasses.replace(local, folder=folder)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with name_store_in_errors(folder), file_lock(lock, wait=True):
            if not (folder / METADATA_FILE).is_file():
                write_store(partial, spec, workers or os.cpu_count(), log)
                rename(partial, folder)
                (folder / JOURNAL_FILE).unlink()
    return open_store(spec.folder, spec.made_from)
