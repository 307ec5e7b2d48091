"""Preparing a token store: sources → tokens, in parallel, continued where it was interrupted.

Documents are tokenized in their order by several threads and written one split after another; a journal says how far it
is. A store is made beside its place, as STORE.partial, and renamed when it is whole.
"""

import functools
import hashlib
import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from smallgpt_jax.data import journal, sources, tokenizers
from smallgpt_jax.data.journal import JOURNAL_FILE, Journal, Progress
from smallgpt_jax.data.store import (
    FORMAT,
    METADATA_FILE,
    SPLITS,
    TokenStore,
    documents_file,
    fingerprint,
    open_made_from,
    tokens_file,
)
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import locked, rename, write_atomically
from smallgpt_jax.formatting import duration, in_millions

JOURNAL_SECONDS = 5  # between two journals
TELL_SECONDS = 10  # between two lines of progress
LONG_TEXT = 1_000_000  # characters; longer documents are tokenized in pieces


def prepare_store(
    folder: Path, *, source: str, tokenizer: str, validation_fraction: float, text_field: str,
    invalid_utf8: str, invalid_items: str, workers: int | None = None, say=print, unfinished: str = "",
) -> TokenStore:
    """Tokenizes a source into a new store at `folder`; it appears whole or not at all.

    Arguments are those of the config's `data` group; `workers` threads (all cores by default)
    tokenize, and the result does not depend on their number. What is done so far is stored beside it, in
    `folder`.partial or what `unfinished` names; interrupted, the same call goes on from there (see
    journal.py). If `folder` is a symbolic link, both are made where that leads. Memory: some 10 MB a
    worker, and a few times the longest document. Raises UserError for all that a source can have wrong,
    and if there is a store made from something else.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"config.data.validation_fraction={validation_fraction}: must be above 0 and "
                        "below 1")
    if workers is not None and workers < 1:
        raise UserError(f"--workers={workers}: must be at least 1")
    rules = sources.Rules(text_field, invalid_utf8, invalid_items)
    made_from = {
        "source": source, "tokenizer": tokenizer, "text_field": text_field, "invalid_utf8": invalid_utf8,
        "invalid_items": invalid_items, "validation_fraction": validation_fraction}
    parts = sources.open_source(source)
    wanted, folder = folder, Path(os.path.realpath(folder))
    refuse_if_taken(folder)
    if around := sources.folder_around(source, folder):
        raise UserError(f"config.data.store={str(folder)!r}: lies inside of {around}, whose files are the "
                        "source; name a folder elsewhere")
    partial = folder.with_name(f"{unfinished or folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{unfinished or folder.name}.lock"), wait=True):
            if not (folder / METADATA_FILE).is_file():  # another process may have made it meanwhile
                make(partial, parts, rules, made_from, workers or os.cpu_count(), say)
                refuse_if_taken(folder)
                rename(partial, folder)
                (folder / JOURNAL_FILE).unlink()
    except OSError as error:
        if error.filename and folder.parent not in Path(error.filename).parents:
            raise  # a source or tokenizer that cannot be read
        raise UserError(f"config.data.store: cannot write to {error.filename or folder.parent}: "
                        f"{error.strerror}. What is done is kept; the same command goes on from there"
                        ) from None
    return open_made_from(wanted, made_from)


def refuse_if_taken(folder: Path) -> None:
    """Raises UserError if `folder` is neither a store nor a place that a finished one can be moved to."""
    if (folder / METADATA_FILE).is_file() or not os.path.lexists(folder):
        return
    if os.path.ismount(folder):
        raise UserError(f"config.data.store={str(folder)!r}: is a mount point, which a finished store cannot replace; "
                        f"name a folder in it: --config.data.store={folder / 'store'}")
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(f"config.data.store={str(folder)!r}: there is something else there already; name "
                        "a new folder")


def make(partial: Path, parts: list[sources.Part], rules: sources.Rules, made_from: dict, workers: int, say,
         ) -> None:
    """Makes a store in `partial`, or goes on with the one that was begun there."""
    fraction = made_from["validation_fraction"]
    identity = {"format": FORMAT, "made_from": made_from, "tokenizer": tokenizers.content(made_from["tokenizer"]),
                "texts": sources.fingerprint(made_from["source"])}
    state = journal.resume(partial, identity, parts, rules, say)
    if state:
        made = tokenizers.load(partial / "tokenizer")
        say(f"going on with {partial}: {state.latest.done:.0%} done")
    else:
        remove_begun(partial, say)
        partial.mkdir()
        if made_from["tokenizer"].startswith("sentencepiece:"):
            say(f"training a tokenizer, {made_from['tokenizer']}, on {made_from['source']}")
        try:
            made, learned = make_tokenizer(made_from["tokenizer"], parts, rules, fraction)
        except UserError:
            shutil.rmtree(partial)
            raise
        tokenizers.save(made, partial / "tokenizer")
        empty = dict(tokens=0, documents=0, text_bytes=0)
        state = Journal(identity, learned, Progress(
            sources.Place(), sources.Digest().hexdigest(), 0.0, {}, {name: empty for name in SPLITS}))

    dtype = np.dtype(np.uint16 if made.vocab_size <= 2**16 else np.uint32)
    writers = {name: SplitWriter(partial, name, dtype, **state.latest.splits[name]) for name in SPLITS}
    skipped = Counter(state.latest.skipped)
    progress = Told(say, state.latest.done)

    def note() -> None:
        for writer in writers.values():
            writer.flush()
        state.write(partial)

    note()  # says from now on whose folder this is
    noted = time.monotonic()
    encode = functools.partial(encode_batch, tokenizer=made, dtype=dtype, validation_fraction=fraction)
    try:
        for batch, encoded in in_order(encode, sources.batches(parts, rules, state.latest.place), workers):
            for name, writer in writers.items():
                writer.add(encoded[name])
            skipped.update(batch.skipped)
            state.add(Progress(batch.place, batch.digest, batch.done, dict(skipped),
                               {name: writer.counts() for name, writer in writers.items()}))
            if time.monotonic() - noted > JOURNAL_SECONDS:
                note()
                noted = time.monotonic()
            progress.update(batch.done, sum(len(part.tokens) for part in encoded.values()))
    except UserError:  # a bad item, or a network that has gone: what is done stays, if it is worth it
        note()
        if state.latest.place == (0, 0):
            shutil.rmtree(partial)
        raise

    for writer in writers.values():
        writer.close()
        if not writer.documents:
            total = sum(other.documents for other in writers.values())
            shutil.rmtree(partial)
            if not total:
                raise UserError(f"config.data.source={made_from['source']!r}: there is no text in it"
                                + (f"; left out: {in_words(skipped)}" if skipped else ""))
            raise UserError(
                f"config.data.source={made_from['source']!r}: of its {total} documents none fell into the "
                f"{writer.name} split (config.data.validation_fraction={fraction}); use more text or "
                "another fraction")
    metadata = {
        "format": FORMAT, "made_from": made_from, "vocab_size": made.vocab_size,
        "end_of_text": made.end_of_text, "dtype": dtype.name, "skipped": dict(sorted(skipped.items())),
        "splits": {name: writer.counts() for name, writer in writers.items()},
        "fingerprints": {name: fingerprint(partial, name, writer.text_bytes) for name, writer in writers.items()}}
    write_atomically(partial / METADATA_FILE, json.dumps(metadata, indent=2) + "\n")
    say(summary(made_from["source"], partial, metadata, progress.seconds()))


def remove_begun(partial: Path, say) -> None:
    """Removes what was begun in `partial` from another source or with other settings.

    Raises UserError if something else is there.
    """
    if not partial.exists():
        return
    ours = {"tokenizer", JOURNAL_FILE, f".{JOURNAL_FILE}.partial", METADATA_FILE, f".{METADATA_FILE}.partial",
            *(file(partial, name).name for file in (tokens_file, documents_file) for name in SPLITS)}
    if not partial.is_dir() or {path.name for path in partial.iterdir()} - ours:
        raise UserError(f"{partial}: is needed while the store is made, and something else is there; move it "
                        "away, or name another config.data.store")
    if (partial / JOURNAL_FILE).exists():
        say(f"{partial}: was begun from another text or with other settings; beginning anew")
    shutil.rmtree(partial)


def make_tokenizer(spec: str, parts: list[sources.Part], rules: sources.Rules, validation_fraction: float,
                   ) -> tuple[Tokenizer, sources.Place | None]:
    """Returns the tokenizer, and the place where what it was trained on ends: None if that is the whole source."""
    learned = sources.Place()

    def texts() -> Iterator[str]:
        nonlocal learned
        for batch in sources.batches(parts, rules):
            learned = batch.place
            yield from (text for text in batch.texts if not is_validation(text, validation_fraction))
        learned = None

    tokenizer = tokenizers.make(spec, texts())
    return tokenizer, learned


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: a hash of its text decides.

    So the split does not depend on the order of documents, and a document that occurs twice is
    never in both splits.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


class Encoded(NamedTuple):
    """Some documents of one split, one after another."""

    tokens: np.ndarray  # (N,), each document's end-of-text first
    lengths: np.ndarray  # (documents,)
    text_bytes: int


def encode_batch(batch: sources.Batch, *, tokenizer: Tokenizer, dtype, validation_fraction: float,
                 ) -> dict[str, Encoded]:
    """The documents of a batch as tokens, by split."""
    ids, text_bytes = {name: [] for name in SPLITS}, dict.fromkeys(SPLITS, 0)
    mark = np.array([tokenizer.end_of_text], dtype)
    for text, document in zip(batch.texts, encode(batch.texts, tokenizer)):
        name = "validation" if is_validation(text, validation_fraction) else "train"
        ids[name].append(document)
        text_bytes[name] += len(text.encode())
    return {name: Encoded(
        np.concatenate([part for document in documents for part in (mark, document)] or [mark[:0]],
                       dtype=dtype, casting="unsafe"),
        np.array([1 + len(document) for document in documents], np.int64), text_bytes[name])
        for name, documents in ids.items()}


def encode(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The ids of each text; of one that is very long, piece by piece, in bounded memory."""
    if all(len(text) <= LONG_TEXT for text in texts):
        return tokenizer.encode(texts)
    return [np.concatenate([tokenizer.encode([piece])[0] for piece in pieces(text)]) for text in texts]


