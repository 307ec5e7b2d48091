"""Model architectures, and the language model that wraps an architecture."""

from smallgpt_jax.models.architectures import (
    ARCHITECTURES,
    field_names,
    find_architecture,
    make_config,
)
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.custom_code import custom_classes, foreign_classes, refuse_custom_code
from smallgpt_jax.models.language_model import LanguageModel, build
from smallgpt_jax.models.parameters import (
    Parameter,
    abstract_model_state,
    abstract_params,
    abstract_variables,
    init_variables,
    named_parts,
    num_active_parameters,
    num_parameters,
    require_factors,
)
from smallgpt_jax.models.stacks import layer_configs, stack_blocks
from smallgpt_jax.models.variants import block_class
