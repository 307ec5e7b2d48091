"""The architectures, and the language model around each of them."""

import dataclasses

from smallgpt_jax.models.architectures import ARCHITECTURES, BUILT_IN, field_names, find_architecture, make_config
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.language_model import (
    LanguageModel,
    abstract_model_state,
    abstract_params,
    num_parameters,
)

__all__ = ["ARCHITECTURES", "BUILT_IN", "LanguageModel", "ModelConfig", "abstract_model_state", "abstract_params",
           "build", "field_names", "find_architecture", "num_parameters", "upgrade_fields"]

# Fields of single architectures; older versions stored null for the others.
ONCE_NULL = ("num_paths", "path_weights", "blocks_per_stage", "compress_last_stage", "stage_heads", "conv_kernel")


def build(**fields) -> LanguageModel:
    """Returns the model with these fields of the `model` group.

    Raises UserError for an impossible model, before anything is built.
    """
    return LanguageModel(make_config(**fields))


def upgrade_fields(fields: dict) -> dict:
    """Converts an older version's `model` group to the current format and returns it.

    Fields added later get the value that such models had; nulls of other architectures' fields are dropped.
    """
    later = {field.name: field.default for field in dataclasses.fields(ModelConfig)
             if field.default is not dataclasses.MISSING}
    if fields.get("architecture") == "pgpt":
        later["path_weights"] = "learned"
    kept = {name: value for name, value in fields.items() if value is not None or name not in ONCE_NULL}
    upgraded = later | kept
    return upgraded | {"attention_windows": tuple(upgraded["attention_windows"])}  # a list in JSON
