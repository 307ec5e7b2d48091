"""Counts of configs that are kept in the cache folder, because counting traces the model."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from smallgpt_jax.comparison.counts import Counts, count
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.provenance import CLONE
from smallgpt_jax.storage import typed_json
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.cache import cache_folder

_CODE = ("config", "inference", "models", "ops", "objectives", "optim")
# What the counts depend on, beside the group `model`.
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


class Counter:
    """Counts configs. Results of the same code are read from the cache folder; those of custom code
    are not stored, because it may change.
    """

    def __init__(self, folder: Path | None = None):
        folder = folder or cache_folder() / "counts"
        self._path = folder / f"{_digest_of_code()[:16]}.json"
        self._known: dict[str, Counts] = (
            typed_json.read_or_none(dict[str, Counts], self._path) or {}
        )
        self._counted: dict[str, Counts] = {}

    def __call__(self, config: Config) -> Counts:
        key = _key(config)
        counts = self._known.get(key) or self._counted.get(key)
        if counts is None:
            _require_small(config)
            counts = self._counted[key] = count(config)
        return counts

    def save(self) -> None:
        """Write errors are ignored: the next check counts again."""
        if not self._counted:
            return
        content = {key: dataclasses.asdict(counts) for key, counts in self._known.items()}
        content |= {
            key: dataclasses.asdict(counts)
            for key, counts in self._counted.items()
            if not key.startswith("custom")
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(content))
        except OSError:
            pass


def _digest_of_code() -> str:
    """Returns a checksum of the code that counts depend on."""
    digest = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((CLONE / "smallgpt_jax" / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _key(config: Config) -> str:
    values: dict[str, Any] = dict(vars(config.model), architecture=type(config.model).__name__)
    for path in _FIELDS:
        group, _, field = path.partition(".")
        values[path] = getattr(getattr(config, group), field)
    text = json.dumps(values, sort_keys=True, default=str)
    # "module:name": the code behind a name may change, so `save` leaves these counts out.
    custom = "custom" if ":" in "".join(map(str, values.values())) else ""
    return custom + hashlib.sha256(text.encode()).hexdigest()


def _require_small(config: Config) -> None:
    for field, most in _MOST_COUNTED.items():
        if getattr(config.model, field) > most:
            config.model.refuse(field, f"models are counted up to {most:,}")
