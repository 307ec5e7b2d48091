"""Reads the JSON files of foreign folders, and tests whether another format can express a model
config.

A foreign file can contain anything, so every size in a config.json is compared with the weights
before use.
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
        found = default if self.fields.get(name) is None else self.fields[name]
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            self.refuse(name, found, "must be an integer, at least 1")
        if found > most:
            self.refuse(name, found, f"must be at most {most:,}{what_is_most}")
        return found

    def number(self, name: str, default: float) -> float:
        found = default if self.fields.get(name) is None else self.fields[name]
        if (
            not isinstance(found, (int, float))
            or isinstance(found, bool)
            or not 0 < found <= _MAX_NUMBER
        ):
            self.refuse(name, found, f"must be a number above 0 and at most {_MAX_NUMBER:g}")
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        found = self.fields.get(name, default)
        if not isinstance(found, bool):
            self.refuse(name, found, "must be true or false")
        return found

    def model_field(self, name: str):
        """Returns a field of our own. Refuses only what must not reach the validation by
        `models.build`.
        """
        found = self.fields[name]
        values = found if isinstance(found, (list, tuple)) else [found]
        if isinstance(found, (str, list, tuple)) and len(found) > _MAX_ITEMS:
            self.refuse(name, found, f"must have at most {_MAX_ITEMS:,} characters or items")
        if any(isinstance(value, (list, dict)) for value in values):
            self.refuse(name, found, "must not be nested")
        limit = self.num_weights
        if name in _FLOAT_FIELDS:
            limit = _MAX_NUMBER
        elif name in ("context_length", "attention_windows"):  # no weight has one of these sizes
            limit = _MAX_POSITIONS
        if any(isinstance(value, (int, float)) and abs(value) > limit for value in values):
            self.refuse(
                name, found, f"must be at most {limit:,} in a model of {self.num_weights:,} weights"
            )
        return found

    def require(self, supported: Mapping) -> None:
        for name, value in supported.items():
            if self.fields.get(name) not in (None, value):
                self.refuse(name, self.fields[name], f"not supported; must be {value!r}")


def training_fields() -> set[str]:
    """Returns the fields of our configs that do not change the function that a trained model
    computes.
    """
    return {*ModelConfig.names(fixed_by="run"), *ModelConfig.names(fixed_by=None)}


def require_fit(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Refuses a model with more weights or layers than the tensors with these `shapes`, without
    building it.
    """
    num_weights, width = sum(math.prod(shape) for shape in shapes.values()), config.d_model
    experts = config.num_experts + config.num_shared_experts if config.mlp == "moe" else 1
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
        sizes |= {
            "delta_head_dim": config.num_heads * config.delta_key_width * width,
            "delta_value_ratio": config.num_heads * config.delta_value_width * width,
        }
    if "mamba" in config.mixers:
        sizes |= {
            "mamba_state": config.mamba_state * width,
            "mamba_expand": config.num_heads * config.mamba_head_width * width,
        }
    if "conv" in config.mixers:
        sizes |= {"conv_taps": config.conv_taps * width}
    for field, size in sizes.items():
        if size > num_weights:
            raise UserError(
                f"{path}: config.model.{field}={getattr(config, field)}: the model would have a "
                f"tensor of {size:,} weights, but all tensors in the folder together have "
                f"{num_weights:,}"
            )
    if config.num_layers > len(shapes):
        raise UserError(
            f"{path}: config.model.num_layers={config.num_layers}: the folder has only "
            f"{len(shapes):,} tensors"
        )


def other_fields(
    config: ModelConfig, fixed: Mapping, free: Iterable[str]
) -> dict[str, tuple[Any, Any]]:
    """Returns {field: (value, needed value)} of the fields not in `free` that have another value
    than in `fixed`, or else than their default. So new fields are unsupported.
    """
    config, free = with_defaults(config), {*free, *training_fields()}
    others = {}
    for field in dataclasses.fields(config):
        value, needed = getattr(config, field.name), fixed.get(field.name, field.default)
        if field.name not in free and value != needed:
            others[field.name] = value, needed
    return others


def with_defaults(config: ModelConfig) -> ModelConfig:
    """Returns an equivalent config with defaults where possible. For example, num_kv_heads =
    num_heads becomes 0.
    """
    unused = [
        name
        for mixer in MIXERS
        if mixer not in ("attention", *config.mixers)
        for name in field_types(ModelConfig)
        if name.startswith(f"{mixer}_")
    ]
    return dataclasses.replace(
        config,
        **{name: getattr(ModelConfig, name) for name in unused},
        num_kv_heads=0 if config.num_kv_heads == config.num_heads else config.num_kv_heads,
        head_dim=0 if config.head_dim * config.num_heads == config.d_model else config.head_dim,
        mixers=tuple(dict.fromkeys(config.mixers))
        if len(set(config.mixers)) == 1
        else config.mixers,
        attention_windows=config.attention_windows if any(config.attention_windows) else (),
        value_embeddings=config.value_embeddings if any(config.value_embeddings) else (),
    )
