"""Mixers: the modules of blocks that move information between positions.

A mixer is a Linen module with a field `config`, which is called with (B, T, D) activations and a `Context`.
docs/your-own.md describes what it must do in decoding and with separate documents.
"""

import dataclasses

import flax.linen as nn

from smallgpt_jax.errors import UserError
from smallgpt_jax.models.attention import Attention
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.custom_code import find_class

MIXERS = {"attention": Attention}  # names in config.model.mixers


def find_mixer(name: str) -> type[nn.Module]:
    """Returns the mixer class for `name`: a key of MIXERS, or `package.module:Class`.

    Raises UserError if there is no such class, or if it is not a module with a field `config`.
    """
    where = f"config.model.mixers={name!r}"
    mixer = find_class(name, MIXERS, where)
    if not (isinstance(mixer, type) and issubclass(mixer, nn.Module)
            and "config" in {field.name for field in dataclasses.fields(mixer)}):
        raise UserError(f"{where}: must be a Linen module with a field config; see docs/your-own.md")
    return mixer


def make_mixer(config: ModelConfig) -> nn.Module:
    """Returns the mixer of a block. The weights of attention are named "attention", those of others "mixer"."""
    mixer = find_mixer(config.mixers[0])
    return mixer(config, name="attention" if mixer is Attention else "mixer")
