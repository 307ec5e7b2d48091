"""Writing the files and the journal of an unfinished token store."""

import os
import time
from collections import Counter
from pathlib import Path

import numpy as np

from smallgpt_jax.data.encoding import EncodedBatch
from smallgpt_jax.data.journal import Entry, Journal
from smallgpt_jax.data.parts import DocumentBatch
from smallgpt_jax.data.store import SPLITS, counted_file, documents_file, tokens_file
from smallgpt_jax.errors import UserError

JOURNAL_SECONDS = 5  # minimum time between writes of the journal


class StoreWriter:
    """Writes the journal after the other files, so it never records more tokens than they contain."""

    def __init__(self, folder: Path, journal: Journal, dtype: np.dtype, has_answers: bool = False):
        self._folder, self._journal = folder, journal
        self._splits = {name: SplitWriter(folder, name, dtype, has_answers, **journal.latest.splits[name])
                        for name in SPLITS}
        self.flush()  # writes the journal, which marks the folder as an unfinished store

    def add(self, batch: DocumentBatch, encoded: dict[str, EncodedBatch]) -> None:
        for name, split in self._splits.items():
            split.add(encoded[name])
        skipped = Counter(self._journal.latest.skipped)
        skipped.update(batch.skipped)
        self._journal.add(Entry(batch.place, batch.digest, batch.done, dict(skipped),
                                   {name: split.counts() for name, split in self._splits.items()}))
        if time.monotonic() - self._flushed > JOURNAL_SECONDS:
            self.flush()

    def flush(self) -> None:
        for split in self._splits.values():
            split.flush()
        self._journal.write(self._folder)
        self._flushed = time.monotonic()

    def close(self) -> None:
        for split in self._splits.values():
            split.close()


class SplitWriter:
    """Truncates the files of one split to the sizes recorded in the journal, then appends documents to the files."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, has_answers: bool, tokens: int, documents: int,
                 text_bytes: int):
        self.tokens, self.documents, self.text_bytes = tokens, documents, text_bytes
        self._tokens_file = open_truncated(tokens_file(folder, name), tokens * dtype.itemsize)
        self._documents_file = open_truncated(documents_file(folder, name), documents * 8)
        self._files = [self._tokens_file, self._documents_file]
        if has_answers:
            self._counted_file = open_truncated(counted_file(folder, name), tokens)
            self._files.append(self._counted_file)

    def add(self, encoded: EncodedBatch) -> None:
        starts = self.tokens + np.cumsum(encoded.lengths) - encoded.lengths
        self._tokens_file.write(encoded.tokens.tobytes())
        self._documents_file.write(starts.tobytes())
        if encoded.counted is not None:
            self._counted_file.write(encoded.counted.tobytes())
        self.tokens += len(encoded.tokens)
        self.documents += len(encoded.lengths)
        self.text_bytes += encoded.text_bytes

    def counts(self) -> dict:
        return {"tokens": self.tokens, "documents": self.documents, "text_bytes": self.text_bytes}

    def flush(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self.flush()
        for file in self._files:
            file.close()


def open_truncated(path: Path, length: int):
    """Opens a file for appending, truncated to `length` bytes. Raises UserError if it is shorter."""
    file = path.open("ab")
    if file.tell() < length:
        raise UserError(f"{path}: damaged, has {file.tell():,} bytes, but the journal beside it records {length:,}; "
                        f"remove {path.parent} and rerun smallgpt_jax.prepare")
    file.truncate(length)
    return file
