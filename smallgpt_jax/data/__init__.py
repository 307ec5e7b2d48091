"""The data pipeline, from text to batches: sources → tokenizers → store → packing → batches."""

import dataclasses
import glob
import hashlib
import json
import re
from pathlib import Path

import numpy as np

from smallgpt_jax.data import sources, tokenizers
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.leaks import refuse_leaks
from smallgpt_jax.data.packing import PACKINGS, Packing
from smallgpt_jax.data.prepare import prepare_store
from smallgpt_jax.data.store import METADATA, METADATA_FILE, STORE_FILES, TokenStore, open_matching_store, open_store
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError, command_line, config_arguments
from smallgpt_jax.storage.files import as_path, cache_folder, file_lock
from smallgpt_jax.storage.json_files import POSITIVE
from smallgpt_jax.storage.object_storage import is_remote, list_files, require_bucket, upload_folder

PREPARE_LIMIT = 1_000_000_000  # bytes of text; training does not prepare the stores of larger sources
# The schema of `Corpus.description`.
DESCRIPTION = ({"mixture": [{"weight": POSITIVE, **METADATA}]}, METADATA)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The text of a run: one token store, or a weighted mixture of several stores with the same tokenizer."""

    stores: tuple[TokenStore, ...]
    weights: tuple[float, ...]  # their sum is 1

    @property
    def tokenizer(self) -> Tokenizer:
        return self.stores[0].tokenizer

    @property
    def description(self) -> dict:
        """Returns the metadata and weights of the stores, as written to store.json in a workdir."""
        if len(self.stores) == 1:
            return self.stores[0].metadata
        return {"mixture": [{"weight": weight, **store.metadata}
                            for store, weight in zip(self.stores, self.weights)]}

    def fingerprint(self, split: str) -> str:
        """Returns a hash that covers the sampling weights of all stores and the content of `split` in each store."""
        if len(self.stores) == 1:
            return self.stores[0].fingerprint(split)
        parts = [(weight, store.fingerprint(split)) for weight, store in zip(self.weights, self.stores)]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def bytes_per_token(self, split: str) -> float:
        """Returns the number of bytes of text per token, as the weighted mean over the stores."""
        return float(np.dot(self.weights, [getattr(store, split).bytes_per_token for store in self.stores]))

    def pack(self, split: str, packing: str, separate: bool, context_length: int) -> list[Packing]:
        """Returns the packed rows of `split`, one Packing per store."""
        return [PACKINGS[packing](getattr(store, split), context_length, separate) for store in self.stores]


def same_text(one: dict, other: dict) -> bool:
    """Returns whether two `Corpus.description`s describe the same tokens. The sources of the tokens may differ."""
    content, other_content = (
        [(store.get("weight"), store["splits"], store["fingerprints"])
         for store in description.get("mixture", [description])] for description in (one, other))
    return content == other_content


def open_existing(data) -> Corpus | None:
    """Returns the corpus of a config's `data` group, or None if the group's token store does not exist.

    Raises UserError if the store was prepared from another source or with other settings than those in `data`.
    """
    if data.packing not in PACKINGS:
        raise UserError(f"config.data.packing={data.packing!r}: must be one of {', '.join(PACKINGS)}")
    if data.mixture:
        return open_mixture(data.mixture)
    folder = store_folder(data)
    if not (folder / METADATA_FILE).is_file():
        return None
    return Corpus((open_matching_store(folder, store_fields(data)),), (1.0,))


def open_mixture(text: str) -> Corpus:
    """Returns the corpus of the mixture `text`, in the format "FOLDER=WEIGHT,FOLDER=WEIGHT,…".

    Raises UserError if the format is wrong, if a store cannot be opened, if the stores have different tokenizers, or if
    one trains on validation documents of another.
    """
    stores, weights = [], []
    for item in text.split(","):
        folder, _, weight = item.strip().rpartition("=")
        try:
            weights.append(float(weight))
        except ValueError:
            weights.append(0.0)
        if not folder or not 0 < weights[-1] < float("inf"):
            raise UserError(f"config.data.mixture={text!r}: {item.strip()!r} is not FOLDER=WEIGHT with a "
                            "weight above 0")
        stores.append(open_store(as_path("config.data.mixture", folder)))
        fingerprints = [tokenizers.fingerprint(store.tokenizer) for store in stores]
        if fingerprints[-1] != fingerprints[0]:
            raise UserError(
                f"config.data.mixture={text!r}: the stores {str(stores[0].folder)!r} and {folder!r} have "
                "different tokenizers; prepare both with the same one: --config.data.tokenizer="
                f"{stores[0].folder / 'tokenizer'}")
    refuse_leaks(f"config.data.mixture={text!r}", stores)
    return Corpus(tuple(stores), tuple(weight / sum(weights) for weight in weights))


def prepare_corpus(data, workers: int | None = None, log=print) -> Corpus:
    """Prepares the store of a config's `data` group, or resumes its preparation; returns the corpus.

    A store in object storage is prepared in the cache folder and then uploaded.
    """
    fields, folder = store_fields(data), store_folder(data)
    if is_remote(folder):
        return Corpus((prepare_remote_store(folder, data, fields, workers, log),), (1.0,))
    unfinished = "" if data.store else partial_name(data)
    store = prepare_store(folder, **fields, workers=workers, log=log, unfinished=unfinished)
    return Corpus((store,), (1.0,))


def prepare_remote_store(folder: Path, data, fields: dict, workers: int | None, log) -> TokenStore:
    """Prepares the store in the cache folder and uploads it to `folder`, `metadata.json` last."""
    require_bucket("config.data.store", folder)
    if enclosing := sources.find_enclosing_folder(data.source, folder):
        raise UserError(f"config.data.store={str(folder)!r}: is inside {enclosing}, a folder of the source; choose a "
                        "folder outside of it")
    if (folder / METADATA_FILE).exists():
        return open_matching_store(folder, fields)
    if any(path.relative_to(folder).parts[:1] not in {(name,) for name in STORE_FILES} for path in list_files(folder)):
        raise UserError(f"config.data.store={str(folder)!r}: exists and is not a token store; choose another folder")
    local = prepare_store(cached_store_folder(data), **fields, workers=workers, log=log, unfinished=partial_name(data))
    with file_lock(folder.with_name(f".{folder.name}.lock"), wait=True):
        if (folder / METADATA_FILE).exists():
            return open_matching_store(folder, fields)
        log(f"uploading {local.folder} to {folder}")
        upload_folder(local.folder, folder, last=METADATA_FILE)
    return dataclasses.replace(local, folder=folder)


def load_or_prepare(data) -> Corpus:
    """Returns the corpus of a config's `data` group. Prepares a missing store if the source is local and under 1 GB.

    For larger and remote sources, raises UserError with the command that prepares the store.
    """
    if corpus := open_existing(data):
        return corpus
    if not sources.is_local(data.source) or sources.num_bytes(data.source, data.text_endings) > PREPARE_LIMIT:
        raise UserError(
            f"config.data.store: no token store of {data.source!r} in {str(store_folder(data))!r}; prepare it first: "
            + command_line("prepare", *(config_arguments() or ["--config=…"])))
    return prepare_corpus(data)


def store_fields(data, **marks) -> dict:
    """Returns the fields of a config's `data` group that determine the content of a token store."""
    return {name: getattr(data, name) for name in DataConfig.names(in_store=True, **marks)}


