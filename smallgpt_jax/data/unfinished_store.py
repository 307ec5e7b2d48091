"""The files and the journal of an unfinished token store, from which an interrupted preparation
resumes.

An interruption must not change a single byte of the finished store. A preparation therefore resumes
only if:

- The settings are unchanged. Two exceptions: if invalid items were refused before the interruption,
  they may now be skipped or repaired, since the text read so far contains none; and the limit of
  the documents' length may now be higher, unless the text read so far contains documents that were
  too long.
- The text read so far is unchanged. Parts (files or shards) that were read completely are compared
  by name, size and modification time. A part that was read partially is compared by a digest of the
  items read. The rest of the source may change: for example, lines may be corrected or files added.
- If the rest of the source has changed, the tokenizer was not trained on the rest.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from smallgpt_jax.data import store
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.encoding import EncodedBatch, is_validation
from smallgpt_jax.data.parts import (
    NOT_UTF8,
    TOO_LONG,
    Digest,
    DocumentBatch,
    Part,
    Passage,
    Place,
    Rules,
    digest_before,
)
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.json_files import TEXT, read_json_or_none

JOURNAL_FILE = "journal.json"
_VERSION = 5
_MAY_DIFFER = {"made_from", "texts"}  # of a journal's identity on resumption, in part
# Minimum time between writes of the journal, each of which waits until the disk has all tokens.
JOURNAL_SECONDS = 5


class Entry(NamedTuple):
    place: Place
    digest: str  # digest of the source up to `place`
    done: float  # fraction of the source that has been read, 0 to 1
    skipped: dict[str, int]  # reason → number of skipped items
    splits: dict[str, dict[str, int]]  # split → counts, as in store.COUNTS
    # {"files", "passages": number, "validation_files": names, if whole files are held out}
    plain_text: dict


START = Entry(
    Place(),
    Digest().hexdigest(),
    0.0,
    {},
    {name: dict.fromkeys(store.COUNTS, 0) for name in store.SPLITS},
    {"files": 0, "passages": 0, "validation_files": []},
)


@dataclasses.dataclass
class Journal:
    # keys: "format", "made_from" (settings), "texts" (hash of the source), "tokenizer" (hash of
    # files), "split_by_file"; of a shard, "shard": its number, the count, and the place of its start
    identity: dict
    # where the tokenizer's training text ends; None: at the end of the source
    tokenizer_text_end: Place | None
    latest: Entry = START
    # `latest` was recorded while one part of the source was being read. `earlier` is the last entry
    # before that part. If that part has changed, preparation resumes from `earlier` instead of
    # `latest`.
    earlier: Entry | None = None

    def add(self, entry: Entry) -> None:
        if entry.place.parts > self.latest.place.parts:  # in a new part of the source
            self.earlier = self.latest
        self.latest = entry

    def write(self, folder: Path) -> None:
        fields = {
            "version": _VERSION,
            "identity": self.identity,
            "learned": self.tokenizer_text_end,
            **self.latest._asdict(),
            "earlier": self.earlier and self.earlier._asdict(),
        }
        content = json.dumps({**fields, "checksum": _checksum(fields)})
        write_atomically(folder / JOURNAL_FILE, content)


def _checksum(fields: dict) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def read_journal(folder: Path) -> Journal | None:
    """Returns the journal in a folder; None if it is missing, damaged or of another version."""

    def entry(fields: dict) -> Entry:
        values = {name: fields[name] for name in Entry._fields}
        return Entry(**values)._replace(place=Place(*fields["place"]))

    fields = read_json_or_none(folder / JOURNAL_FILE, {"checksum": TEXT})
    if fields is None:
        return None
    # A changed place or count would make another store, so no part of a changed journal is used.
    is_intact = fields.pop("checksum") == _checksum(fields)
    if not is_intact or fields.get("version") != _VERSION:
        return None
    return Journal(
        identity=fields["identity"],
        tokenizer_text_end=fields["learned"] and Place(*fields["learned"]),
        latest=entry(fields),
        earlier=fields["earlier"] and entry(fields["earlier"]),
    )


def resume_journal(
    folder: Path, identity: dict, parts: list[Part], rules: Rules, log
) -> Journal | None:
    """Returns the journal, whose `latest` entry is the one to resume from; None: start over."""
    journal = read_journal(folder)
    if not journal or not _can_resume(journal, identity):
        return None
    # An allowed change of settings can matter, too: a text file that was refused at an invalid item
    # may now be skipped whole, but the passages before that item are in the store.
    if any(journal.identity[key] != identity[key] for key in _MAY_DIFFER):
        log(
            f"{folder}: the source or a setting has changed; checking whether the text read so "
            "far is the same"
        )
        unchanged = _last_unchanged_entry(journal, parts, rules)
        if not unchanged:
            return None
        journal.latest = unchanged
    return dataclasses.replace(journal, identity=identity)


def _last_unchanged_entry(journal: Journal, parts: list[Part], rules: Rules) -> Entry | None:
    """Returns the last entry before which the text is still the same, or None."""
    trained_on = journal.tokenizer_text_end  # None: on all of the source
    for entry in (journal.latest, journal.earlier):
        # The rest of the source may have changed, so the tokenizer must not have been trained on it.
        if not entry or trained_on is None or trained_on > entry.place:
            continue
        if digest_before(parts, rules, entry.place) == entry.digest:
            return entry
    return None


def _can_resume(journal: Journal, identity: dict) -> bool:
    if any(journal.identity[key] != identity[key] for key in identity.keys() - _MAY_DIFFER):
        return False
    before, now = journal.identity["made_from"], identity["made_from"]
    skipped = journal.latest.skipped
    # The text read so far has nothing that these fields refuse. Relaxing them does not change it.
    may_change = {
        field for field in DataConfig.field_names(relaxable=True) if before[field] == "refuse"
    }
    if TOO_LONG not in skipped and now["max_document_bytes"] >= before["max_document_bytes"]:
        may_change.add("max_document_bytes")
    if any(before[field] != now[field] for field in now.keys() - may_change):
        return False
    # A change of invalid_utf8 to "replace" would turn items that were skipped as invalid UTF-8 into
    # documents.
    return before["invalid_utf8"] == now["invalid_utf8"] or not NOT_UTF8 & skipped.keys()


def write_documents(
    folder: Path,
    journal: Journal,
    splits: dict[str, "SplitWriter"],
    batches: Iterator[tuple[DocumentBatch, dict[str, EncodedBatch]]],
) -> None:
    """Appends `batches` to the files of `splits`, which `journal` describes, and records them in
    the journal.

    The journal is written after the other files, so it never records more tokens than they contain.
    If `batches` raise a UserError or are interrupted, what was read before is written.
    """

    def flush() -> float:
        for split in splits.values():
            split.flush()
        journal.write(folder)
        return time.monotonic()

    flushed = flush()  # the journal marks the folder as an unfinished store
    try:
        for batch, encoded in batches:
            for name, split in splits.items():
                split.add(encoded[name])
            journal.add(
                Entry(
                    batch.place,
                    batch.digest,
                    batch.done,
                    skipped=dict(Counter(journal.latest.skipped) + batch.skipped),
                    splits={name: split.counts for name, split in splits.items()},
                    plain_text=_count_passages(batch.texts, journal),
                )
            )
            if time.monotonic() - flushed > JOURNAL_SECONDS:
                flushed = flush()
    # Not after OSError: once a sync has failed, another could succeed without the lost tokens.
    except (UserError, KeyboardInterrupt):
        flush()
        raise
    flush()
    for split in splits.values():
        split.close()


def _count_passages(texts: Sequence[str], journal: Journal) -> dict:
    """Returns `Entry.plain_text` after further documents."""
    passages = [text for text in texts if isinstance(text, Passage)]
    first = [passage for passage in passages if passage.is_first]
    fraction = journal.identity["made_from"]["validation_fraction"]
    held_out = []
    if journal.identity["split_by_file"]:
        held_out = [passage.file for passage in first if is_validation(passage, fraction)]
    added = {"files": len(first), "passages": len(passages), "validation_files": held_out}
    return add_counts(journal.latest.plain_text, added)


def add_counts(one: dict, other: dict) -> dict:
    """Returns the sum of each field: of numbers, or of lists, which are joined."""
    return {name: value + other[name] for name, value in one.items()}


def require_documents(made_from: dict, latest: Entry) -> None:
    splits = latest.splits
    where = f"config.data.source={made_from['source']!r}"
    total = sum(counts["documents"] for counts in splits.values())
    if not total:
        skipped = store.format_skipped(latest.skipped)
        reasons = f" (skipped: {skipped})" if skipped else ""
        raise UserError(f"{where}: contains no text{reasons}")
    for name, counts in splits.items():
        if not counts["documents"]:
            fraction = f"config.data.validation_fraction={made_from['validation_fraction']}"
            raise UserError(
                f"{where}: none of its {total} documents is in the {name} split ({fraction}); use "
                "more text, or another fraction"
            )


class SplitWriter:
    """Truncates the files of one split to the sizes recorded in the journal, then appends documents
    to the files.
    """

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype, has_answers: bool, counts: dict[str, int]
    ):
        self.counts = counts  # {name in store.COUNTS: number}
        sizes = store.file_sizes(dtype, has_answers, counts)
        self._files = {
            ending: _open_truncated(folder / f"{name}{ending}", size)
            for ending, size in sizes.items()
        }

    def add(self, encoded: EncodedBatch) -> None:
        starts = self.counts["tokens"] + np.cumsum(encoded.lengths) - encoded.lengths
        self._files[store.TOKENS].write(encoded.tokens.tobytes())
        self._files[store.DOCUMENTS].write(starts.tobytes())
        if encoded.counted is not None:
            self._files[store.COUNTED].write(encoded.counted.tobytes())
        self.counts = add_counts(self.counts, encoded.counts)

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _open_truncated(path: Path, length: int):
    """Opens a file for appending, truncated to `length` bytes."""
    file = path.open("ab")
    if file.tell() < length:
        raise UserError(
            f"{path}: damaged, has {file.tell():,} bytes, but the journal beside it records "
            f"{length:,}; remove {path.parent} and rerun smallgpt_jax.prepare"
        )
    # Tokens after the journal's last entry are dropped; their documents are tokenized again.
    file.truncate(length)
    return file
