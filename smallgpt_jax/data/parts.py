"""Reads the documents of a text source.

A source consists of parts (files or shards), and a part consists of items, such as JSON lines or
Parquet rows. An item with valid, non-empty text is a document. Reading can resume at any `Place` in
the source.
"""

import abc
import dataclasses
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.data.chat_template import ChatTemplate
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import list_names

BATCH_CHARACTERS = 1_000_000  # per batch of documents
# Reasons for skipping an item. If invalid_utf8 is "replace", such an item is repaired instead.
NOT_UTF8 = {"not UTF-8", "half a surrogate pair", "not UTF-8 (whole file)"}
TOO_LONG = "too long"


class Skipped(NamedTuple):
    reason: str


class Passage(str):
    """A passage of a plain text file."""

    file: str  # its name
    is_first: bool  # of the file
    key: str  # its hash selects the split: a hash of the file, or the passage itself

    @classmethod
    def of(cls, text: str, file: str, is_first: bool, key: str) -> "Passage":
        passage = cls(text)
        passage.file, passage.is_first, passage.key = file, is_first, key
        return passage


Item = str | Skipped


class Place(NamedTuple):
    """A position in a source: after `parts` whole parts, and `items` items of the next part."""

    parts: int = 0
    items: int = 0


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of `count` successive ranges of a source, of about equal size. `number`: from 1."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def number_of(self, done: float) -> int:
        """Returns the number of the shard of an item, up to whose end the fraction `done` of the
        source is read.
        """
        # Rounding: 7/25·25 is above 7, but files that end with a shard must not begin the next one.
        return max(1, math.ceil(done * self.count - 1e-9))

    def fraction_read(self, done: float) -> float:
        return min(max(done * self.count - (self.number - 1), 0.0), 1.0)


WHOLE = Shard()


@dataclasses.dataclass(frozen=True)
class Rules:
    text_field: str
    invalid_utf8: str  # "refuse" | "replace"
    invalid_items: str  # "refuse" | "skip"
    max_document_bytes: int
    format: str = "text"  # config.data.format
    chat_template: ChatTemplate | None = None  # of format "messages"
    # Whether all passages of a plain text file are in the same split.
    split_by_file: bool = False
    can_skip: bool = True  # whether invalid_utf8 and invalid_items are set by config.data

    @property
    def decoding_errors(self) -> str:
        """Returns the argument `errors` of bytes.decode."""
        return "replace" if self.invalid_utf8 == "replace" else "strict"

    @property
    def skips_invalid_utf8(self) -> bool:
        return self.invalid_utf8 == "refuse" and self.invalid_items == "skip"

    def refuse_or_skip(self, where: str, why: str, fix: str) -> Skipped:
        if self.invalid_items == "skip":
            return Skipped(why.split(":")[0])  # "not UTF-8: byte 3" → "not UTF-8"
        or_skip = ", or skip such items with --config.data.invalid_items=skip"
        raise UserError(f"{where}: {why}; {fix}{or_skip if self.can_skip else ''}")

    def refuse_or_skip_long(self, where: str) -> Skipped:
        return self.refuse_or_skip(
            where,
            f"{TOO_LONG}: more than {self.max_document_bytes:,} bytes",
            "increase config.data.max_document_bytes",
        )


@dataclasses.dataclass(frozen=True)
class Part:
    """One file or shard. `read` yields its items, always in the same order, with the fraction read
    so far, 0 to 1; None: unknown.
    """

    name: str
    size: int  # bytes; 0 if unknown
    read: Callable[[Rules], Iterator[tuple[Item, float | None]]]
    version: tuple = ()  # changes when the items change; () if changes cannot be detected
    # whether items are rows that may have a prompt and a completion, or messages
    has_fields: bool = False


class Member(abc.ABC):
    """The files or the dataset that a name in config.data.source names. Nothing is read before the
    parts are needed.
    """

    is_local: bool
    name: str  # in config.data.source
    files: Sequence = ()  # each with its `size` in bytes; none, if this is unknown
    num_plain_texts: int = 0  # files that are split into passages
    identity: list  # changes when the text changes

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @abc.abstractmethod
    def parts(self, max_passage: int) -> list[Part]:
        """Returns the parts; plain text is split into passages of at most `max_passage` characters."""

    def message(self) -> str:
        return ""

    def enclosing_folder(self, path: Path) -> Path | None:
        return None

    def absolute_name(self) -> str:
        """Returns the name, independent of the current folder."""
        return self.name


def extract_text(text, where: str, fields, rules: Rules, field: str = "") -> Item:
    """Returns `text` as a valid string; if it is invalid, returns a Skipped or raises UserError,
    depending on `rules`. `fields`: the names of the item's fields; `field`: "" means `text_field`.
    """
    replace = "set --config.data.invalid_utf8=replace" if rules.can_skip else "correct the text"
    if isinstance(text, bytes):
        try:
            text = text.decode(errors=rules.decoding_errors)
        except UnicodeDecodeError as error:
            return rules.refuse_or_skip(where, f"not UTF-8: byte {error.start}", replace)
    if not isinstance(text, str):
        why = f"no string in the field {field or rules.text_field!r}"
        if text is None or not field:
            why += f": the item's fields are named {list_names(fields)}"
        advice = "correct the line" if field else "set --config.data.text_field"
        return rules.refuse_or_skip(where, why, advice)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # JSON can contain half a surrogate pair, such as \ud800
        if rules.invalid_utf8 != "replace":
            why = f"half a surrogate pair: character {error.start}"
            return rules.refuse_or_skip(where, why, replace)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        size = len(text.encode())
    return rules.refuse_or_skip_long(where) if size > rules.max_document_bytes else text


