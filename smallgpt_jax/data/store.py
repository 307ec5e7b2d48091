"""The token store: a corpus as two random-access streams of token ids, train and validation.

A store is a folder: `metadata.json`, `tokenizer/`, and for each split ArrayRecord files whose
records hold RECORD_TOKENS ids each (the last one fewer), as uint16 where the vocabulary allows.
A document is its end-of-text id followed by its tokens, so that borders can be read off the stream.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from smallgpt_jax.data import sources, tokenizers
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError

FORMAT = 1
METADATA_FILE = "metadata.json"
SPLITS = ("train", "validation")
RECORD_TOKENS = 2048
RECORDS_PER_FILE = 50_000  # 102 million tokens
ENCODE_BYTES = 4_000_000  # text that is tokenized in one go, on all cores


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a store, open for reading. Picklable."""

    files: tuple[str, ...]
    tokens: int
    documents: int
    text_bytes: int
    dtype: str

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / self.tokens

    @cached_property
    def _records(self) -> grain.sources.ArrayRecordDataSource:
        return grain.sources.ArrayRecordDataSource(list(self.files))

    def read(self, starts_N: np.ndarray, length: int) -> np.ndarray:
        """The tokens from each of `starts_N` on, (N, length) int32.

        Each read record is decoded once, whatever the number of windows that touch it.
        """
        spans = [(start // RECORD_TOKENS, (start + length - 1) // RECORD_TOKENS)
                 for start in map(int, starts_N)]
        indices = sorted({i for first, last in spans for i in range(first, last + 1)})
        records = dict(zip(indices, (np.frombuffer(record, self.dtype)
                                     for record in self._records.__getitems__(indices))))
        windows_NxT = np.empty((len(spans), length), np.int32)
        for row, start, (first, last) in zip(windows_NxT, map(int, starts_N), spans):
            covering = (records[first] if first == last
                        else np.concatenate([records[i] for i in range(first, last + 1)]))
            offset = start - first * RECORD_TOKENS
            row[:] = covering[offset:offset + length]
        return windows_NxT


@dataclasses.dataclass(frozen=True)
class TokenStore:
    folder: Path
    made_from: dict  # the arguments of `prepare` but the folder
    tokenizer: Tokenizer
    train: Split
    validation: Split


def open_store(folder: Path) -> TokenStore:
    """Opens the store in `folder`. Raises UserError if it is not one, or one of another format."""
    try:
        metadata = json.loads((folder / METADATA_FILE).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / METADATA_FILE}: not the description of a token store ({error})") from None
    if metadata.get("format") != FORMAT:
        raise UserError(f"{folder}: a token store of format {metadata.get('format')}, this version "
                        f"reads format {FORMAT}; make it again with smallgpt_jax.prepare")
    splits = {}
    for name in SPLITS:
        fields = metadata["splits"][name]
        files = [folder / file for file in fields["files"]]
        if missing := [file for file in files if not file.is_file()]:
            raise UserError(f"{missing[0]}: this part of the token store is missing; make the store "
                            "again with smallgpt_jax.prepare")
        splits[name] = Split(
            tuple(map(str, files)), fields["tokens"], fields["documents"], fields["text_bytes"],
            metadata["dtype"])
    return TokenStore(folder, metadata["made_from"], tokenizers.load(folder / "tokenizer"), **splits)


def prepare(
    folder: Path, *, source: str, tokenizer: str, validation_fraction: float, text_field: str,
    invalid_utf8: str, say=print,
) -> TokenStore:
    """Tokenizes a source into a new store at `folder`; it appears whole or not at all.

    Arguments are those of the config's `data` group. Raises UserError for all that a source can
    have wrong. Cost: the text is read twice if SentencePiece has to be trained; memory is bounded
    by the longest document.
    """
    def texts():
        return sources.documents(source, text_field, invalid_utf8)

    if not 0 < validation_fraction < 1:
        raise UserError(f"config.data.validation_fraction={validation_fraction}: must be above 0 and "
                        "below 1")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"config.data.store={str(folder)!r}: there is something else there already; name "
                        "a new folder")
    started = time.monotonic()
    if tokenizer.startswith("sentencepiece:"):
        say(f"training a tokenizer, {tokenizer}, on {source}")
    made = tokenizers.make(
        tokenizer, (text for text in texts() if not is_validation(text, validation_fraction)))

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UserError(f"config.data.store: cannot write to {folder.parent}: {error.strerror}") from None
    try:
        tokenizers.save(made, partial / "tokenizer")
        dtype = np.uint16 if made.vocab_size <= 2**16 else np.uint32
        writers = {name: SplitWriter(partial, name, dtype) for name in SPLITS}
        tokenize(texts(), made, writers, validation_fraction, say)
        for writer in writers.values():
            writer.close()
            if not writer.documents:
                total = sum(other.documents for other in writers.values())
                raise UserError(
                    f"config.data.source={source!r}: of its {total} documents none fell into the "
                    f"{writer.name} split (config.data.validation_fraction={validation_fraction}); "
                    "use more text or another fraction")
        metadata = {
            "format": FORMAT,
            "made_from": {
                "source": source, "tokenizer": tokenizer, "text_field": text_field,
                "validation_fraction": validation_fraction, "invalid_utf8": invalid_utf8},
            "vocab_size": made.vocab_size, "end_of_text": made.end_of_text,
            "dtype": np.dtype(dtype).name, "splits": {n: w.summary() for n, w in writers.items()}}
        (partial / METADATA_FILE).write_text(json.dumps(metadata, indent=2) + "\n")
        partial.chmod(0o755)
        if not (folder / METADATA_FILE).is_file():  # another run may have made it meanwhile
            os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(partial, ignore_errors=True)
    store = open_store(folder)
    say(f"{source}: {store.train.documents + store.validation.documents:,} documents, "
        f"{store.train.tokens / 1e6:.2f} M tokens for training, "
        f"{store.validation.tokens / 1e6:.2f} M for validation, "
        f"{store.train.bytes_per_token:.2f} bytes a token ({time.monotonic() - started:.0f} s)")
    return store


