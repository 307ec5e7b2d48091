"""The journal of an unfinished token store: whether its preparation can continue, and from where.

A preparation continues only if the finished store is the same, to the byte, as one that is made anew:

- The settings are the same, except that items or bytes that were refused may now be skipped or replaced: there
  were none in what has been read.
- The text is the same as far as it has been read: whole parts by name, size and time, the items of the next part
  by a digest. So a line that was mended or a file that was added further on does not matter.
- The tokenizer, if it was trained on the text, was trained on no more than that.
"""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.data import sources
from smallgpt_jax.data.sources import Part, Place, Rules
from smallgpt_jax.files import write_atomically

JOURNAL_FILE = "journal.json"
VERSION = 2
# Settings that may change from "refuse" before a preparation continues.
MAY_BE_RELAXED = ("invalid_utf8", "invalid_items")


class Progress(NamedTuple):
    """What has been read of a source, and what the store has of it."""

    place: Place
    digest: str  # of what has been read
    done: float  # the share of the source, 0 to 1
    skipped: dict[str, int]  # reason → items
    splits: dict[str, dict]  # name → tokens, documents, text_bytes


@dataclasses.dataclass
class Journal:
    identity: dict  # the store's format and settings ("made_from"), fingerprints of "tokenizer" and "texts"
    learned: Place | None  # what the tokenizer was trained on ends here; None: with the source
    latest: Progress
    earlier: Progress | None = None  # the last one in an earlier part; the part of `latest` may be taken away

    def add(self, progress: Progress) -> None:
        if progress.place.parts > self.latest.place.parts:
            self.earlier = self.latest
        self.latest = progress

    def write(self, folder: Path) -> None:
        write_atomically(folder / JOURNAL_FILE, json.dumps({
            "version": VERSION, "identity": self.identity, "learned": self.learned, **self.latest._asdict(),
            "earlier": self.earlier and self.earlier._asdict()}))


def read(folder: Path) -> Journal | None:
    """Returns the journal in a folder, or None if there is none, or one of another version."""
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


def resume(folder: Path, identity: dict, parts: list[Part], rules: Rules, say) -> Journal | None:
    """Returns the journal in a folder, with `identity`, as far as a preparation of that can continue; None if it
    has to begin anew."""
    journal = read(folder)
    if not journal or not may_continue(journal, identity):
        return None
    if journal.identity["texts"] != identity["texts"]:
        say(f"{folder}: the text has changed; comparing what was read of it")
        same = next((progress for progress in (journal.latest, journal.earlier)
                     if progress and journal.learned is not None and journal.learned <= progress.place
                     and sources.digest_before(parts, rules, progress.place) == progress.digest), None)
        if not same:
            return None
        journal.latest = same
    return dataclasses.replace(journal, identity=identity)


def may_continue(journal: Journal, identity: dict) -> bool:
    """Whether the store's format and settings make of what has been read what the journal's made of it."""
    before, now = journal.identity["made_from"], identity["made_from"]
    were_refused = {field for field in MAY_BE_RELAXED if before[field] == "refuse"}
    return (
        all(journal.identity[key] == identity[key] for key in identity.keys() - {"made_from", "texts"})
        and all(before[field] == now[field] for field in now.keys() - were_refused)
        # What was skipped because it was not UTF-8 is a document once that is replaced.
        and (before["invalid_utf8"] == now["invalid_utf8"] or not sources.NOT_UTF8 & journal.latest.skipped.keys()))
