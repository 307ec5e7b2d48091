"""Model architectures, and the language model that wraps an architecture."""

import dataclasses

from smallgpt_jax.models.architectures import (
    ARCHITECTURES,
    BUILT_IN,
    field_names,
    find_architecture,
    make_config,
    refuse_custom_code,
)
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.language_model import (
    LanguageModel,
    abstract_model_state,
    abstract_params,
    abstract_variables,
    num_active_parameters,
    num_parameters,
    require_factors,
)

__all__ = ["ARCHITECTURES", "BUILT_IN", "LanguageModel", "ModelConfig", "abstract_model_state", "abstract_params",
           "abstract_variables", "build", "default_fields", "field_names", "find_architecture", "make_config",
           "num_active_parameters", "num_parameters", "refuse_custom_code", "require_factors", "upgrade_fields"]

# Fields that only some architectures have. Older versions stored these fields as null for all other architectures.
FORMERLY_NULL = ("num_paths", "path_weights", "blocks_per_stage", "compress_last_stage", "stage_heads", "conv_kernel")


def build(**fields) -> LanguageModel:
    """Returns the language model for the fields of a config's `model` group.

    Raises UserError for invalid fields.
    """
    return LanguageModel(make_config(**fields))


def default_fields() -> dict:
    """Returns the defaults of the shared fields that were added after the first release."""
    return {field.name: field.default for field in dataclasses.fields(ModelConfig)
            if field.default is not dataclasses.MISSING}


def upgrade_fields(fields: dict) -> dict:
    """Returns the `model` group of an older version's config, converted to the current format.

    Missing fields get the values that match the older version's behavior. Fields in FORMERLY_NULL are dropped if they
    are null.
    """
    defaults = default_fields()
    if fields.get("architecture") == "pgpt":
        defaults["path_weights"] = "learned"
    kept = {name: value for name, value in fields.items() if value is not None or name not in FORMERLY_NULL}
    upgraded = defaults | kept
    if isinstance(upgraded["attention_windows"], list):  # from JSON
        upgraded["attention_windows"] = tuple(upgraded["attention_windows"])
    return upgraded
