"""Tokenizes the text of a source, or of one shard of it, into the files of a token store.

Threads tokenize; the main thread appends tokens in the order of the source.
"""

import contextlib
import errno
import functools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from smallgpt_jax.data import store, tokenizer_folder
from smallgpt_jax.data.encoding import (
    TrainingTexts,
    encode_batch,
    log_progress,
    map_in_order,
    token_dtype,
)
from smallgpt_jax.data.parts import WHOLE, Place, Shard, document_batches, find_start
from smallgpt_jax.data.store_spec import NOT_FREE, StoreSpec
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.data.unfinished_store import (
    JOURNAL_FILE,
    START,
    Entry,
    Journal,
    SplitWriter,
    require_documents,
    resume_journal,
    write_documents,
)
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.atomic import write_atomically


@contextlib.contextmanager
def name_store_in_errors(folder: Path) -> Iterator[None]:
    """Raises UserError if the store cannot be written in the `with` block."""
    try:
        yield
    except OSError as error:
        is_taken = error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY)
        if error.filename2 and is_taken:  # an error of `rename`
            raise UserError(NOT_FREE.format(str(folder))) from None
        if error.filename and folder.parent not in Path(error.filename).parents:
            # the file named in the error belongs to the source or the tokenizer, not to the store
            raise
        raise UserError(
            f"config.data.store: cannot write to {error.filename or folder.parent}: "
            f"{error.strerror}; rerun the same command to resume"
        ) from None


def write_store(partial: Path, spec: StoreSpec, workers: int, log) -> None:
    """Writes a store to `partial`, or resumes the unfinished store there."""
    started = time.monotonic()
    _, latest, tokenizer = write_splits(partial, spec, WHOLE, workers, log)
    write_metadata(partial, spec.made_from, spec.rules.split_by_file, tokenizer, latest)
    log(store.size_message(store.open_store(partial), time.monotonic() - started))


def write_splits(
    partial: Path, spec: StoreSpec, shard: Shard, workers: int, log
) -> tuple[Entry, Entry, Tokenizer]:
    """Writes the tokens of a shard to `partial`, or resumes. Returns the entries of the journal at
    the start and at the end of the shard, and the tokenizer.
    """
    for message in spec.source.messages():
        log(message)
    parts, rules = spec.source.parts, spec.rules
    place, digest = find_start(parts, rules, shard)
    start = START._replace(place=place, digest=digest)
    journal, tokenizer = _resume_or_start(partial, spec, shard, start, log)
    fraction = spec.made_from["validation_fraction"]
    encode = functools.partial(encode_batch, tokenizer=tokenizer, validation_fraction=fraction)
    batches = document_batches(parts, rules, journal.latest.place, shard)
    encoded = log_progress(map_in_order(encode, batches, workers), journal.latest.done, log)
    writers = {
        name: SplitWriter(
            partial, name, token_dtype(tokenizer), store.holds_examples(spec.made_from), counts
        )
        for name, counts in journal.latest.splits.items()
    }
    try:
        write_documents(partial, journal, writers, encoded)
        if shard == WHOLE:  # the shards of a store are checked together
            require_documents(spec.made_from, journal.latest)
    except UserError:
        # If nothing was read, or nothing is left to read, a later preparation has nothing to resume.
        if journal.latest.place in (start.place, Place(len(parts))):
            shutil.rmtree(partial)
        raise
    return start, journal.latest, tokenizer


def _resume_or_start(
    partial: Path, spec: StoreSpec, shard: Shard, start: Entry, log
) -> tuple[Journal, Tokenizer]:
    parts, rules = spec.source.parts, spec.rules
    identity = {
        "format": store.FORMAT,
        "made_from": spec.made_from,
        "texts": spec.source.fingerprint,
        "tokenizer": spec.tokenizer.fingerprint,
        "split_by_file": rules.split_by_file,
    }
    if shard != WHOLE:  # where it starts depends on all sizes, so on changes of the source
        identity["shard"] = [shard.number, shard.count, *start.place]
    if journal := resume_journal(partial, identity, parts, rules, log):
        log(f"resuming {partial}: {journal.latest.done:.0%} done")
        return journal, tokenizer_folder.load(partial / "tokenizer")
    _remove_partial(partial, log)
    if spec.tokenizer.is_trained:
        log(f"training the tokenizer {spec.tokenizer.value} on {spec.source.value}")
    # All shards train it on the same text, from the beginning of the source.
    texts = TrainingTexts(document_batches(parts, rules), spec.made_from["validation_fraction"])
    tokenizer = spec.tokenizer.make(texts)
    tokenizer_folder.save(tokenizer, partial / "tokenizer")
    return Journal(identity, texts.end, start), tokenizer


def write_metadata(
    partial: Path, made_from: dict, split_by_file: bool, tokenizer: Tokenizer, latest: Entry
) -> None:
    """Completes a store, whose splits `latest` describes."""
    splits, unencoded = {}, {}
    for name, counts in latest.splits.items():
        unencoded[name] = {what: counts[what] for what in store.UNENCODED}
        splits[name] = {what: counts[what] for what in ("tokens", "documents", "text_bytes")}
    metadata = {
        "format": store.FORMAT,
        "made_from": made_from,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "begin_of_text": tokenizer.begin_of_text,
        "dtype": token_dtype(tokenizer).name,
        "skipped": dict(sorted(latest.skipped.items())),
        "splits": splits,
        "fingerprints": {
            name: store.fingerprint(partial, name, counts["text_bytes"])
            for name, counts in splits.items()
        },
    }
    if any(any(counts.values()) for counts in unencoded.values()):
        metadata["unencoded"] = unencoded
    if latest.plain_text["passages"]:
        metadata["plain_text"] = {"split_by_file": split_by_file, **latest.plain_text}
    write_atomically(partial / store.METADATA_FILE, json.dumps(metadata, indent=2) + "\n")


def _remove_partial(partial: Path, log) -> None:
    """Raises UserError if the folder contains files that do not belong to an unfinished store."""
    if not partial.exists():
        return
    ours = {
        *store.STORE_FILES,
        JOURNAL_FILE,
        f".{JOURNAL_FILE}.partial",
        f".{store.METADATA_FILE}.partial",
    }
    if not partial.is_dir() or {path.name for path in partial.iterdir()} - ours:
        raise UserError(
            f"{partial}: is reserved for the unfinished store, but contains other files; move it, "
            "or choose another config.data.store"
        )
    if (partial / JOURNAL_FILE).exists():
        why = "because the text or the settings have changed"
        log(f"{partial}: cannot resume, {why}; starting over")
    shutil.rmtree(partial)
