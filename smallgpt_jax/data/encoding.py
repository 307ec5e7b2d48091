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
    return int.from_bytes(digest) < fraction * 2**64


class TrainingTexts:
    """The documents of `batches` that are not for validation. `end`: where those read so far end;
    None: at the end.
    """

    def __init__(self, batches: Iterable[DocumentBatch], validation_fraction: float):
        self._batches, self._fraction = batches, validation_fraction
        self.end: Place | None = Place()

    def __iter__(self) -> Iterator[str]:
        for batch in self._batches:
            self.end = batch.place
            yield from (text for text in batch.texts if not is_validation(text, self._fraction))
        self.end = None


class EncodedBatch(NamedTuple):
    tokens: np.ndarray  # (tokens,), with the tokenizer's marks around each document
    lengths: np.ndarray  # (documents,), in tokens, including the marks
    text_bytes: int
    counted: np.ndarray | None = (
        None  # (tokens,) bool: whether the loss counts the token after it; None: text
    )
    unknown: int = 0  # tokens for characters that the tokenizer cannot encode
    dropped: int = 0  # characters without a token


def encode_batch(
    batch: DocumentBatch,
    *,
    tokenizer: Tokenizer,
    dtype,
    validation_fraction: float,
) -> dict[str, EncodedBatch]:
    """Returns a batch per split. A batch with examples has no other texts."""
    are_examples = any(isinstance(text, Example) for text in batch.texts)
    if are_examples:
        documents = [
            ((ids,), counted)
            for ids, counted in (encode_example(text, tokenizer) for text in batch.texts)
        ]
    else:
        begin, end = (
            np.array([tokenizer.begin_of_text], dtype),
            np.array([tokenizer.end_of_text], dtype),
        )
        marked_end = (
            () if begin == end else (end,)
        )  # if equal, the beginning of the next document marks the end
        documents = [((begin, ids, *marked_end), ()) for ids in encode(batch.texts, tokenizer)]
    chosen = {name: [] for name in SPLITS}
    for text, document in zip(batch.texts, documents):
        name = "validation" if is_validation(text, validation_fraction) else "train"
        chosen[name].append((text, *document))
    return {
        name: _join_documents(documents, tokenizer, dtype, are_examples)
        for name, documents in chosen.items()
    }


def _join_documents(
    documents: Sequence[tuple[str, Sequence[np.ndarray], np.ndarray]],
    tokenizer: Tokenizer,
    dtype,
    are_examples: bool,
) -> EncodedBatch:
    """`documents` are texts, their ids in several arrays, and which targets count."""
    ids = [array for _, arrays, _ in documents for array in arrays]
    tokens = np.concatenate(ids or [[]], dtype=dtype, casting="unsafe")
    counted = None
    if are_examples:
        counted = np.concatenate([counted for _, _, counted in documents] or [[]]).astype(bool)
    return EncodedBatch(
        tokens,
        np.array([sum(map(len, arrays)) for _, arrays, _ in documents], np.int64),
        sum(len(text.encode()) for text, _, _ in documents),
        counted,
        0 if tokenizer.unknown is None else int(np.count_nonzero(tokens == tokenizer.unknown)),
        sum(tokenizer.count_dropped(text) for text, _, _ in documents),
    )


def encode(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Returns the token ids of each text. Long texts are encoded in pieces, to limit the memory
    use.
    """
    if all(len(text) <= LONG_TEXT for text in texts):
        return tokenizer.encode(texts)
    return [
        np.concatenate([tokenizer.encode([piece])[0] for piece in _split_long_text(text)])
        for text in texts
    ]


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
            if (
                text[place] == " "
                and text[place - 1].isalnum()
                and text[place + 1 : place + 2].isalnum()
            ):
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
    items, end = iter(items), None
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque()
        try:
            while end is None or waiting:
                while end is None and len(waiting) <= workers + 1:
                    try:
                        item = next(items)
                        waiting.append((item, pool.submit(function, item)))
                    except Exception as error:  # also StopIteration, at the end of `items`
                        end = error
                if waiting:
                    item, result = waiting.popleft()
                    yield item, result.result()
        finally:
            pool.shutdown(cancel_futures=True)
    if not isinstance(end, StopIteration):
        raise end


def log_progress(
    batches: Iterator[tuple[DocumentBatch, dict[str, EncodedBatch]]], first: float, log
) -> Iterator:
    """Yields `batches`. Logs progress from the fraction `first` on, speed and remaining time every
    _PROGRESS_SECONDS.
    """
    started = logged = time.monotonic()
    tokens = 0
    for batch, encoded in batches:
        yield batch, encoded
        tokens += sum(len(split.tokens) for split in encoded.values())
        if time.monotonic() - logged >= _PROGRESS_SECONDS:
            logged = time.monotonic()
            seconds = logged - started
            left = seconds * (1 - batch.done) / (batch.done - first) if batch.done > first else None
            log(
                f"  {batch.done:4.0%}   {millions(tokens)} tokens, {tokens / seconds:,.0f} tokens/s"
                + (f", {duration(left)} left" if left is not None else "")
            )