def tokenize(texts: Iterable[str], tokenizer: Tokenizer, writers: dict[str, "SplitWriter"],
             validation_fraction: float, say) -> None:
    """Writes the tokens of each text to the split it belongs to; says every ten seconds how it goes."""
    started = told = time.monotonic()
    for batch in batches_of_texts(texts):
        for text, ids in zip(batch, tokenizer.encode(batch)):
            split = "validation" if is_validation(text, validation_fraction) else "train"
            writers[split].add(tokenizer.end_of_text, ids, text_bytes=len(text.encode()))
        if time.monotonic() - told > 10:
            told = time.monotonic()
            tokens = sum(writer.tokens for writer in writers.values())
            say(f"  {tokens / 1e6:,.1f} M tokens, {tokens / (told - started):,.0f} tokens/s")


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: a hash of its text decides.

    So the split does not depend on the order of documents, and a document that occurs twice is
    never in both splits.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def batches_of_texts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Groups texts into lists of about ENCODE_BYTES."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= ENCODE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class SplitWriter:
    """Writes one split's stream of tokens: full records as they fill up, the rest at `close`."""

    def __init__(self, folder: Path, name: str, dtype):
        self.name, self.tokens, self.documents, self.text_bytes = name, 0, 0, 0
        self._folder, self._dtype = folder, dtype
        self._pending = np.empty(0, dtype)
        self._records = 0
        self._files: list[str] = []
        self._writer = None

    def add(self, end_of_text: int, ids, text_bytes: int) -> None:
        ids = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else ids
        document = np.concatenate([[end_of_text], ids]).astype(self._dtype)
        self.documents += 1
        self.tokens += len(document)
        self.text_bytes += text_bytes
        self._pending = np.concatenate([self._pending, document])
        full = len(self._pending) // RECORD_TOKENS * RECORD_TOKENS
        for record in self._pending[:full].reshape(-1, RECORD_TOKENS):
            self._write(record)
        self._pending = self._pending[full:]

    def close(self) -> None:
        if len(self._pending):
            self._write(self._pending)
        if self._writer:
            self._writer.close()

    def summary(self) -> dict:
        return {"tokens": self.tokens, "documents": self.documents, "text_bytes": self.text_bytes,
                "files": self._files}

    def _write(self, record: np.ndarray) -> None:
        if self._records % RECORDS_PER_FILE == 0:
            if self._writer:
                self._writer.close()
            self._files.append(f"{self.name}-{len(self._files):05d}.array_record")
            self._writer = ArrayRecordWriter(
                str(self._folder / self._files[-1]), "group_size:1,uncompressed")
        self._writer.write(record.tobytes())
        self._records += 1
