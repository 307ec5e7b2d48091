"""Writes an unfinished token store: threads tokenize, the main thread appends tokens in the order of the source."""

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from smallgpt_jax.data import tokenizers
from smallgpt_jax.data.encoding import encode_batch, is_validation, map_in_order
from smallgpt_jax.data.journal import JOURNAL_FILE, Entry, Journal, resume_journal
from smallgpt_jax.data.parts import Digest, Place, document_batches
from smallgpt_jax.data.preparation_log import PreparationLog, format_skipped
from smallgpt_jax.data.store import (
    FORMAT,
    METADATA_FILE,
    SPLITS,
    counted_file,
    documents_file,
    fingerprint,
    tokens_file,
)
from smallgpt_jax.data.store_spec import StoreSpec
from smallgpt_jax.data.store_writer import StoreWriter
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.atomic import write_atomically


def write_store(partial: Path, spec: StoreSpec, workers: int, log) -> None:
    """Writes a store to `partial`, or resumes the unfinished store there."""
    tokenizer, journal = resume_or_start(partial, spec, log)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    encode = functools.partial(encode_batch, tokenizer=tokenizer, dtype=dtype,
                               validation_fraction=spec.made_from["validation_fraction"])
    writer = StoreWriter(partial, journal, dtype, has_answers=spec.made_from["format"] != "text")
    progress = PreparationLog(log, journal.latest.done)
    try:
        batches = document_batches(spec.source.parts, spec.rules, journal.latest.place)
        for batch, encoded in map_in_order(encode, batches, workers):
            writer.add(batch, encoded)
            progress.update(batch.done, sum(len(split.tokens) for split in encoded.values()))
    except UserError:  # an invalid item or a network error: keep the progress, if any
        writer.flush()
        if journal.latest.place == (0, 0):
            shutil.rmtree(partial)
        raise
    writer.close()

    splits, skipped = journal.latest.splits, journal.latest.skipped
    try:
        require_documents(spec, splits, skipped)
    except UserError:
        shutil.rmtree(partial)
        raise
    metadata = {
        "format": FORMAT, "made_from": spec.made_from, "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text, "begin_of_text": tokenizer.begin_of_text, "dtype": dtype.name,
        "skipped": dict(sorted(skipped.items())), "splits": splits,
        "fingerprints": {name: fingerprint(partial, name, counts["text_bytes"]) for name, counts in splits.items()}}
    write_atomically(partial / METADATA_FILE, json.dumps(metadata, indent=2) + "\n")
    progress.finish(partial, metadata)


def resume_or_start(partial: Path, spec: StoreSpec, log) -> tuple[Tokenizer, Journal]:
    identity = {"format": FORMAT, "made_from": spec.made_from, "texts": spec.source.fingerprint,
                "tokenizer": spec.tokenizer.fingerprint}
    if journal := resume_journal(partial, identity, spec.source.parts, spec.rules, log):
        log(f"resuming {partial}: {journal.latest.done:.0%} done")
        return tokenizers.load(partial / "tokenizer"), journal
    remove_partial(partial, log)
    partial.mkdir()
    if spec.tokenizer.is_trained:
        log(f"training the tokenizer {spec.tokenizer.value} on {spec.source}")
    try:
        tokenizer, tokenizer_text_end = make_tokenizer(spec)
    except UserError:
        shutil.rmtree(partial)
        raise
    tokenizers.save(tokenizer, partial / "tokenizer")
    empty = dict(tokens=0, documents=0, text_bytes=0)
    return tokenizer, Journal(identity, tokenizer_text_end, Entry(
        Place(), Digest().hexdigest(), 0.0, {}, {name: empty for name in SPLITS}))


def require_documents(spec: StoreSpec, splits: dict[str, dict], skipped: dict[str, int]) -> None:
    total = sum(counts["documents"] for counts in splits.values())
    if not total:
        raise UserError(f"config.data.source={spec.source.value!r}: contains no text"
                        + (f" (skipped: {format_skipped(skipped)})" if skipped else ""))
    for name, counts in splits.items():
        if not counts["documents"]:
            raise UserError(
                f"config.data.source={spec.source.value!r}: none of its {total} documents is in the {name} split "
                f"(config.data.validation_fraction={spec.made_from['validation_fraction']}); use more text, or another "
                "fraction")


def remove_partial(partial: Path, log) -> None:
    """Raises UserError if the folder contains files that do not belong to an unfinished store."""
    if not partial.exists():
        return
    ours = {"tokenizer", JOURNAL_FILE, f".{JOURNAL_FILE}.partial", METADATA_FILE, f".{METADATA_FILE}.partial",
            *(file(partial, name).name for file in (tokens_file, documents_file, counted_file) for name in SPLITS)}
    if not partial.is_dir() or {path.name for path in partial.iterdir()} - ours:
        raise UserError(f"{partial}: is reserved for the unfinished store, but contains other files; move it, or "
                        "choose another config.data.store")
    if (partial / JOURNAL_FILE).exists():
        log(f"{partial}: cannot resume, because the text or the settings have changed; starting over")
    shutil.rmtree(partial)


def make_tokenizer(spec: StoreSpec) -> tuple[Tokenizer, Place | None]:
    """Returns the tokenizer, and where its training text ends; None: at the end of the source."""
    tokenizer_text_end = Place()

    def texts() -> Iterator[str]:
        nonlocal tokenizer_text_end
        for batch in document_batches(spec.source.parts, spec.rules):
            tokenizer_text_end = batch.place
            yield from (text for text in batch.texts if not is_validation(text, spec.made_from["validation_fraction"]))
        tokenizer_text_end = None

    tokenizer = spec.tokenizer.make(texts())
    return tokenizer, tokenizer_text_end
