"""The token store: a corpus as two streams of token ids on disk, train and validation.

A store is a folder: `metadata.json`, `tokenizer/`, and for each split two files of plain numbers:
`SPLIT.bin`, the ids of all documents one after another (uint16 where the vocabulary allows, else
uint32; little-endian), and `SPLIT.documents.bin`, the place where each document begins (int64). A
document is its end-of-text id followed by its tokens. Plain files can be read at any place without
a library, and cut back to any place, which is how an interrupted preparation goes on.
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

FORMAT = 2
METADATA_FILE = "metadata.json"
SPLITS = ("train", "validation")


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a store, open for reading."""

    folder: Path
    name: str
    tokens: int
    documents: int
    text_bytes: int
    dtype: str
    end_of_text: int

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / self.tokens

    @cached_property
    def stream(self) -> np.ndarray:
        """All token ids, (tokens,), mapped into memory."""
        return np.memmap(tokens_file(self.folder, self.name), self.dtype, "r")

    @cached_property
    def starts(self) -> np.ndarray:
        """Where in the stream each document begins, (documents,) int64, mapped into memory."""
        return np.memmap(documents_file(self.folder, self.name), np.int64, "r")


def tokens_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin"


def documents_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.documents.bin"


@dataclasses.dataclass(frozen=True)
class TokenStore:
    folder: Path
    metadata: dict
    train: Split
    validation: Split

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises UserError if it is missing or damaged."""
        return tokenizers.load(self.folder / "tokenizer")

    def fingerprint(self, split: str) -> str:
        """The `fingerprint` of a split; read from its files if the store is older than fingerprints."""
        if known := self.metadata.get("fingerprints"):
            return known[split]
        return fingerprint(self.folder, split, getattr(self, split).text_bytes)


def fingerprint(folder: Path, split: str, text_bytes: int) -> str:
    """A hash of all that a split holds: its tokens, where documents begin, and the length of their text."""
    digest = hashlib.blake2b(str(text_bytes).encode(), digest_size=16)
    for path in (tokens_file(folder, split), documents_file(folder, split)):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def open_store(folder: Path) -> TokenStore:
    """Opens the store in `folder`. Raises UserError if it is not one, is of another format, or if a
    file of it is not as long as it was made."""
    again = "Remove the folder and make the store again with smallgpt_jax.prepare"
    try:
        metadata = json.loads((folder / METADATA_FILE).read_text())
        stored_format = metadata.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / METADATA_FILE}: not the description of a token store ({error})") from None
    if stored_format != FORMAT:
        raise UserError(f"{folder}: a token store of format {stored_format}, this version reads format "
                        f"{FORMAT}. {again}")
    splits = {}
    for name in SPLITS:
        try:
            split = Split(folder, name, dtype=metadata["dtype"], end_of_text=metadata["end_of_text"],
                          **metadata["splits"][name])
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder / METADATA_FILE}: damaged ({error}). {again}") from None
        for path, length in ((tokens_file(folder, name), split.tokens * np.dtype(split.dtype).itemsize),
                             (documents_file(folder, name), split.documents * 8)):
            if not path.is_file():
                raise UserError(f"{path}: this part of the token store is missing. {again}")
            if path.stat().st_size != length:
                raise UserError(f"{path}: {path.stat().st_size:,} bytes long, it was made with {length:,}: "
                                f"damaged. {again}")
        splits[name] = split
    return TokenStore(folder, metadata, **splits)


def open_made_from(folder: Path, wanted: dict) -> TokenStore:
    """Opens the store in `folder`. Raises UserError, besides what `open_store` does, if it was made from another
    source or with other settings than `wanted`."""
    store = open_store(folder)
    made_from = store.metadata["made_from"]
    if different := [field for field in wanted if wanted[field] != made_from[field]]:
        raise UserError(
            f"config.data.store={str(folder)!r} was made with "
            + ", ".join(f"{field}={made_from[field]!r}" for field in different)
            + "; this config has " + ", ".join(f"{field}={wanted[field]!r}" for field in different)
            + ". Name another folder, or use the same settings")
    return store


# ---------------------------------------------------------------------- making one