class DocumentBatch(NamedTuple):
    """Consecutive documents; the next batch begins at `place`."""

    texts: list[str]
    skipped: Counter  # reason → number of skipped items
    place: Place
    done: float  # fraction of the shard that has been read, 0 to 1
    digest: str  # digest of the source up to `place`


class Digest:
    """Covers name, size and version of the parts that were read completely, and the items read of
    the current part.
    """

    def __init__(self, parts: Iterable[Part] = ()):
        self._parts, self._items = hashlib.sha256(), hashlib.sha256()
        for part in parts:
            self.end_part(part)

    def add(self, item: Item) -> None:
        kind, text = "text", item
        if isinstance(item, Skipped):
            kind, text = "skipped", item.reason
        # With the length: "a" and "bc" are other items than "ab" and "c".
        self._items.update(f"{kind} {len(text)} ".encode())
        self._items.update(text.encode())
        self._items.update(repr(getattr(item, "pieces", "")).encode())  # of an example

    def end_part(self, part: Part) -> None:
        self._parts.update(repr((part.name, part.size, part.version)).encode())
        self._items = hashlib.sha256()

    def hexdigest(self) -> str:
        return self._parts.hexdigest() + self._items.hexdigest()


def digest_before(parts: list[Part], rules: Rules, place: Place) -> str:
    """Returns the digest of a source up to `place`. Raises UserError for invalid items before
    `place`.
    """
    digest = Digest(parts[: place.parts])
    # A source that has fewer parts now has no such part, and thereby another digest.
    for part in parts[place.parts : place.parts + 1]:
        for item, _ in itertools.islice(part.read(rules), place.items):
            digest.add(item)
    return digest.hexdigest()


def _progress(parts: Sequence[Part]) -> Callable[[int, float], float]:
    """Returns a function: the number of a part, and the fraction read of it → the fraction read of
    the source.
    """
    sizes = [part.size for part in parts]
    if not any(sizes):  # unknown: all parts count equally
        sizes = [1] * len(parts)
    *starts, total = itertools.accumulate(sizes, initial=0)
    return lambda number, fraction: (starts[number] + sizes[number] * fraction) / total


def find_start(parts: list[Part], rules: Rules, shard: Shard) -> tuple[Place, str]:
    """Returns the place of a shard's first item, and the digest of the source before it.

    Reads only the part in which the shard begins.
    """
    digest, progress = Digest(), _progress(parts)
    if shard.number == 1:
        return Place(), digest.hexdigest()
    for number, part in enumerate(parts):
        if shard.number_of(progress(number, 1.0)) >= shard.number:
            for count, (item, fraction) in enumerate(part.read(rules)):
                # A part of unknown length is not divided: all of it is in the shard of its end.
                done = progress(number, 1.0 if fraction is None else fraction)
                if shard.number_of(done) >= shard.number:
                    return Place(number, count), digest.hexdigest()
                digest.add(item)
        digest.end_part(part)
    return Place(len(parts)), digest.hexdigest()


def document_batches(
    parts: list[Part],
    rules: Rules,
    start: Place = Place(0, 0),  # noqa: B008
    shard: Shard = WHOLE,
) -> Iterator[DocumentBatch]:
    """Yields the documents from `start` to the end of `shard`, in batches of about BATCH_CHARACTERS
    characters.
    """
    digest, progress = Digest(parts[: start.parts]), _progress(parts)
    texts, skipped, characters = [], Counter(), 0
    for number, part in enumerate(parts[start.parts :], start.parts):
        for count, (item, fraction) in enumerate(part.read(rules), 1):
            done = progress(number, 1.0 if fraction is None else fraction)  # as in `find_start`
            if shard.number_of(done) > shard.number:
                place = Place(number, count - 1)
                yield DocumentBatch(texts, skipped, place, 1.0, digest.hexdigest())
                return
            digest.add(item)
            if Place(number, count) <= start:  # the digest covers these items, too
                continue
            if item and isinstance(item, str):
                texts.append(item)
                characters += len(item)
            else:
                skipped[item.reason if item else "empty"] += 1
            if characters >= BATCH_CHARACTERS:
                place = Place(number, count)
                shown = shard.fraction_read(progress(number, fraction or 0.0))
                yield DocumentBatch(texts, skipped, place, shown, digest.hexdigest())
                texts, skipped, characters = [], Counter(), 0
        digest.end_part(part)
    yield DocumentBatch(texts, skipped, Place(len(parts)), 1.0, digest.hexdigest())