def pieces(text: str) -> Iterator[str]:
    """Cuts a very long text in front of spaces between words, where byte-pair tokens begin anyway
    (so the ids are those of the whole, unless a SentencePiece model puts something in front of each
    text), or, where there are none, anywhere."""
    start = 0
    while len(text) - start > LONG_TEXT:
        end = start + LONG_TEXT
        for place in range(end, end - LONG_TEXT // 2, -1):
            if text[place] == " " and text[place - 1].isalnum() and text[place + 1:place + 2].isalnum():
                end = place
                break
        yield text[start:end]
        start = end
    yield text[start:]


def in_order(function: Callable, items: Iterable, workers: int) -> Iterator[tuple]:
    """Each item and function(item), in the order of the items, `workers` of them computed at a time.

    What getting the items raises is raised when those before it are done. Threads will do: the
    tokenizers' own code runs without Python's lock.
    """
    items, trouble = iter(items), None
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque()
        try:
            while trouble is None or waiting:
                while trouble is None and len(waiting) <= workers + 1:
                    try:
                        item = next(items)
                        waiting.append((item, pool.submit(function, item)))
                    except Exception as error:  # StopIteration too
                        trouble = error
                if waiting:
                    item, result = waiting.popleft()
                    yield item, result.result()
        finally:
            pool.shutdown(cancel_futures=True)
    if not isinstance(trouble, StopIteration):
        raise trouble


class SplitWriter:
    """Writes one split's files, from where they were at the last `flush` that the journal knows."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, tokens: int, documents: int,
                 text_bytes: int):
        self.name, self.tokens, self.documents, self.text_bytes = name, tokens, documents, text_bytes
        self._tokens_file = open_at(tokens_file(folder, name), tokens * dtype.itemsize)
        self._documents_file = open_at(documents_file(folder, name), documents * 8)

    def add(self, encoded: Encoded) -> None:
        starts = self.tokens + np.cumsum(encoded.lengths) - encoded.lengths
        self._tokens_file.write(encoded.tokens.tobytes())
        self._documents_file.write(starts.tobytes())
        self.tokens += len(encoded.tokens)
        self.documents += len(encoded.lengths)
        self.text_bytes += encoded.text_bytes

    def counts(self) -> dict:
        return {"tokens": self.tokens, "documents": self.documents, "text_bytes": self.text_bytes}

    def flush(self) -> None:
        for file in (self._tokens_file, self._documents_file):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self.flush()
        self._tokens_file.close()
        self._documents_file.close()


def open_at(path: Path, length: int):
    """A file, made if need be, cut to its first `length` bytes, open for adding to them."""
    file = path.open("ab")
    file.truncate(length)
    return file


# ---------------------------------------------------------------------- what it tells

class Told:
    """Says every TELL_SECONDS how far a preparation is, how fast, and how long it will take."""

    def __init__(self, say, done: float):
        self._say, self._first, self._tokens = say, done, 0
        self._started = self._told = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def update(self, done: float, tokens: int) -> None:
        self._tokens += tokens
        if time.monotonic() - self._told < TELL_SECONDS:
            return
        self._told = time.monotonic()
        seconds = self.seconds()
        left = seconds * (1 - done) / (done - self._first) if done > self._first else None
        self._say(f"  {done:4.0%}   {in_millions(self._tokens)} tokens, "
                  f"{self._tokens / seconds:,.0f} tokens/s"
                  + (f", {duration(left)} left" if left is not None else ""))


def summary(source: str, folder: Path, metadata: dict, seconds: float) -> str:
    """What a person wants to know of a new store, in a few lines."""
    splits = metadata["splits"]
    starts = [np.append(np.fromfile(documents_file(folder, name), np.int64), splits[name]["tokens"])
              for name in SPLITS]
    lengths = np.concatenate([np.diff(s) for s in starts])
    median, most, longest = (int(x) for x in np.quantile(lengths, (0.5, 0.95, 1), method="nearest"))
    tokens = sum(split["tokens"] for split in splits.values())
    text_bytes = sum(split["text_bytes"] for split in splits.values())
    lines = [f"{source}: {len(lengths):,} documents, {in_millions(splits['train']['tokens'])} tokens for "
             f"training, {in_millions(splits['validation']['tokens'])} for validation, "
             f"{text_bytes / tokens:.2f} bytes a token ({duration(seconds)})",
             f"tokens a document: median {median:,}, 95% have at most {most:,}, the longest {longest:,}"]
    if metadata["skipped"]:
        lines.append(f"left out: {in_words(metadata['skipped'])}")
    return "\n".join(lines)


def in_words(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
