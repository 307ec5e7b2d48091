"""Prepares a token store from a text source, in parallel. An interrupted preparation can be resumed.

Worker threads tokenize the documents. The main thread appends the tokens to the files of each split, in the order of
the source. A journal records the progress. The store is written to the folder STORE.partial, which is renamed to STORE
on completion.
"""

import functools
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from smallgpt_jax.data import sources, tokenizers
from smallgpt_jax.data.encoding import encode_batch, is_validation, map_in_order
from smallgpt_jax.data.journal import JOURNAL_FILE, Journal, Progress, resume_journal
from smallgpt_jax.data.parts import Digest, Part, Place, Rules, document_batches
from smallgpt_jax.data.store import (
    FORMAT,
    METADATA_FILE,
    SPLITS,
    TokenStore,
    documents_file,
    fingerprint,
    open_matching_store,
    tokens_file,
)
from smallgpt_jax.data.store_writer import StoreWriter
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import duration, millions
from smallgpt_jax.storage.files import file_lock, rename, write_atomically

PROGRESS_SECONDS = 10  # minimum time between progress lines


def prepare_store(
    folder: Path, *, source: str, tokenizer: str, validation_fraction: float, text_field: str, text_endings: str,
    max_document_bytes: int, invalid_utf8: str, invalid_items: str, workers: int | None = None, log=print,
    unfinished: str = "",
) -> TokenStore:
    """Returns the token store at `folder`. If the store does not exist, prepares it first from `source`, atomically.

    After an interruption, the same call resumes the preparation (see journal.py). The preparation needs about 10 MB of
    memory per worker, plus a few times the size of the longest document.

    Args:
        folder: the folder of the store. A symbolic link is resolved first. The unfinished store is beside this folder.
        workers: the number of tokenizer threads; None: one per core. The content of the store does not depend on this
            number.
        unfinished: the name of the unfinished store's folder, without ".partial". "" stands for the name of `folder`.

    The other arguments are fields of the config's `data` group. Raises UserError if the source or a setting is invalid,
    or if the existing store was made from another source or with other settings.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"config.data.validation_fraction={validation_fraction}: must be above 0 and "
                        "below 1")
    if workers is not None and workers < 1:
        raise UserError(f"--workers={workers}: must be at least 1")
    rules = Rules(text_field, invalid_utf8, invalid_items, max_document_bytes)
    made_from = {
        "source": source, "tokenizer": tokenizer, "text_field": text_field, "text_endings": text_endings,
        "max_document_bytes": max_document_bytes, "invalid_utf8": invalid_utf8, "invalid_items": invalid_items,
        "validation_fraction": validation_fraction}
    parts = sources.open_source(source, text_endings)
    given_folder, folder = folder, Path(os.path.realpath(folder))
    require_free_path(folder)
    if enclosing := sources.find_enclosing_folder(source, folder):
        raise UserError(f"config.data.store={str(folder)!r}: is inside {enclosing}, a folder of the source; choose a "
                        "folder outside of it")
    partial = folder.with_name(f"{unfinished or folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.with_name(f".{unfinished or folder.name}.lock"), wait=True):
            if not (folder / METADATA_FILE).is_file():  # another process may have finished the store meanwhile
                for message in sources.folder_messages(source, text_endings):
                    log(message)
                write_store(partial, parts, rules, made_from, workers or os.cpu_count(), log)
                require_free_path(folder)
                rename(partial, folder)
                (folder / JOURNAL_FILE).unlink()
    except OSError as error:
        if error.filename and folder.parent not in Path(error.filename).parents:
            raise  # the file named in the error belongs to the source or the tokenizer, not to the store
        raise UserError(f"config.data.store: cannot write to {error.filename or folder.parent}: "
                        f"{error.strerror}; rerun the same command to resume") from None
    return open_matching_store(given_folder, made_from)


def require_free_path(folder: Path) -> None:
    """Raises UserError if something other than a store or an empty folder exists at `folder`.

    A mount point is refused even if it is empty, because a finished store cannot be renamed to it.
    """
    if (folder / METADATA_FILE).is_file() or not os.path.lexists(folder):
        return
    if os.path.ismount(folder):
        raise UserError(f"config.data.store={str(folder)!r}: is a mount point, which a finished store cannot replace; "
                        f"choose a subfolder: --config.data.store={folder / 'store'}")
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(f"config.data.store={str(folder)!r}: exists and is not a token store; choose another folder")


def write_store(partial: Path, parts: list[Part], rules: Rules, made_from: dict, workers: int, log,
                ) -> None:
    """Writes a store to `partial`. If `partial` contains an unfinished store, resumes its preparation if possible."""
    tokenizer, journal = resume_or_start(partial, parts, rules, made_from, log)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    encode = functools.partial(encode_batch, tokenizer=tokenizer, dtype=dtype,
                               validation_fraction=made_from["validation_fraction"])
    writer, progress = StoreWriter(partial, journal, dtype), ProgressLine(log, journal.latest.done)
    try:
        batches = document_batches(parts, rules, journal.latest.place)
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
        require_documents(made_from, splits, skipped)
    except UserError:
        shutil.rmtree(partial)
        raise
    metadata = {
        "format": FORMAT, "made_from": made_from, "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text, "begin_of_text": tokenizer.begin_of_text, "dtype": dtype.name,
        "skipped": dict(sorted(skipped.items())), "splits": splits,
        "fingerprints": {name: fingerprint(partial, name, counts["text_bytes"]) for name, counts in splits.items()}}
    write_atomically(partial / METADATA_FILE, json.dumps(metadata, indent=2) + "\n")
    log(summary(made_from["source"], partial, metadata, progress.seconds()))


def resume_or_start(partial: Path, parts: list[Part], rules: Rules, made_from: dict, log) -> tuple[Tokenizer, Journal]:
    """Returns the tokenizer and journal of the unfinished store at `partial`.

    If there is no unfinished store, or if its preparation cannot be resumed, starts a new one.
    """
    identity = {"format": FORMAT, "made_from": made_from,
                "texts": sources.fingerprint(made_from["source"], made_from["text_endings"]),
                "tokenizer": tokenizers.spec_fingerprint(made_from["tokenizer"])}
    if journal := resume_journal(partial, identity, parts, rules, log):
        log(f"resuming {partial}: {journal.latest.done:.0%} done")
        return tokenizers.load(partial / "tokenizer"), journal
    remove_partial(partial, log)
    partial.mkdir()
    if made_from["tokenizer"].startswith("sentencepiece:"):
        log(f"training the tokenizer {made_from['tokenizer']} on {made_from['source']}")
    try:
        tokenizer, tokenizer_text_end = make_tokenizer(
            made_from["tokenizer"], parts, rules, made_from["validation_fraction"])
    except UserError:
        shutil.rmtree(partial)
        raise
    tokenizers.save(tokenizer, partial / "tokenizer")
    empty = dict(tokens=0, documents=0, text_bytes=0)
    return tokenizer, Journal(identity, tokenizer_text_end, Progress(
        Place(), Digest().hexdigest(), 0.0, {}, {name: empty for name in SPLITS}))


def require_documents(made_from: dict, splits: dict[str, dict], skipped: dict[str, int]) -> None:
    """Raises UserError if a split has no documents."""
    total = sum(counts["documents"] for counts in splits.values())
    if not total:
        raise UserError(f"config.data.source={made_from['source']!r}: contains no text"
                        + (f" (skipped: {format_skipped(skipped)})" if skipped else ""))
    for name, counts in splits.items():
        if not counts["documents"]:
            raise UserError(
                f"config.data.source={made_from['source']!r}: none of its {total} documents is in the {name} split "
                f"(config.data.validation_fraction={made_from['validation_fraction']}); use more text, or another "
                "fraction")


def remove_partial(partial: Path, log) -> None:
    """Removes the folder of an unfinished store, if the folder exists.

    Raises UserError if the folder contains files that do not belong to an unfinished store.
    """
    if not partial.exists():
        return
    ours = {"tokenizer", JOURNAL_FILE, f".{JOURNAL_FILE}.partial", METADATA_FILE, f".{METADATA_FILE}.partial",
            *(file(partial, name).name for file in (tokens_file, documents_file) for name in SPLITS)}
    if not partial.is_dir() or {path.name for path in partial.iterdir()} - ours:
        raise UserError(f"{partial}: is reserved for the unfinished store, but contains other files; move it, or "
                        "choose another config.data.store")
    if (partial / JOURNAL_FILE).exists():
        log(f"{partial}: cannot resume, because the text or the settings have changed; starting over")
    shutil.rmtree(partial)


def make_tokenizer(spec: str, parts: list[Part], rules: Rules, validation_fraction: float,
                   ) -> tuple[Tokenizer, Place | None]:
    """Returns the tokenizer, and the `Place` where the tokenizer's training text ends.

    The second value is None if the training text extends to the end of the source.
    """
    tokenizer_text_end = Place()

    def texts() -> Iterator[str]:
        nonlocal tokenizer_text_end
        for batch in document_batches(parts, rules):
            tokenizer_text_end = batch.place
            yield from (text for text in batch.texts if not is_validation(text, validation_fraction))
        tokenizer_text_end = None

    tokenizer = tokenizers.from_spec(spec, texts())
    return tokenizer, tokenizer_text_end


# ---------------------------------------------------------------------- logging

class ProgressLine:
    """Logs progress, speed and remaining time every PROGRESS_SECONDS."""

    def __init__(self, log, done: float):
        self._log, self._first, self._tokens = log, done, 0
        self._started = self._logged = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def update(self, done: float, tokens: int) -> None:
        self._tokens += tokens
        if time.monotonic() - self._logged < PROGRESS_SECONDS:
            return
        self._logged = time.monotonic()
        seconds = self.seconds()
        left = seconds * (1 - done) / (done - self._first) if done > self._first else None
        self._log(f"  {done:4.0%}   {millions(self._tokens)} tokens, "
                  f"{self._tokens / seconds:,.0f} tokens/s"
                  + (f", {duration(left)} left" if left is not None else ""))


def summary(source: str, folder: Path, metadata: dict, seconds: float) -> str:
    """Returns a message of a few lines with the size of a new store and the lengths of its documents."""
    splits = metadata["splits"]
    starts = [np.append(np.fromfile(documents_file(folder, name), np.int64), splits[name]["tokens"])
              for name in SPLITS]
    lengths = np.concatenate([np.diff(s) for s in starts])
    median, most, longest = (int(x) for x in np.quantile(lengths, (0.5, 0.95, 1), method="nearest"))
    tokens = sum(split["tokens"] for split in splits.values())
    text_bytes = sum(split["text_bytes"] for split in splits.values())
    lines = [f"{source}: {len(lengths):,} documents, {millions(splits['train']['tokens'])} tokens for "
             f"training, {millions(splits['validation']['tokens'])} for validation, "
             f"{text_bytes / tokens:.2f} bytes per token ({duration(seconds)})",
             f"tokens per document: median {median:,}, 95% at most {most:,}, longest {longest:,}"]
    if metadata["skipped"]:
        lines.append(f"skipped: {format_skipped(metadata['skipped'])}")
    return "\n".join(lines)


def format_skipped(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
