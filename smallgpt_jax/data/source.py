"""A text source: what `config.data.source` names. Its documents are always in the same order.

- `python_stdlib`: the source code of the Python standard library, which needs no download.
- `python_packages`: the source code of installed distributions, equal on all machines.
- A file, folder or glob, local or gs://: JSON lines, Parquet or plain text, optionally compressed.
- `hf:NAME[:CONFIG]`, `tfds:NAME`: the training split of a dataset.
- A list of these, separated by commas.
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from smallgpt_jax.data.config import SYNTHETIC
from smallgpt_jax.data.datasets import DATASETS, Dataset
from smallgpt_jax.data.file_sets import STANDARD_LIBRARY, LocalFiles, RemoteFiles, StandardLibrary
from smallgpt_jax.data.parts import Member, Part, Rules, document_batches
from smallgpt_jax.data.prompts import Example
from smallgpt_jax.data.python_packages import PYTHON_PACKAGES, PythonPackages
from smallgpt_jax.data.text_files import ARCHIVE_SUFFIXES, COMPRESSED_SUFFIXES, ROW_SUFFIXES
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.object_storage import is_remote


@dataclasses.dataclass(frozen=True)
class Source:
    """All properties raise UserError if the source does not exist, has no files or is invalid."""

    value: str  # config.data.source
    text_endings: str = ".txt"  # config.data.text_endings

    @cached_property
    def members(self) -> list[Member]:
        if not self.value.strip():
            raise UserError(
                "config.data.source: is empty; expected a file, folder, glob, hf:NAME or tfds:NAME"
            )
        endings = _parse_endings(self.text_endings)
        return [_parse_name(name, endings) for name in names_of(self.value)]

    @cached_property
    def is_local(self) -> bool:
        return all(member.is_local for member in self.members)

    @cached_property
    def num_bytes(self) -> int:
        """Datasets count as 0."""
        return sum(member.num_bytes for member in self.members)

    @cached_property
    def fingerprint(self) -> str:
        """Returns a hash of the files' paths, sizes and versions; of a dataset, of its name."""
        described = [entry for member in self.members for entry in member.identity]
        return hashlib.sha256(repr(described).encode()).hexdigest()

    @cached_property
    def parts(self) -> list[Part]:
        # Of 0.1 to 1.6 MB of plain text, about a hundred passages: a validation split of 1% has one.
        max_passage = min(max(self.num_bytes // 100, 1024), 16_384)
        return [part for member in self.members for part in member.parts(max_passage)]

    @cached_property
    def num_plain_texts(self) -> int:
        return sum(member.num_plain_texts for member in self.members)

    def documents(self, rules: Rules) -> Iterator[str]:
        """Raises UserError for an invalid item, unless `rules` skip or repair it."""
        for batch in document_batches(self.parts, rules):
            yield from batch.texts

    def examples(self, rules: Rules) -> Iterator[Example]:
        """Yields the documents of a format other than "text"."""
        for document in self.documents(rules):
            assert isinstance(document, Example)
            yield document

    def messages(self) -> list[str]:
        return list(filter(None, (member.message() for member in self.members)))

    def enclosing_folder(self, path: Path) -> Path | None:
        """Returns the folder of the source that `path` is in, whose files are text, or None."""
        folders = (member.enclosing_folder(path) for member in self.members)
        return next((folder for folder in folders if folder), None)


def names_of(value: str) -> list[str]:
    """Returns the files, folders, globs and datasets of a value of config.data.source."""
    # A path may contain commas, if it is alone. `os.path` also accepts texts that are no paths.
    if os.path.exists(os.path.expanduser(value)):
        return [value]
    return [name.strip() for name in value.split(",") if name.strip()]


def _parse_name(name: str, endings: tuple[str, ...]) -> Member:
    if name.startswith(tuple(DATASETS)):
        return Dataset(name)
    if name.startswith(SYNTHETIC):
        raise UserError(
            f"config.data.source: {name!r} is a probe, which has no text and cannot be combined "
            "with other sources; use it alone"
        )
    if name == STANDARD_LIBRARY:
        return StandardLibrary(name, endings)
    if name == PYTHON_PACKAGES:
        return PythonPackages()
    return RemoteFiles(name, endings) if is_remote(name) else LocalFiles(name, endings)


def _parse_endings(text_endings: str) -> tuple[str, ...]:
    """Returns the endings of the files in a folder that are read."""
    endings = [ending.strip().lower() for ending in text_endings.split(",")]
    endings = list(filter(None, endings))
    for ending in endings:
        if not re.fullmatch(r"\.[^./\\\s]+", ending):
            raise UserError(
                f"config.data.text_endings={text_endings!r}: {ending!r} is no ending; expected "
                "endings such as .txt,.md,.rst"
            )
        if ending in (*ROW_SUFFIXES, *COMPRESSED_SUFFIXES, *ARCHIVE_SUFFIXES):
            raise UserError(
                f"config.data.text_endings={text_endings!r}: {ending} files are not plain text; "
                "remove this ending"
            )
    return (*endings, *ROW_SUFFIXES)
