"""The journal of an unfinished token store: whether its preparation can resume, and from where.

A preparation resumes only if the finished store will equal, to the byte, one prepared without interruption, so:

- The settings are the same, except that items or bytes that were refused may now be skipped or replaced: none of them
  occurred in the part already read.
- The text is the same as far as it was read: complete parts by name, size and time, the items of the next part by a
  digest. A line fixed or a file added after that does not matter.
- The tokenizer, if trained on the text, was trained on no more than the text already read.
"""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.data.parts import NOT_UTF8, Part, Place, Rules, digest_before
from smallgpt_jax.files import write_atomically

JOURNAL_FILE = "journal.json"
VERSION = 2
# Settings that may change from "refuse" to another value before a preparation resumes.
RELAXABLE_FIELDS = ("invalid_utf8", "invalid_items")


class Progress(NamedTuple):
    """How far a source has been read, and the size of the store so far."""

    place: Place
    digest: str  # of the source up to `place`
    done: float  # fraction of the source, 0 to 1
    skipped: dict[str, int]  # reason → items
    splits: dict[str, dict]  # name → tokens, documents, text_bytes


@dataclasses.dataclass
class Journal:
    identity: dict  # the store's format and settings ("made_from"), fingerprints of "tokenizer" and "texts"
    learned: Place | None  # end of the text that the tokenizer was trained on; None: the whole source
    latest: Progress
    earlier: Progress | None = None  # the last one in an earlier part, in case the part of `latest` is removed

    def add(self, progress: Progress) -> None:
        if progress.place.parts > self.latest.place.parts:
            self.earlier = self.latest
        self.latest = progress

    def write(self, folder: Path) -> None:
        write_atomically(folder / JOURNAL_FILE, json.dumps({
            "version": VERSION, "identity": self.identity, "learned": self.learned, **self.latest._asdict(),
            "earlier": self.earlier and self.earlier._asdict()}))


def read_journal(folder: Path) -> Journal | None:
    """Returns the journal in a folder; None if it is missing, unreadable or of another version."""
    def progress(entries: dict) -> Progress:
        fields = {field: entries[field] for field in Progress._fields}
        return Progress(**{**fields, "place": Place(*fields["place"])})

    try:
        entries = json.loads((folder / JOURNAL_FILE).read_text())
        if entries["version"] != VERSION:
            return None
        return Journal(entries["identity"], entries["learned"] and Place(*entries["learned"]), progress(entries),
                       entries["earlier"] and progress(entries["earlier"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def resume_journal(folder: Path, identity: dict, parts: list[Part], rules: Rules, log) -> Journal | None:
    """Returns the journal in a folder, up to the place from which a preparation of `identity` can resume; None if it
    has to start over."""
    journal = read_journal(folder)
    if not journal or not can_resume(journal, identity):
        return None
    if journal.identity["texts"] != identity["texts"]:
        log(f"{folder}: the text has changed; comparing the part that was read")
        same = next((progress for progress in (journal.latest, journal.earlier)
                     if progress and journal.learned is not None and journal.learned <= progress.place
                     and digest_before(parts, rules, progress.place) == progress.digest), None)
        if not same:
            return None
        journal.latest = same
    return dataclasses.replace(journal, identity=identity)


def can_resume(journal: Journal, identity: dict) -> bool:
    """Returns whether the part already read gives the same store with these settings as with the journal's."""
    before, now = journal.identity["made_from"], identity["made_from"]
    were_refused = {field for field in RELAXABLE_FIELDS if before[field] == "refuse"}
    return (
        all(journal.identity[key] == identity[key] for key in identity.keys() - {"made_from", "texts"})
        and all(before[field] == now[field] for field in now.keys() - were_refused)
        # An item skipped for invalid UTF-8 is a document if those bytes are now replaced.
        and (before["invalid_utf8"] == now["invalid_utf8"] or not NOT_UTF8 & journal.latest.skipped.keys()))