def store_folder(data) -> Path:
    """Returns the folder of a config's token store: `data.store`, or else a folder in the cache."""
    return as_path("config.data.store", data.store) if data.store else cached_store_folder(data)


def cached_store_folder(data) -> Path:
    """Returns the folder in the cache for the token store of a config.

    The name of the folder depends on the source and on all settings of the store.
    """
    identity = [sources.fingerprint(data.source, data.text_endings), tokenizers.spec_fingerprint(data.tokenizer),
                *store_fields(data).values()]
    return cache_folder() / "stores" / cached_name(data, *identity)


def partial_name(data) -> str:
    """Returns the name of an unfinished store in the cache.

    If the content of the source or the handling of invalid items changes, the name stays the same, so that preparation
    can resume.
    """
    names = [str(Path(name).expanduser().absolute()) if sources.is_local(name) else name
             for name in sources.split_names(data.source)]
    return cached_name(data, names, *store_fields(data, relaxable=False).values())


def cached_name(data, *identity) -> str:
    """Returns the name of a store in the cache: a readable form of the source's name, and a digest of `identity`."""
    digest = hashlib.sha256(repr([*identity]).encode()).hexdigest()[:12]
    parts = Path(data.source).parts
    pattern = next((i for i, part in enumerate(parts) if glob.has_magic(part)), None)
    name = Path(data.source).stem if pattern is None else "_".join(parts[max(pattern - 1, 0):])
    readable = re.sub(r"[\W_]+", "_", name).strip("_")[:60] or "text"  # texts/**/*.md: texts_md
    return f"{readable}-{digest}"
