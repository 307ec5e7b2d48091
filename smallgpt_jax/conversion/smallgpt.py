"""The config of SmallGPTForCausalLM, this project's PyTorch code for its own models (`exported/`).

Its tensors have our names and layouts. transformers runs the code with `trust_remote_code=True`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from smallgpt_jax import models
from smallgpt_jax.conversion.config_json import TRAINING_FIELDS, ConfigJson
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import ModelConfig

MODEL_TYPES = ("smallgpt",)
CODE = ("configuration_smallgpt.py", "mlp_smallgpt.py", "modeling_smallgpt.py")
ARCHITECTURES = ("gpt", "pgpt", "lgpt", "cgpt")  # supported by the exported PyTorch code
# Values that the exported PyTorch code supports, for fields whose tables in models/ or ops/ can be extended.
SUPPORTED_VALUES = {"norm": ("layer", "rms"), "mlp": ("dense", "gated", "moe"),
                    "activation": ("gelu", "gelu_tanh", "silu", "relu2")}
SAME_FIELDS = (
    "architecture", "vocab_size", "context_length", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_model",
    "mlp", "mlp_ratio", "activation", "norm", "norm_position", "norm_epsilon", "qk_norm", "attention_windows",
    "position", "rope_base", "use_bias", "num_experts", "experts_per_token", "num_shared_experts", "expert_mlp",
    "expert_scale", "expert_bias_rate", "balance_loss")
ARCHITECTURE_FIELDS = (  # fields that only some architectures have; null in config.json for the others
    "num_paths", "path_weights", "blocks_per_stage", "compress_last_stage", "stage_heads", "conv_kernel")
RENAMED_FIELDS = {"tie_embeddings": "tie_word_embeddings", "dtype": "training_dtype",
                  "dropout": "training_dropout"}  # our names of the fields → their names in config.json


def class_name(config: ModelConfig) -> str:
    return "SmallGPTForCausalLM"


def hugging_face_name(name: str) -> str:
    return name


def to_hugging_face(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(tensors)


def from_hugging_face(config: ModelConfig, names, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors. If the embedding is tied, its copy is left out."""
    return {name: x for name, x in tensors.items() if not (config.tie_embeddings and name == "head.weight")}


def to_config(config: ModelConfig) -> dict:
    """Returns the config.json of a model. Raises UserError if the exported PyTorch code does not support the model."""
    if config.architecture not in ARCHITECTURES:
        raise UserError(f"config.model.architecture={config.architecture!r}: no PyTorch code for the export; "
                        "smallgpt_jax/conversion/exported/ supports " + ", ".join(ARCHITECTURES))
    for field, values in SUPPORTED_VALUES.items():
        if getattr(config, field) not in values:
            config.refuse(field, f"no PyTorch code for the export; it supports {', '.join(values)}")
    known = {*SAME_FIELDS, *ARCHITECTURE_FIELDS, *RENAMED_FIELDS, *TRAINING_FIELDS}
    for field in dataclasses.fields(config):
        if field.name not in known and getattr(config, field.name) != field.default:
            config.refuse(field.name, f"no PyTorch code for the export; it supports only {field.default!r}")
    fields = dataclasses.asdict(config)
    return {
        "model_type": "smallgpt", "architectures": ["SmallGPTForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_smallgpt.SmallGPTConfig",
                     "AutoModelForCausalLM": "modeling_smallgpt.SmallGPTForCausalLM"},
        **{name: fields.get(name) for name in (*SAME_FIELDS, *ARCHITECTURE_FIELDS)},
        **{theirs: fields[ours] for ours, theirs in RENAMED_FIELDS.items()}}


def from_config(theirs: ConfigJson) -> dict:
    """Returns the fields of our `model` config group, given config.json. Raises UserError if fields are missing."""
    described = models.upgrade_fields(theirs.fields)
    if missing := [name for name in (*SAME_FIELDS, *RENAMED_FIELDS.values()) if name not in described]:
        raise UserError(f"{theirs.path}: damaged, or not written by this project (missing: {', '.join(missing)})")
    theirs = theirs._replace(fields=described)
    return {name: theirs.model_field(name) for name in (*SAME_FIELDS, *ARCHITECTURE_FIELDS) if name in described} | {
        ours: theirs.model_field(name) for ours, name in RENAMED_FIELDS.items()}
