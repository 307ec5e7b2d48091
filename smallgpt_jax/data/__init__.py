"""Text to batches: sources → tokenizers → store → batches."""

import hashlib
import os
from pathlib import Path

from smallgpt_jax.data import sources
from smallgpt_jax.data.store import METADATA_FILE, TokenStore, open_store, prepare
from smallgpt_jax.errors import UserError

PREPARE_LIMIT = 1_000_000_000  # bytes of text that a training run prepares by itself
# The fields of the `data` group that decide what is in a store.
STORE_FIELDS = ("source", "tokenizer", "validation_fraction", "text_field", "invalid_utf8")


def find(data) -> TokenStore | None:
    """The store of a config's `data` group; None if it has not been made yet.

    Raises UserError if there is one at `data.store` that was made from something else.
    """
    folder = store_folder(data)
    if not (folder / METADATA_FILE).is_file():
        return None
    store = open_store(folder)
    wanted = {field: data[field] for field in STORE_FIELDS}
    if different := [field for field in STORE_FIELDS if wanted[field] != store.made_from[field]]:
        raise UserError(
            f"config.data.store={data.store!r} was made with "
            + ", ".join(f"{field}={store.made_from[field]!r}" for field in different)
            + "; this config has " + ", ".join(f"{field}={wanted[field]!r}" for field in different)
            + ". Name another folder, or use the same settings")
    return store


def make(data, say=print) -> TokenStore:
    """Makes the store of a config's `data` group."""
    return prepare(store_folder(data), **{field: data[field] for field in STORE_FIELDS}, say=say)


def find_or_make(data) -> TokenStore:
    """The store of a config's `data` group, made first if its source is local and under 1 GB.

    Raises UserError naming the command to run when there is no store and the source is larger.
    """
    if store := find(data):
        return store
    if not sources.is_local(data.source) or sources.size(data.source) > PREPARE_LIMIT:
        raise UserError(
            f"there is no token store of {data.source!r} in {str(store_folder(data))!r} yet "
            "(config.data.store).\nMake it first: python -m smallgpt_jax.prepare, with the same --config")
    return make(data)


def store_folder(data) -> Path:
    """Where the store of a config's `data` group lies: `data.store`, or a folder in the cache whose
    name changes with the source and with all that decides what it is turned into."""
    if data.store:
        return Path(data.store).expanduser()
    identity = [sources.fingerprint(data.source), *(data[field] for field in STORE_FIELDS)]
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:12]
    name = "".join(c if c.isalnum() else "_" for c in Path(data.source).stem)
    return cache_folder() / "stores" / f"{name}-{digest}"


def cache_folder() -> Path:
    """Where what can be made again is kept (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "smallgpt_jax"
