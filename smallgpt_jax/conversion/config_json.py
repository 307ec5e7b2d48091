"""Reads the fields of config.json files, and tests whether another format can express a model config."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.errors import UserError
from smallgpt_jax.models import ModelConfig


class ConfigJson(NamedTuple):
    """The content of a config.json. The methods return values, and raise UserError for values that are not allowed.

    Except in `flag`, a field that is null is treated as missing.
    """

    fields: Mapping
    path: Path

    def refuse(self, name: str, value, rule: str):
        """Raises UserError with the name and value of a field, and the `rule` that the value breaks."""
        raise UserError(f"{self.path}: {name}={value!r}: {rule}")

    def size(self, *names: str, default: int | None = None) -> int:
        """Returns the value of the first of the fields `names` that has one."""
        found = next((self.fields[name] for name in names if self.fields.get(name) is not None), default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            self.refuse(names[0], found, "must be an integer, at least 1")
        return found

    def number(self, name: str, default: float) -> float:
        found = default if self.fields.get(name) is None else self.fields[name]
        if not isinstance(found, (int, float)) or isinstance(found, bool) or not 0 < found < float("inf"):
            self.refuse(name, found, "must be a number above 0")
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        found = self.fields.get(name, default)
        if not isinstance(found, bool):
            self.refuse(name, found, "must be true or false")
        return found

    def require(self, supported: Mapping) -> None:
        """Raises UserError if a field's value differs from its value in `supported`. Missing fields are allowed."""
        for name, value in supported.items():
            if self.fields.get(name) not in (None, value):
                self.refuse(name, self.fields[name], f"not supported; must be {value!r}")


def training_fields() -> set[str]:
    """Returns the fields of our configs that do not change the function that a trained model computes."""
    return {*ModelConfig.names(fixed_by="run"), *ModelConfig.names(fixed_by=None)}


def has_only(config: ModelConfig, fixed: Mapping, free: Iterable[str]) -> bool:
    """Whether a model config can be expressed in a format.

    The format supports all values of the fields in `free`. `fixed` maps other fields to their only supported value. All
    remaining fields must have their default or a value with the same effect. A new field is therefore unsupported until
    it is added to the format.
    """
    config, free = with_defaults(config), {*free, *training_fields()}
    return all(getattr(config, field.name) == fixed.get(field.name, field.default)
               for field in dataclasses.fields(config) if field.name not in free)


def with_defaults(config: ModelConfig) -> ModelConfig:
    """Returns an equivalent config with defaults where possible. For example, num_kv_heads = num_heads becomes 0."""
    return dataclasses.replace(
        config, num_kv_heads=0 if config.num_kv_heads == config.num_heads else config.num_kv_heads,
        head_dim=0 if config.head_dim * config.num_heads == config.d_model else config.head_dim,
        attention_windows=config.attention_windows if any(config.attention_windows) else ())
