"""The built-in architectures, and the lookup of custom architectures by `package.module:Class`.

An architecture is the Linen module between the embedding and the final norm. It is called with (B,
T, d_model) activations and a `Context`, and returns (B, T, config.output_width). The class
attribute `Config` is the class of its field `config`: `ModelConfig` or a subclass.
"""

import dataclasses

from smallgpt_jax.config.group import AUTO
from smallgpt_jax.config.lookup import find_named
from smallgpt_jax.devices.platform import faster_dtype
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.models.cgpt import CGPT
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.gpt import GPT
from smallgpt_jax.models.layers import find_mlp, find_norm
from smallgpt_jax.models.lgpt import LGPT
from smallgpt_jax.models.mixers import find_mixer, refuse_unread_fields
from smallgpt_jax.models.pgpt import PGPT
from smallgpt_jax.models.stacks import REMAT

ARCHITECTURES = {"gpt": GPT, "pgpt": PGPT, "lgpt": LGPT, "cgpt": CGPT}


def find_architecture(name: str):
    where = f"config.model.architecture={short_repr(name)}"
    architecture = find_named(name, ARCHITECTURES, where)
    config_class = getattr(architecture, "Config", None)
    if not (isinstance(config_class, type) and issubclass(config_class, ModelConfig)):
        raise UserError(
            f"{where}: the class needs a class attribute Config; set it to "
            "smallgpt_jax.models.ModelConfig or a subclass of it"
        )
    return architecture


def field_names(architecture: str) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(find_architecture(architecture).Config))


def make_config(**fields) -> ModelConfig:
    """Returns the validated config, its dtype never "auto". Raises UserError."""
    architecture = fields.get("architecture")
    config_class = find_architecture(architecture).Config
    config = config_class.from_fields(fields)
    if config.dtype == AUTO:
        config = config.replace(dtype=faster_dtype())
    # All names are looked up here, so that a misspelt one is refused before anything is built.
    config.validate_choice("remat", REMAT)
    find_norm(config.norm)
    find_mlp(config.mlp)
    for name in config.mixers:
        find_mixer(name)
    refuse_unread_fields(config)
    if config.tie_embeddings and config.output_width != config.d_model:
        config.refuse(
            "tie_embeddings",
            f"the output width {config.output_width} of {architecture} is not the width of the "
            f"embedding, {config.d_model}; set config.model.tie_embeddings to False",
        )
    return config
