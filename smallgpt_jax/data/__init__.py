"""Text to batches: sources → tokenizers → store → packing → batches."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import numpy as np

from smallgpt_jax.data import sources, tokenizers
from smallgpt_jax.data.journal import MAY_BE_RELAXED
from smallgpt_jax.data.packing import PACKINGS, Packing
from smallgpt_jax.data.prepare import prepare_store
from smallgpt_jax.data.store import METADATA_FILE, TokenStore, open_made_from, open_store
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import local_path

PREPARE_LIMIT = 1_000_000_000  # bytes of text that a training run prepares by itself
# The fields of the `data` group that decide what is in a store.
STORE_FIELDS = ("source", "tokenizer", "validation_fraction", "text_field", *MAY_BE_RELAXED)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What a run reads: one token store, or several by weight, all of one tokenizer."""

    stores: tuple[TokenStore, ...]
    weights: tuple[float, ...]  # they sum to 1

    @property
    def tokenizer(self) -> Tokenizer:
        return self.stores[0].tokenizer

    @property
    def description(self) -> dict:
        """All that decides which tokens there are, as it is kept in a workdir."""
        if len(self.stores) == 1:
            return self.stores[0].metadata
        return {"mixture": [{"weight": weight, **store.metadata}
                            for store, weight in zip(self.stores, self.weights)]}

    def fingerprint(self, split: str) -> str:
        """A hash of the content and the weights of the stores' splits."""
        if len(self.stores) == 1:
            return self.stores[0].fingerprint(split)
        parts = [(weight, store.fingerprint(split)) for weight, store in zip(self.weights, self.stores)]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def bytes_per_token(self, split: str) -> float:
        """Of text, on average over what batches are made of."""
        return float(np.dot(self.weights, [getattr(store, split).bytes_per_token for store in self.stores]))

    def packed(self, split: str, packing: str, separate: bool, context_length: int) -> list[Packing]:
        """The rows of each store's split."""
        return [PACKINGS[packing](getattr(store, split), context_length, separate) for store in self.stores]


def same_text(one: dict, other: dict) -> bool:
    """Whether two descriptions (see `Corpus`) are of the same tokens, from whatever sources.

    Where a store older than fingerprints is among them, all else that they say has to be the same.
    """
    both = [description.get("mixture", [description]) for description in (one, other)]
    if all("fingerprints" in store for stores in both for store in stores):
        content, other_content = ([[store.get(field) for field in ("weight", "splits", "fingerprints")]
                                   for store in stores] for stores in both)
    else:
        content, other_content = ([{field: value for field, value in store.items() if field != "fingerprints"}
                                   for store in stores] for stores in both)
    return content == other_content


def find(data) -> Corpus | None:
    """The corpus of a config's `data` group; None if its store has not been made yet.

    Raises UserError if there is one at `data.store` that was made from something else.
    """
    if data.packing not in PACKINGS:
        raise UserError(f"config.data.packing={data.packing!r}: must be one of {', '.join(PACKINGS)}")
    if data.mixture:
        return mixture(data.mixture)
    folder = store_folder(data)
    if not (folder / METADATA_FILE).is_file():
        return None
    return Corpus((open_made_from(folder, {field: data[field] for field in STORE_FIELDS}),), (1.0,))


def mixture(text: str) -> Corpus:
    """The corpus of FOLDER=WEIGHT,FOLDER=WEIGHT,… . Raises UserError if it cannot be one."""
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
        stores.append(open_store(local_path("config.data.mixture", folder)))
        fingerprints = [tokenizers.fingerprint(store.tokenizer) for store in stores]
        if fingerprints[-1] != fingerprints[0]:
            raise UserError(
                f"config.data.mixture={text!r}: the stores {str(stores[0].folder)!r} and {folder!r} have "
                "different tokenizers. Prepare both with the same one: --config.data.tokenizer="
                f"{stores[0].folder / 'tokenizer'}")
    return Corpus(tuple(stores), tuple(weight / sum(weights) for weight in weights))


def make(data, workers: int | None = None, say=print) -> Corpus:
    """Makes the store of a config's `data` group, or goes on with one that was begun."""
    fields = {field: data[field] for field in STORE_FIELDS}
    unfinished = "" if data.store else unfinished_name(data)
    store = prepare_store(store_folder(data), **fields, workers=workers, say=say, unfinished=unfinished)
    return Corpus((store,), (1.0,))


def find_or_make(data) -> Corpus:
    """The corpus of a config's `data` group; its store is made first if the source is local and under
    1 GB.

    Raises UserError naming the command to run when there is no store and the source is larger.
    """
    if corpus := find(data):
        return corpus
    if not sources.is_local(data.source) or sources.size(data.source) > PREPARE_LIMIT:
        raise UserError(
            f"there is no token store of {data.source!r} in {str(store_folder(data))!r} yet "
            "(config.data.store).\nMake it first: python -m smallgpt_jax.prepare, with the same --config")
    return make(data)


def store_folder(data) -> Path:
    """Where the store of a config's `data` group lies: `data.store`, or a folder in the cache whose
    name changes with the source and with all that decides what it is turned into."""
    if data.store:
        return local_path("config.data.store", data.store)
    identity = [sources.fingerprint(data.source), tokenizers.content(data.tokenizer),
                *(data[field] for field in STORE_FIELDS)]
    return cache_folder() / "stores" / cached_name(data, *identity)


def unfinished_name(data) -> str:
    """The name of a store in the cache while it is made: the same when the text has been mended, or what was
    refused is left out, so that what was tokenized before is found."""
    names = [str(Path(name).expanduser().absolute()) if sources.is_local(name) else name
             for name in sources.names(data.source)]
    return cached_name(data, names, *(data[field] for field in STORE_FIELDS if field not in MAY_BE_RELAXED))


def cached_name(data, *identity) -> str:
    """The name of a store in the cache: its source, for a person, and a digest of what it is."""
    digest = hashlib.sha256(repr([*identity]).encode()).hexdigest()[:12]
    name = "".join(c if c.isalnum() else "_" for c in Path(data.source).stem)[:60]
    return f"{name}-{digest}"


def cache_folder() -> Path:
    """Where what can be made again is kept (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "smallgpt_jax"
