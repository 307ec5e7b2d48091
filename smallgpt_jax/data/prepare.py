"""Prepares token stores from text. An interrupted preparation can be resumed.

A store is written to the folder STORE.partial, which is renamed to STORE on completion. A store in
object storage is prepared in the cache folder and then uploaded. Threads tokenize; the main thread
appends tokens in the order of the source.
"""

import contextlib
import dataclasses
import errno
import functools
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from smallgpt_jax.data import tokenizer_folder
from smallgpt_jax.data.encoding import TrainingTexts, encode_batch, log_progress, map_in_order
from smallgpt_jax.data.parts import Place, document_batches
from smallgpt_jax.data.store import (
    FORMAT,
    METADATA_FILE,
    STORE_FILES,
    UNENCODED,
    TokenStore,
    fingerprint,
    open_store,
    size_message,
)
from smallgpt_jax.data.store_spec import NOT_FREE, StoreSpec
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.data.unfinished_store import (
    JOURNAL_FILE,
    Journal,
    SplitWriter,
    require_documents,
    resume_journal,
    write_documents,
)
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.atomic import rename, write_atomically
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.storage.object_storage import is_remote, upload_folder


def prepare_store(spec: StoreSpec, workers: int | None = None, log=print) -> TokenStore:
    """Prepares the token store of `spec`, or resumes its preparation (see unfinished_store.py).

    `workers` is the number of tokenizer threads (None: one per core); the content of the store does
    not depend on it. The preparation needs about 10 MB of memory per worker, plus a few times the
    size of the longest document. Raises UserError if another process has made a store with another
    source or settings meanwhile.
    """
    spec.check()
    folder, partial = spec.real_folder, spec.partial
    lock = partial.with_name(f".{partial.stem}.lock")
    # Another process may finish or upload the store while this one waits for the lock.
    if is_remote(folder):
        local = prepare_store(dataclasses.replace(spec, store=""), workers, log)
        with file_lock(lock, wait=True):
            if not (folder / METADATA_FILE).is_file():
                log(f"uploading {local.folder} to {folder}")
                upload_folder(local.folder, folder, last=METADATA_FILE)
                return dataclasses.replace(local, folder=folder)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _name_store_in_errors(folder), file_lock(lock, wait=True):
            if not (folder / METADATA_FILE).is_file():
                write_store(partial, spec, workers or os.cpu_count(), log)
                rename(partial, folder)
                (folder / JOURNAL_FILE).unlink()
    return open_store(spec.folder, spec.made_from)


@contextlib.contextmanager
def _name_store_in_errors(folder: Path) -> Iterator[None]:
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
    for message in spec.source.messages():
        log(message)
    parts, rules = spec.source.parts, spec.rules
    journal, tokenizer = _resume_or_start(partial, spec, log)
    started = time.monotonic()
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    encode = functools.partial(
        encode_batch,
        tokenizer=tokenizer,
        dtype=dtype,
        validation_fraction=spec.made_from["validation_fraction"],
    )
    batches = document_batches(parts, rules, journal.latest.place)
    encoded = log_progress(map_in_order(encode, batches, workers), journal.latest.done, log)
    writers = {
        name: SplitWriter(partial, name, dtype, rules.format != "text", counts)
        for name, counts in journal.latest.splits.items()
    }
    try:
        write_documents(partial, journal, writers, encoded)
        require_documents(journal)
    except UserError:
        # If nothing was read, or nothing is left to read, there is nothing to resume.
        if journal.latest.place in (Place(), Place(len(parts))):
            shutil.rmtree(partial)
        raise
    metadata = _describe(partial, spec, tokenizer, dtype, journal)
    write_atomically(partial / METADATA_FILE, json.dumps(metadata, indent=2) + "\n")
    log(size_message(partial, metadata, time.monotonic() - started))


def _resume_or_start(partial: Path, spec: StoreSpec, log) -> tuple[Journal, Tokenizer]:
    parts, rules = spec.source.parts, spec.rules
    identity = {
        "format": FORMAT,
        "made_from": spec.made_from,
        "texts": spec.source.fingerprint,
        "tokenizer": spec.tokenizer.fingerprint,
        "split_by_file": rules.split_by_file,
    }
    if journal := resume_journal(partial, identity, parts, rules, log):
        log(f"resuming {partial}: {journal.latest.done:.0%} done")
        return journal, tokenizer_folder.load(partial / "tokenizer")
    _remove_partial(partial, log)
    if spec.tokenizer.is_trained:
        log(f"training the tokenizer {spec.tokenizer.value} on {spec.source.value}")
    texts = TrainingTexts(document_batches(parts, rules), spec.made_from["validation_fraction"])
    tokenizer = spec.tokenizer.make(texts)
    tokenizer_folder.save(tokenizer, partial / "tokenizer")
    return Journal(identity, texts.end), tokenizer


def _describe(
    partial: Path, spec: StoreSpec, tokenizer: Tokenizer, dtype: np.dtype, journal: Journal
) -> dict:
    """Returns the metadata of a store (METADATA in store.py)."""
    splits, unencoded = {}, {}
    for name, counts in journal.latest.splits.items():
        unencoded[name] = {what: counts[what] for what in UNENCODED}
        splits[name] = {what: count for what, count in counts.items() if what not in UNENCODED}
    metadata = {
        "format": FORMAT,
        "made_from": spec.made_from,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "begin_of_text": tokenizer.begin_of_text,
        "dtype": dtype.name,
        "skipped": dict(sorted(journal.latest.skipped.items())),
        "splits": splits,
        "fingerprints": {
            name: fingerprint(partial, name, counts["text_bytes"])
            for name, counts in splits.items()
        },
    }
    if any(any(counts.values()) for counts in unencoded.values()):
        metadata["unencoded"] = unencoded
    plain_text = journal.latest.plain_text
    if plain_text["passages"]:
        metadata["plain_text"] = {"split_by_file": spec.rules.split_by_file, **plain_text}
    return metadata


def _remove_partial(partial: Path, log) -> None:
    """Raises UserError if the folder contains files that do not belong to an unfinished store."""
    if not partial.exists():
        return
    ours = {*STORE_FILES, JOURNAL_FILE, f".{JOURNAL_FILE}.partial", f".{METADATA_FILE}.partial"}
    if not partial.is_dir() or {path.name for path in partial.iterdir()} - ours:
        raise UserError(
            f"{partial}: is reserved for the unfinished store, but contains other files; move it, "
            "or choose another config.data.store"
        )
    if (partial / JOURNAL_FILE).exists():
        why = "because the text or the settings have changed"
        log(f"{partial}: cannot resume, {why}; starting over")
    shutil.rmtree(partial)
