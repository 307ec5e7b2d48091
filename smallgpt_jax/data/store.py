"""The token store: a corpus on disk as two streams of token ids, training and validation.

A store is a folder with:

- `metadata.json` and `tokenizer/`
- one file `SPLIT.bin` per split: token ids of all documents (little-endian uint16, or uint32 for
  large vocabularies)
- one file `SPLIT.documents.bin` per split: the offset of each document in `SPLIT.bin` (int64, in
  tokens)
- in a store of examples, one file `SPLIT.counted.bin` per split: for each token, whether the loss
  counts the prediction of the token after it (uint8)

A document is the tokenizer's begin-of-text id followed by the ids of its text. The end-of-text id
follows if it is another one. The `.bin` files are flat arrays. Random access to them needs no
library. They can be truncated at any token, so that an interrupted preparation can resume.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from smallgpt_jax.data import tokenizer_folder
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import duration, list_names, millions
from smallgpt_jax.storage.cache import local_copy
from smallgpt_jax.storage.json_files import (
    ANYTHING,
    BOOLEAN,
    NUMBER,
    TEXT,
    Each,
    Optional,
    find_mismatch,
    integer,
    one_of,
    read_json,
)

FORMAT = 3
METADATA_FILE = "metadata.json"
SPLITS = ("train", "validation")
MADE_FROM = {
    "source": TEXT,
    "tokenizer": TEXT,
    "text_field": TEXT,
    "text_endings": TEXT,
    "max_document_bytes": integer(1),
    "invalid_utf8": TEXT,
    "invalid_items": TEXT,
    "validation_fraction": NUMBER,
    "format": Optional(TEXT),
    "chat_template": Optional(TEXT),
}
# Fields that were added later, with their defaults; these do not change the names of stores in the
# cache.
LATER_FIELDS = (("format", "text"), ("chat_template", ""))
# What the tokenizer cannot encode: tokens that stand for unknown characters, and characters without
# a token.
UNENCODED = ("unknown", "dropped")
# Counted for each split while it is written.
COUNTS = ("tokens", "documents", "text_bytes", *UNENCODED)
METADATA = {
    "format": one_of(FORMAT),
    "made_from": MADE_FROM,
    "vocab_size": integer(1),
    "end_of_text": integer(0),
    "begin_of_text": integer(0),
    "dtype": one_of("uint16", "uint32"),
    "skipped": Each(integer(1)),  # reason → number of items
    "splits": {
        name: {"tokens": integer(1), "documents": integer(1), "text_bytes": integer(1)}
        for name in SPLITS
    },
    "fingerprints": {name: TEXT for name in SPLITS},
    # only in stores of texts that the tokenizer cannot encode completely
    "unencoded": Optional({name: dict.fromkeys(UNENCODED, integer(0)) for name in SPLITS}),
    # only in stores of plain text, whose files are split into passages
    "plain_text": Optional(
        {
            "split_by_file": BOOLEAN,
            "files": integer(1),
            "passages": integer(1),
            "validation_files": [TEXT],
        }
    ),
}
# Of each split, so many samples are checked when the store is opened: reading all ids of a large one
# would take minutes. `Split.check_ids` also checks each batch.
_SAMPLES, _SAMPLE_TOKENS = 50, 2000
_FIX = "remove the folder and rerun smallgpt_jax.prepare"
# Endings of the files of a split.
TOKENS, DOCUMENTS, COUNTED = _ENDINGS = (".bin", ".documents.bin", ".counted.bin")
STORE_FILES = (
    METADATA_FILE,
    "tokenizer",
    *(f"{split}{ending}" for split in SPLITS for ending in _ENDINGS),
)


def file_sizes(
    dtype: str | np.dtype, has_answers: bool, counts: Mapping[str, int]
) -> dict[str, int]:
    """Returns {ending: size in bytes} of the files of a split."""
    tokens = counts["tokens"]
    sizes = {TOKENS: tokens * np.dtype(dtype).itemsize, DOCUMENTS: counts["documents"] * 8}
    return sizes | {COUNTED: tokens} if has_answers else sizes


def require_size(path: Path, shown: Path, size: int, advice: str) -> None:
    """Raises UserError for a file of another size. `shown`: its folder in messages."""
    if not path.is_file():
        raise UserError(f"{shown / path.name}: file of the token store is missing; {advice}")
    actual = path.stat().st_size
    if actual != size:
        raise UserError(
            f"{shown / path.name}: damaged, has {actual:,} bytes, expected {size:,}; {advice}"
        )


@dataclasses.dataclass(frozen=True)
class Split:
    folder: Path  # always local
    shown: Path  # the folder in messages: that of the store as given, possibly in object storage
    name: str
    tokens: int
    documents: int
    text_bytes: int
    dtype: str
    begin_of_text: int  # the first id of each document
    vocab_size: int
    has_answers: bool = False  # whether the documents are examples
    encodes_all: bool = True  # whether the tokenizer has tokens for all characters of the text

    @property
    def bytes_per_token(self) -> float:
        """Returns NaN for examples, and if the tokenizer cannot encode all of the text."""
        if self.has_answers or not self.encodes_all:
            return math.nan
        return self.text_bytes / self.tokens

    @property
    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each document, (documents,)."""
        return np.diff(np.asarray(self.starts), append=self.tokens)

    @cached_property
    def stream(self) -> np.ndarray:
        """Returns all token ids, (tokens,)."""
        return self._map(TOKENS, self.dtype)

    @cached_property
    def counted(self) -> np.ndarray | None:
        """Returns whether the loss counts the token after each token, (tokens,) bool; None: all."""
        return self._map(COUNTED, bool) if self.has_answers else None

    @cached_property
    def starts(self) -> np.ndarray:
        """Returns the offset of each document in `stream`, (documents,) int64."""
        return self._map(DOCUMENTS, np.int64)

    def _map(self, ending: str, dtype) -> np.ndarray:
        return np.memmap(self.folder / f"{self.name}{ending}", dtype, "r")

    def check_files(self) -> None:
        """Raises UserError for invalid files. Reads only a sample of the ids."""
        counts = {"tokens": self.tokens, "documents": self.documents}
        sizes = file_sizes(self.dtype, self.has_answers, counts)
        for ending, size in sizes.items():
            require_size(self.folder / f"{self.name}{ending}", self.shown, size, _FIX)
        starts = self.starts
        are_ascending = np.all(starts[1:] > starts[:-1])
        if starts[0] or starts[-1] >= self.tokens or not are_ascending:
            path = self.shown / f"{self.name}{DOCUMENTS}"
            raise UserError(f"{path}: damaged, the documents are not in order; {_FIX}")
        step = max(self.tokens // _SAMPLES, _SAMPLE_TOKENS)
        for start in range(0, self.tokens, step):
            sample = self.stream[start : start + _SAMPLE_TOKENS]
            self.check_ids(sample.astype(np.uint32))

    def check_ids(self, ids: np.ndarray) -> None:
        """Raises UserError for a 32-bit id outside the vocabulary: its loss would not be finite."""
        # unsigned, so that a negative id is a large one
        largest = int(np.max(ids.view(np.uint32), initial=0))
        if largest >= self.vocab_size:
            raise UserError(
                f"{self.shown / self.name}{TOKENS}: damaged, has the id {largest}, but its "
                f"vocabulary has only {self.vocab_size}; {_FIX}"
            )


@dataclasses.dataclass(frozen=True)
class TokenStore:
    folder: Path  # as given, possibly in object storage
    metadata: dict
    train: Split
    validation: Split

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = tokenizer_folder.load(self.train.folder / "tokenizer")
        for field in ("vocab_size", "end_of_text", "begin_of_text"):
            recorded, actual = self.metadata[field], getattr(tokenizer, field)
            if recorded != actual:
                raise UserError(
                    f"{self.folder / METADATA_FILE}: {field}: {recorded}, but the store's "
                    f"tokenizer has {actual}; {_FIX}"
                )
        return tokenizer

    def fingerprint(self, split: str) -> str:
        return self.metadata["fingerprints"][split]


def fingerprint(folder: Path, split: str, text_bytes: int) -> str:
    # Bits per byte follow from the loss and `text_bytes`, so stores that differ in it are not equal.
    digest = hashlib.blake2b(str(text_bytes).encode(), digest_size=16)
    for path in (folder / f"{split}{ending}" for ending in _ENDINGS):
        if path.exists():  # only examples have COUNTED
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def open_store(folder: Path, made_from: dict | None = None) -> TokenStore:
    """Opens the store in `folder`. A store in object storage is first copied to the cache folder.

    Raises UserError if the store's format is not FORMAT, if a file is missing or has the wrong
    size, or if the source or a setting is not that of `made_from`; None: any.
    """
    path = folder / METADATA_FILE
    if not path.exists():
        raise UserError(
            f"{folder}: no token store (no {METADATA_FILE}); prepare it with smallgpt_jax.prepare"
        )
    metadata = read_json(path, {"format": ANYTHING}, _FIX)
    if metadata["format"] != FORMAT:
        version = str(metadata["format"])[:40]
        raise UserError(
            f"{folder}: token store of format {version}, expected format {FORMAT}; {_FIX}"
        )
    if mismatch := find_mismatch(metadata, METADATA):
        raise UserError(f"{path}: {mismatch}; {_FIX}")
    require_settings(
        f"config.data.store={str(folder)!r}",
        metadata["made_from"],
        made_from or {},
        "choose another folder, or use the same settings",
    )
    local = local_copy(folder)
    splits = {}
    for name in SPLITS:
        counts = metadata["splits"][name]
        splits[name] = Split(
            folder=local,
            shown=folder,
            name=name,
            tokens=counts["tokens"],
            documents=counts["documents"],
            text_bytes=counts["text_bytes"],
            dtype=metadata["dtype"],
            begin_of_text=metadata["begin_of_text"],
            vocab_size=metadata["vocab_size"],
            has_answers=holds_examples(metadata["made_from"]),
            encodes_all=not _unencoded_share(metadata, name),
        )
        splits[name].check_files()
    return TokenStore(folder, metadata, **splits)


def holds_examples(made_from: dict) -> bool:
    """Returns whether the documents of a store or shard are examples."""
    return made_from.get("format", "text") != "text"


def require_settings(where: str, made_from: dict, wanted: dict, advice: str) -> None:
    """Raises UserError if a store or shard was made with other settings than `wanted`."""
    made_from = {**dict(LATER_FIELDS), **made_from}
    different = [field for field, value in wanted.items() if value != made_from[field]]
    if different:
        before = ", ".join(f"{field}={made_from[field]!r}" for field in different)
        now = ", ".join(f"{field}={wanted[field]!r}" for field in different)
        raise UserError(f"{where}: was made with {before}, but this config has {now}; {advice}")


def _unencoded_share(metadata: dict, split: str) -> float:
    """Returns the fraction of the tokens and of characters without tokens that tell nothing."""
    if "unencoded" not in metadata:
        return 0.0
    counts = metadata["unencoded"][split]
    all_units = metadata["splits"][split]["tokens"] + counts["dropped"]
    return (counts["unknown"] + counts["dropped"]) / all_units


def size_message(store: TokenStore, seconds: float) -> str:
    metadata, train, validation = store.metadata, store.train, store.validation
    lengths = np.concatenate([train.lengths, validation.lengths])
    median, most, longest = np.quantile(lengths, (0.5, 0.95, 1), method="nearest")
    tokens = train.tokens + validation.tokens
    bytes_per_token = (train.text_bytes + validation.text_bytes) / tokens
    lines = [
        f"{metadata['made_from']['source']}: {_format_documents(metadata, len(lengths))}, "
        f"{millions(train.tokens)} tokens for training, "
        f"{millions(validation.tokens)} ({validation.tokens / tokens:.0%}) for validation, "
        f"{bytes_per_token:.2f} bytes per token ({duration(seconds)})",
        f"tokens per document: median {median:,}, 95% at most {most:,}, longest {longest:,}",
    ]
    if "plain_text" in metadata:
        lines.append(_held_out_message(**metadata["plain_text"]))
    if metadata["skipped"]:
        lines.append(f"skipped: {format_skipped(metadata['skipped'])}")
    if warning := unencoded_message([metadata]):
        lines.append(warning)
    return "\n".join(lines)


def _format_documents(metadata: dict, count: int) -> str:
    """Returns such as "74 files, 2,035 passages"."""
    if "plain_text" not in metadata:
        return f"{count:,} documents"
    files, passages = metadata["plain_text"]["files"], metadata["plain_text"]["passages"]
    noun = "file" if files == 1 else "files"
    text = f"{files:,} {noun}, {passages:,} passages"
    return text if passages == count else f"{count:,} documents, of which {text}"


def _held_out_message(
    split_by_file: bool, files: int, passages: int, validation_files: Sequence[str]
) -> str:
    if not split_by_file:
        return (
            "validation: passages of files that are also trained on; with more files, or a larger "
            "config.data.validation_fraction, it would be whole files"
        )
    names = [Path(name).name for name in validation_files]
    return f"validation: {len(names):,} whole files: {list_names(names, limit=5)}"


def unencoded_message(stores: Sequence[dict]) -> str:
    """Returns how much of the text the tokenizer cannot encode, or "". `stores`: their metadata."""
    share = max(_unencoded_share(metadata, split) for metadata in stores for split in SPLITS)
    if not share:
        return ""
    percent = f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
    return (
        f"warning: the tokenizer cannot encode {percent} of the tokens; losses do not compare with "
        "those of other tokenizers, and have no bits per byte: use another config.data.tokenizer"
    )


def format_skipped(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
