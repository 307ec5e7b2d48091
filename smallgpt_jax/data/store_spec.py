"""The token store that a config describes: its text, its settings and its folder."""

import dataclasses
import glob
import hashlib
import os
import re
from functools import cached_property
from pathlib import Path

from smallgpt_jax.data.chat_template import ChatTemplate, find_template
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.parts import Rules
from smallgpt_jax.data.source import Source
from smallgpt_jax.data.store import (
    LATER_FIELDS,
    MADE_FROM,
    METADATA_FILE,
    STORE_FILES,
    TokenStore,
    open_store,
)
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.cache import cache_folder
from smallgpt_jax.storage.object_storage import is_remote, list_files, require_bucket
from smallgpt_jax.storage.paths import as_path

# Expected number of whole files in the validation split, from which on it has no passages of others.
_MIN_VALIDATION_FILES = 5
NOT_FREE = "config.data.store={!r}: exists and is not a token store; choose another folder"


@dataclasses.dataclass(frozen=True)
class StoreSpec:
    """The token store that a config describes. Nothing is read or checked before it is needed."""

    store: str  # config.data.store; "": in the cache folder
    source: Source
    tokenizer: TokenizerSource
    made_from: dict  # the fields of the `data` group that determine the content of a store

    @classmethod
    def of(cls, data) -> "StoreSpec":
        """Returns the spec of a config's group `data`."""
        tokenizer = TokenizerSource(data.tokenizer)
        made_from = {name: getattr(data, name) for name in MADE_FROM}
        # A store has the chat template itself, not its path.
        if data.format == "messages" and not data.mixture:
            made_from["chat_template"] = find_template(data.chat_template, tokenizer.folder)
        return cls(data.store, Source(data.source, data.text_endings), tokenizer, made_from)

    @cached_property
    def rules(self) -> Rules:
        # Some settings of a store, such as the tokenizer, are no rules of reading.
        names = {field.name for field in dataclasses.fields(Rules)} - {"chat_template"}
        fields = {name: value for name, value in self.made_from.items() if name in names}
        template = None
        if source := self.made_from["chat_template"]:
            template = ChatTemplate(source, self.tokenizer.special_tokens)
        return Rules(**fields, chat_template=template, split_by_file=self.splits_by_file)

    @property
    def splits_by_file(self) -> bool:
        """Returns whether there are enough plain text files to hold out whole ones."""
        fraction = self.made_from["validation_fraction"]
        return fraction * self.source.num_plain_texts >= _MIN_VALIDATION_FILES

    @cached_property
    def folder(self) -> Path:
        """In the cache, its name depends on the source and on all settings."""
        if self.store:
            return as_path("config.data.store", self.store)
        identity = [self.source.fingerprint, self.tokenizer.fingerprint, *self._settings()]
        return self._cached([*identity, "files"] if self.splits_by_file else identity)

    @property
    def real_folder(self) -> Path:
        """Returns where `folder` points if it is a link."""
        if is_remote(self.folder):
            return self.folder
        return Path(os.path.realpath(self.folder))

    @property
    def partial(self) -> Path:
        """Returns the folder of the unfinished store.

        In the cache, its name stays the same if the content of the source or the handling of
        invalid items changes, so that preparation can resume.
        """
        folder = self.real_folder
        if not self.store:
            names = [member.absolute_name() for member in self.source.members]
            folder = self._cached([names, *self._settings(relaxable=False)])
        return self.real_folder.with_name(f"{folder.name}.partial")

    def check(self) -> None:
        """Raises UserError for an invalid source, or a folder that is not free or is part of it."""
        folder = self.real_folder
        _require_free(folder)
        for part in self.source.parts:
            if self.rules.format != "text" and not part.has_fields:
                raise UserError(
                    f"config.data.format={self.rules.format!r}: {part.name} is plain text or "
                    "Parquet; use JSON lines or an hf: dataset"
                )
        if enclosing := self.source.enclosing_folder(folder):
            raise UserError(
                f"config.data.store={str(folder)!r}: is inside {enclosing}, a folder of the "
                "source; choose a folder outside of it"
            )

    def open(self) -> TokenStore | None:
        """Returns the store; None if there is none. Raises UserError if its source or settings
        differ.
        """
        if not (self.folder / METADATA_FILE).is_file():
            return None
        return open_store(self.folder, self.made_from)

    def _settings(self, **marks) -> list:
        """Returns the values of the fields with these marks, without defaults of later fields: so
        the stores that were made before keep their names.
        """
        return [
            self.made_from[name]
            for name in DataConfig.field_names(in_store=True, **marks)
            if (name, self.made_from[name]) not in LATER_FIELDS
        ]

    def _cached(self, identity: list) -> Path:
        digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:12]
        return cache_folder() / "stores" / f"{readable_name(self.source.value)}-{digest}"


def _require_free(folder: Path) -> None:
    """Raises UserError if something other than a store or an empty folder exists at `folder`.

    A mount point is refused even if it is empty, because a finished store cannot be renamed to it.
    """
    if is_remote(folder):
        require_bucket("config.data.store", folder)
        # () is the name of an object in the place of the folder
        names = {path.relative_to(folder).parts[:1] for path in list_files(folder)}
        is_free = names <= {(name,) for name in STORE_FILES}
    elif (folder / METADATA_FILE).is_file() or not os.path.lexists(folder):
        return
    elif os.path.ismount(folder):
        raise UserError(
            f"config.data.store={str(folder)!r}: is a mount point, which a finished store cannot "
            f"replace; choose a subfolder: --config.data.store={folder / 'store'}"
        )
    else:
        is_free = folder.is_dir() and not any(folder.iterdir())
    if not is_free:
        raise UserError(NOT_FREE.format(str(folder)))


def readable_name(source: str) -> str:
    """Returns a name for the store of a source: texts/**/*.md → texts_md."""
    name, levels = Path(source).stem, Path(source).parts
    patterns = [i for i, level in enumerate(levels) if glob.has_magic(level)]
    if patterns:  # from the folder before the first pattern on
        name = "_".join(levels[max(patterns[0] - 1, 0) :])
    return re.sub(r"[\W_]+", "_", name).strip("_")[:60] or "text"
