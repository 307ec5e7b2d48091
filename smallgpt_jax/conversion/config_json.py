"""Reads a foreign config.json, and tests whether another format can express a model config.

A foreign file can contain anything, so its sizes are compared with the weights before use.
"""

import dataclasses
import math
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from smallgpt_jax.config.group import field_types
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import ARCHITECTURES, ModelConfig
from smallgpt_jax.models.mixers import MIXERS

_MAX_POSITIONS = 2**31 - 1  # positions are int32
_MAX_NUMBER = 3e38  # the largest number in float32
_MAX_ITEMS = 1024  # characters or items in the value of a field
_FLOAT_FIELDS = {
    name
    for trunk in ARCHITECTURES.values()
    for name, kind in field_types(trunk.Config).items()
    if kind is float
}


class ConfigJson(NamedTuple):
    """The content of a config.json. Except in `flag`, a null field is treated as missing."""

    fields: Mapping
    path: Path
    num_weights: int = 2**63 - 1  # in the weight files; no size of the model is larger

    def refuse(self, name: str, value, rule: str):
        raise UserError(f"{self.path}: {name}={reprlib.repr(value)}: {rule}")

    def size(self, *names: str, default: int | None = None) -> int:
        """Returns the first of the fields `names` that has a value. It is at most `num_weights`."""
        return self._integer(
            names, default, self.num_weights, ", the number of weights in the folder"
        )

    def positions(self, *names: str) -> int:
        """Returns a number of positions. Unlike a size, it may have no weights."""
        return self._integer(names, None, _MAX_POSITIONS)

    def _integer(
        self, names: tuple[str, ...], default: int | None, most: int, what_is_most: str = ""
    ) -> int:
        name = next((name for name in names if self.fields.get(name) is not None), names[0])
        value = self.fields.get(name)
        if value is None:
            value = default
        # true is an int in Python
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(name, value, "must be an integer, at least 1")
        if value > most:
            self.refuse(name, value, f"must be at most {most:,}{what_is_most}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.fields.get(name)
        if value is None:
            value = default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # `not`, because comparisons with NaN are false
        if not is_number or not 0 < value <= _MAX_NUMBER:
            self.refuse(name, value, f"must be a number above 0 and at most {_MAX_NUMBER:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, value, "must be true or false")
        return value

    def model_field(self, name: str):
        """Returns a field of our own. Refuses what `models.build` cannot be asked to validate."""
        value = self.fields[name]
        items = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, (str, list, tuple)) and len(value) > _MAX_ITEMS:
            self.refuse(name, value, f"must have at most {_MAX_ITEMS:,} characters or items")
        if any(isinstance(item, (list, dict)) for item in items):
            self.refuse(name, value, "must not be nested")
        # no size of a model exceeds the number of its weights
        limit = self.num_weights
        if name in _FLOAT_FIELDS:
            limit = _MAX_NUMBER
        elif name in ("context_length", "attention_windows"):  # no weight has one of these sizes
            limit = _MAX_POSITIONS
        if any(isinstance(item, (int, float)) and abs(item) > limit for item in items):
            self.refuse(
                name, value, f"must be at most {limit:,} in a model of {self.num_weights:,} weights"
            )
        return value

    def require(self, supported: Mapping) -> None:
        for name, value in supported.items():
            if self.fields.get(name) not in (None, value):
                self.refuse(name, self.fields[name], f"not supported; must be {value!r}")


def _training_fields() -> set[str]:
    """Returns the fields that do not change the function that a trained model computes."""
    return {*ModelConfig.field_names(fixed_by="run"), *ModelConfig.field_names(fixed_by=None)}


def require_fit(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Refuses, without building it, a model with more weights or layers than `shapes` have."""
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    # A size in a config.json costs nothing to write; a model of it can take hours and all memory.
    width = config.d_model
    experts = config.num_experts + config.num_shared_experts if config.mlp == "moe" else 1
    # field → number of weights of a tensor that becomes larger with it
    sizes = {
        "vocab_size": config.vocab_size * width,
        "num_heads": config.num_heads * config.head_width * width,
        "mlp_ratio": config.mlp_width * width * experts,
        "conv_kernel": getattr(config, "conv_kernel", 0) * width,
        "context_length": config.context_length * width if config.position == "learned" else 0,
    }
    if any(config.value_embeddings):
        sizes["value_embeddings"] = config.vocab_size * config.kv_heads * config.head_width
    if "delta" in config.mixers:
        sizes["delta_head_dim"] = config.num_heads * config.delta_key_width * width
        sizes["delta_value_ratio"] = config.num_heads * config.delta_value_width * width
    if "mamba" in config.mixers:
        sizes["mamba_state"] = config.mamba_state * width
        sizes["mamba_expand"] = config.num_heads * config.mamba_head_width * width
    if "conv" in config.mixers:
        sizes["conv_taps"] = config.conv_taps * width
    for field, size in sizes.items():
        if size > num_weights:
            raise UserError(
                f"{path}: config.model.{field}={getattr(config, field)}: the model would have a "
                f"tensor of {size:,} weights, but all tensors in the folder together have "
                f"{num_weights:,}"
            )
    # each layer has at least one tensor
    if config.num_layers > len(shapes):
        raise UserError(
            f"{path}: config.model.num_layers={config.num_layers}: the folder has only "
            f"{len(shapes):,} tensors"
        )


def other_fields(
    config: ModelConfig, fixed: Mapping, free: Iterable[str]
) -> dict[str, tuple[Any, Any]]:
    """Returns {field: (value, needed value)} of the fields that have another value."""
    # Fields that are neither in `fixed` nor `free` need their default: new ones are unsupported.
    config = _with_defaults(config)
    free = {*free, *_training_fields()}
    others = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        needed = fixed.get(field.name, field.default)
        if field.name not in free and value != needed:
            others[field.name] = value, needed
    return others


def _with_defaults(config: ModelConfig) -> ModelConfig:
    """Returns an equivalent config with defaults where possible."""
    changes = {}
    for mixer in MIXERS:
        if mixer in ("attention", *config.mixers):
            continue
        # The fields of an unused mixer, such as delta_head_dim, change nothing.
        for name in field_types(ModelConfig):
            if name.startswith(f"{mixer}_"):
                changes[name] = getattr(ModelConfig, name)
    if config.num_kv_heads == config.num_heads:
        changes["num_kv_heads"] = 0
    if config.head_dim * config.num_heads == config.d_model:
        changes["head_dim"] = 0
    if len(set(config.mixers)) == 1:  # the same mixer in all blocks
        changes["mixers"] = config.mixers[:1]
    if not any(config.attention_windows):
        changes["attention_windows"] = ()
    if not any(config.value_embeddings):
        changes["value_embeddings"] = ()
    return dataclasses.replace(config, **changes)
