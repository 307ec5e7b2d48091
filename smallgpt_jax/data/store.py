"""The token store: a corpus on disk as two streams of token ids, training and validation.

A store is a folder with:

- `metadata.json` and `tokenizer/`
- one file `SPLIT.bin` per split: token ids of all documents (little-endian uint16, or uint32 for large vocabularies)
- one file `SPLIT.documents.bin` per split: the offset of each document in `SPLIT.bin` (int64, in tokens)

A document is the tokenizer's begin-of-text id followed by the ids of its text. The end-of-text id follows if it is
another one; `metadata.json` then has the field `begin_of_text`, too. The `.bin` files are flat arrays. Random access to
them needs no library. They can be truncated at any token, so that an interrupted preparation can resume.
"""

import dataclasses
import hashlib
import json
from functools import cached_property
from pathlib import Path

import numpy as np

from smallgpt_jax.data import tokenizers
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import local_copy

FORMAT = 2
METADATA_FILE = "metadata.json"
SPLITS = ("train", "validation")
# The files and folders of a store.
STORE_FILES = (METADATA_FILE, "tokenizer", *(f"{split}{end}" for split in SPLITS for end in (".bin", ".documents.bin")))


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a store, opened for reading."""

    folder: Path
    name: str
    tokens: int
    documents: int
    text_bytes: int
    dtype: str
    begin_of_text: int  # the first id of each document

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / self.tokens

    @cached_property
    def stream(self) -> np.ndarray:
        """Returns all token ids of the split as a memory-mapped array, (tokens,)."""
        return np.memmap(tokens_file(self.folder, self.name), self.dtype, "r")

    @cached_property
    def starts(self) -> np.ndarray:
        """Returns the offset of each document in `stream` as a memory-mapped int64 array, (documents,)."""
        return np.memmap(documents_file(self.folder, self.name), np.int64, "r")


def tokens_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin"


def documents_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.documents.bin"


@dataclasses.dataclass(frozen=True)
class TokenStore:
    folder: Path  # as given, possibly in object storage; the folder of the splits is always local
    metadata: dict
    train: Split
    validation: Split

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Returns the store's tokenizer. Raises UserError if it is missing or damaged."""
        return tokenizers.load(self.train.folder / "tokenizer")

    def fingerprint(self, split: str) -> str:
        """Returns a hash of a split. If the metadata does not contain the hash, computes it from the split's files."""
        if known := self.metadata.get("fingerprints"):
            return known[split]
        return fingerprint(self.train.folder, split, getattr(self, split).text_bytes)


def fingerprint(folder: Path, split: str, text_bytes: int) -> str:
    """Returns a hash of a split: its tokens, the starts of its documents, and the length of its text."""
    digest = hashlib.blake2b(str(text_bytes).encode(), digest_size=16)
    for path in (tokens_file(folder, split), documents_file(folder, split)):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def open_store(folder: Path) -> TokenStore:
    """Opens the store in `folder`. A store in object storage is first copied to the cache folder.

    Raises UserError if the folder is not a store, if the store's format is not FORMAT, or if a file is missing or has
    the wrong size.
    """
    fix = "remove the folder and rerun smallgpt_jax.prepare"
    try:
        metadata = json.loads((folder / METADATA_FILE).read_text())
        stored_format = metadata.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / METADATA_FILE}: not the metadata of a token store ({error})") from None
    if stored_format != FORMAT:
        raise UserError(f"{folder}: token store of format {stored_format}, expected format {FORMAT}; {fix}")
    splits, local = {}, local_copy(folder)
    for name in SPLITS:
        try:
            split = Split(local, name, dtype=metadata["dtype"],
                          begin_of_text=metadata.get("begin_of_text", metadata["end_of_text"]),
                          **metadata["splits"][name])
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder / METADATA_FILE}: damaged ({error}); {fix}") from None
        for path, length in ((tokens_file(local, name), split.tokens * np.dtype(split.dtype).itemsize),
                             (documents_file(local, name), split.documents * 8)):
            shown = folder / path.name
            if not path.is_file():
                raise UserError(f"{shown}: file of the token store is missing; {fix}")
            if path.stat().st_size != length:
                raise UserError(f"{shown}: damaged, has {path.stat().st_size:,} bytes, expected {length:,}; {fix}")
        splits[name] = split
    return TokenStore(folder, metadata, **splits)


def open_matching_store(folder: Path, expected: dict) -> TokenStore:
    """Opens the store in `folder`, as `open_store` does.

    Also raises UserError if the store was made from another source or with other settings than those in `expected`.
    """
    store = open_store(folder)
    made_from = store.metadata["made_from"]
    if different := [field for field in expected if expected[field] != made_from[field]]:
        raise UserError(
            f"config.data.store={str(folder)!r}: was made with "
            + ", ".join(f"{field}={made_from[field]!r}" for field in different)
            + ", but this config has " + ", ".join(f"{field}={expected[field]!r}" for field in different)
            + "; choose another folder, or use the same settings")
    return store
