"""The token store that a config describes: its text, its settings and its folder."""

import dataclasses
import glob
import hashlib
import re
from functools import cached_property
from pathlib import Path

from smallgpt_jax.data.chat_template import find_template
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.parts import Rules
from smallgpt_jax.data.source import Source
from smallgpt_jax.data.store import MADE_FROM, METADATA_FILE, TokenStore, open_store
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.cache import cache_folder
from smallgpt_jax.storage.paths import as_path

# Fields that were added later, with their defaults; these do not change the names of stores in the cache.
ADDED = (("format", "text"), ("chat_template", ""))


@dataclasses.dataclass(frozen=True)
class StoreSpec:
    """The token store that a config's `data` group describes. Nothing is read or checked before it is needed."""

    store: str  # config.data.store; "": in the cache folder
    source: Source
    tokenizer: TokenizerSource
    made_from: dict  # the fields of the `data` group that determine the content of a store

    @classmethod
    def of(cls, data) -> "StoreSpec":
        """Reads the chat template, if the format needs one: a store has the template itself, not its path."""
        tokenizer, made_from = TokenizerSource(data.tokenizer), {name: getattr(data, name) for name in MADE_FROM}
        if data.format == "messages" and not data.mixture:
            made_from["chat_template"] = find_template(data.chat_template, tokenizer.folder)
        return cls(data.store, Source(data.source, data.text_endings), tokenizer, made_from)

    @cached_property
    def rules(self) -> Rules:
        return Rules(**{field.name: self.made_from[field.name] for field in dataclasses.fields(Rules)})

    def check_source(self, folder: Path) -> None:
        """Raises UserError for an invalid source, and if it has a folder around `folder`, whose files would be read."""
        for part in self.source.parts:
            if self.rules.format != "text" and not part.has_fields:
                raise UserError(f"config.data.format={self.rules.format!r}: {part.name} is plain text or Parquet; use "
                                "JSON lines or an hf: dataset")
        if enclosing := self.source.enclosing_folder(folder):
            raise UserError(f"config.data.store={str(folder)!r}: is inside {enclosing}, a folder of the source; choose "
                            "a folder outside of it")

    @cached_property
    def folder(self) -> Path:
        """In the cache, its name depends on the source and on all settings."""
        if self.store:
            return as_path("config.data.store", self.store)
        return self._cached([self.source.fingerprint, self.tokenizer.fingerprint, *self._settings()])

    def partial_name(self, folder: Path) -> str:
        """Returns the name of the unfinished store's folder, without ".partial".

        In the cache, it stays the same if the content of the source or the handling of invalid items changes, so that
        preparation can resume.
        """
        if self.store:
            return folder.name
        return self._cached([self.source.absolute_names, *self._settings(relaxable=False)]).name

    def open(self) -> TokenStore | None:
        """Returns None if the store does not exist. Raises UserError if its source or settings differ."""
        if not (self.folder / METADATA_FILE).is_file():
            return None
        store = open_store(self.folder)
        found = store.metadata["made_from"]
        found = {**dict(ADDED), **found}
        if different := [field for field, value in self.made_from.items() if value != found[field]]:
            raise UserError(
                f"config.data.store={str(self.folder)!r}: was made with "
                + ", ".join(f"{field}={found[field]!r}" for field in different)
                + ", but this config has " + ", ".join(f"{field}={self.made_from[field]!r}" for field in different)
                + "; choose another folder, or use the same settings")
        return store

    def _settings(self, **marks) -> list:
        return [self.made_from[name] for name in DataConfig.names(in_store=True, **marks)
                if (name, self.made_from[name]) not in ADDED]

    def _cached(self, identity: list) -> Path:
        digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:12]
        return cache_folder() / "stores" / f"{readable_name(self.source.value)}-{digest}"


def readable_name(source: str) -> str:
    """Returns a name for the store of a source: texts/**/*.md → texts_md."""
    parts = Path(source).parts
    pattern = next((i for i, part in enumerate(parts) if glob.has_magic(part)), None)
    name = Path(source).stem if pattern is None else "_".join(parts[max(pattern - 1, 0):])
    return re.sub(r"[\W_]+", "_", name).strip("_")[:60] or "text"
