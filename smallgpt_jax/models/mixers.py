"""Mixers: Linen modules that move information between positions, with a field `config`.

They are called with (B, T, D) activations and a `Context`. docs/your-own.md describes decoding and separate documents.
"""

import dataclasses

import flax.linen as nn

from smallgpt_jax.errors import UserError
from smallgpt_jax.models.attention import Attention
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.custom_code import find_class

MIXERS = {"attention": Attention}  # names in config.model.mixers


def find_mixer(name: str) -> type[nn.Module]:
    where = f"config.model.mixers={name!r}"
    mixer = find_class(name, MIXERS, where)
    if not (isinstance(mixer, type) and issubclass(mixer, nn.Module)
            and "config" in {field.name for field in dataclasses.fields(mixer)}):
        raise UserError(f"{where}: must be a Linen module with a field config; see docs/your-own.md")
    return mixer


def make_mixer(config: ModelConfig) -> nn.Module:
    mixer = find_mixer(config.mixers[0])
    return mixer(config, name="attention" if mixer is Attention else "mixer")
