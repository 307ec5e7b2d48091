"""Counts of configs that are kept in the cache folder, because counting traces the model."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from smallgpt_jax.comparison.counts import Counts, count
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.provenance import source_digest
from smallgpt_jax.storage import typed_json
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.cache import cache_folder

_CODE = ("config", "inference", "models", "ops", "objectives", "optim")  # on which counts depend
# The fields that counts depend on, beside the group `model`.
_FIELDS = (
    "optimizer.name",
    "train.objective",
    "train.teacher",
    "train.future_tokens",
    "train.future_head",
    "train.pseudo_length",
)
# Larger ones would be traced for minutes or fill the memory, which a stranger's record must not do.
_MOST_COUNTED = {"context_length": 2**18, "d_model": 2**17, "head_dim": 2**17}


class CachedCounts:
    """A function from a config to its counts; those of the same code are read from the cache folder."""

    def __init__(self, folder: Path | None = None):
        folder = folder or cache_folder() / "counts"
        # A file of its own for each version of the code.
        self._path = folder / f"{source_digest(_CODE)[:16]}.json"
        # {key of a config: counts}
        self._stored: dict[str, Counts] = (
            typed_json.read_or_none(dict[str, Counts], self._path) or {}
        )
        self._num_read = len(self._stored)
        # Counts of custom code are never stored, because it may change.
        self._custom: dict[str, Counts] = {}

    def __call__(self, config: Config) -> Counts:
        values = _counted_values(config)
        key = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
        is_custom = ":" in "".join(map(str, values.values()))  # "module:name"
        counts_of = self._custom if is_custom else self._stored
        if key not in counts_of:
            _require_small(config)
            counts_of[key] = count(config)
        return counts_of[key]

    def save(self) -> None:
        """Writes new counts to the cache folder. Ignores errors: the next check counts again."""
        if len(self._stored) == self._num_read:
            return
        content = {key: dataclasses.asdict(counts) for key, counts in self._stored.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(content))
        except OSError:
            pass


def _counted_values(config: Config) -> dict[str, Any]:
    """Returns the values of the fields on which counts depend."""
    values: dict[str, Any] = dict(vars(config.model), architecture=type(config.model).__name__)
    for path in _FIELDS:
        group, _, field = path.partition(".")
        values[path] = getattr(getattr(config, group), field)
    return values


def _require_small(config: Config) -> None:
    """Raises UserError for a model that cannot be traced in seconds."""
    for field, most in _MOST_COUNTED.items():
        if getattr(config.model, field) > most:
            config.model.refuse(field, f"models are counted up to {most:,}")
