"""Tokenizing documents in parallel, and assigning them to splits."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from smallgpt_jax.data.parts import DocumentBatch, Passage, Place
from smallgpt_jax.data.prompts import Example, encode_example
from smallgpt_jax.data.store import SPLITS
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.formatting import duration, millions

_PROGRESS_SECONDS = 10  # minimum time between progress messages
LONG_TEXT = 1_000_000  # characters; longer documents are split before tokenization


def is_validation(text: str, fraction: float) -> bool:
    """Depends only on a hash of the text, or of the beginning of its file, so the order of documents
    has no effect and duplicates share a split.
    """
    key = text.key if isinstance(text, Passage) else text
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64  # hashes are uniform below 2⁶⁴


class TrainingTexts:
    """The documents of `batches` that are not for validation."""

    def __init__(self, batches: Iterable[DocumentBatch], validation_fraction: float):
        self._batches, self._fraction = batches, validation_fraction
        # Where the documents read so far end; None: at the end of the source.
        self.end: Place | None = Place()

    def __iter__(self) -> Iterator[str]:
        for batch in self._batches:
            self.end = batch.place
            yield from (text for text in batch.texts if not is_validation(text, self._fraction))
        self.end = None


class EncodedBatch(NamedTuple):
    tokens: np.ndarray  # (tokens,), with the tokenizer's marks around each document
    lengths: np.ndarray  # (documents,), in tokens, including the marks
    # (tokens,) bool: whether the loss counts the token after it; None: it counts all
    counted: np.ndarray | None
    counts: dict[str, int]  # as in store.COUNTS


class _Document(NamedTuple):
    text: str
    ids: np.ndarray  # (tokens,), with the marks
    counted: np.ndarray | None = None  # as in EncodedBatch


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def encode_batch(
    batch: DocumentBatch, *, tokenizer: Tokenizer, validation_fraction: float
) -> dict[str, EncodedBatch]:
    """Returns a batch per split. A batch with examples has no other texts."""
    are_examples = any(isinstance(text, Example) for text in batch.texts)
    if are_examples:
        documents = [_Document(text, *encode_example(text, tokenizer)) for text in batch.texts]
    else:
        begin, end = [tokenizer.begin_of_text], [tokenizer.end_of_text]
        # If they are equal, the beginning of the next document marks the end.
        marked_end = [] if begin == end else [end]
        documents = []
        for text, ids in zip(batch.texts, encode(batch.texts, tokenizer)):
            arrays = [begin, ids, *marked_end]
            ids = np.concatenate(arrays, dtype=token_dtype(tokenizer), casting="unsafe")
            documents.append(_Document(text, ids))
    of_split = {name: [] for name in SPLITS}
    for document in documents:
        is_held_out = is_validation(document.text, validation_fraction)
        of_split["validation" if is_held_out else "train"].append(document)
    return {
        name: _join_documents(documents, tokenizer, are_examples)
        for name, documents in of_split.items()
    }


def _join_documents(
    documents: Sequence[_Document], tokenizer: Tokenizer, are_examples: bool
) -> EncodedBatch:
    ids = [document.ids for document in documents]
    # np.concatenate needs an array, but a batch may have no document of this split.
    tokens = np.concatenate([[], *ids], dtype=token_dtype(tokenizer), casting="unsafe")
    lengths = np.array([len(array) for array in ids], np.int64)
    counted = None
    if are_examples:
        counted = np.concatenate([[], *(document.counted for document in documents)]).astype(bool)
    counts = {
        "tokens": len(tokens),
        "documents": len(documents),
        "text_bytes": sum(len(document.text.encode()) for document in documents),
        "unknown": 0,
        "dropped": sum(tokenizer.count_dropped(document.text) for document in documents),
    }
    if tokenizer.unknown is not None:
        counts["unknown"] = int(np.count_nonzero(tokens == tokenizer.unknown))
    return EncodedBatch(tokens, lengths, counted, counts)


def encode(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Returns the token ids of each text. Long ones are encoded in pieces, to limit the memory."""
    if max(map(len, texts), default=0) <= LONG_TEXT:
        return tokenizer.encode(texts)
    encoded = []
    for text in texts:
        pieces = [tokenizer.encode([piece])[0] for piece in _split_long_text(text)]
        encoded.append(np.concatenate(pieces))
    return encoded


def _split_long_text(text: str) -> Iterator[str]:
    """Splits a text into pieces of at most LONG_TEXT characters, if possible in front of a space
    between two words.

    No byte-pair token crosses such a split, so the pieces together have the same ids as the whole
    text. The ids can differ if there is no such space, or if a SentencePiece model prepends a space
    to each piece.
    """
    start = 0
    while len(text) - start > LONG_TEXT:
        end = start + LONG_TEXT
        for place in range(end, end - LONG_TEXT // 2, -1):
            before, char, after = text[place - 1], text[place], text[place + 1 : place + 2]
            if char == " " and before.isalnum() and after.isalnum():
                end = place
                break
        yield text[start:end]
        start = end
    yield text[start:]


def map_in_order(function: Callable, items: Iterable, workers: int) -> Iterator[tuple]:
    """Yields (item, function(item)) for each item, in order. `workers` threads compute the
    function.

    If `items` raises an error, the results of the preceding items are yielded first. Threads
    suffice because the tokenizers release the GIL.
    """
    items = iter(items)
    end = None  # the exception that has ended `items`: StopIteration, or an error
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque()  # (item, future), in the order of the items
        try:
            while end is None or waiting:
                # More than threads, so that none idles while the caller has the oldest result.
                while end is None and len(waiting) < workers + 2:
                    try:
                        item = next(items)
                        waiting.append((item, pool.submit(function, item)))
                    except Exception as error:
                        end = error
                if waiting:
                    item, future = waiting.popleft()
                    yield item, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
    if not isinstance(end, StopIteration):
        raise end


def log_progress(
    batches: Iterator[tuple[DocumentBatch, dict[str, EncodedBatch]]], first: float, log
) -> Iterator:
    """Yields `batches`. Logs progress from the fraction `first` on, speed and remaining time."""
    started = logged = time.monotonic()
    tokens = 0
    for batch, encoded in batches:
        yield batch, encoded
        tokens += sum(split.counts["tokens"] for split in encoded.values())
        if time.monotonic() - logged >= _PROGRESS_SECONDS:
            logged = time.monotonic()
            seconds = logged - started
            message = f"  {batch.done:4.0%}   {millions(tokens)} tokens"
            message += f", {tokens / seconds:,.0f} tokens/s"
            if batch.done > first:
                left = seconds * (1 - batch.done) / (batch.done - first)
                message += f", {duration(left)} left"
            log(message)
