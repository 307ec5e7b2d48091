"""The config of SmallGPTForCausalLM and SmallGPTForMaskedLM, this project's own PyTorch code
(`exported/`).

Their tensors have our names and layouts. transformers runs the code with `trust_remote_code=True`.
"""

import ast
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from smallgpt_jax.conversion.config_json import ConfigJson, training_fields, with_defaults
from smallgpt_jax.models import ModelConfig

MODEL_TYPES = ("smallgpt",)
CODE = (
    "configuration_smallgpt.py",
    "mlp_smallgpt.py",
    "modeling_smallgpt.py",
    "recurrent_smallgpt.py",
)
ARCHITECTURES = ("gpt", "pgpt", "lgpt", "cgpt")  # supported by the exported PyTorch code
# Values that the exported PyTorch code supports, for fields whose tables in models/ or ops/ can be
# extended.
SUPPORTED_VALUES = {
    "norm": ("layer", "rms"),
    "mlp": ("dense", "gated", "moe"),
    "activation": ("gelu", "gelu_tanh", "silu", "relu2"),
    "mixers": ("attention", "delta", "mamba", "conv"),
}
_RENAMED_FIELDS = {
    "tie_embeddings": "tie_word_embeddings",
    "dtype": "training_dtype",
    "dropout": "training_dropout",
}  # our names of the fields → their names in config.json


def known_fields() -> list[str]:
    """Returns the fields that the exported PyTorch code reads: the parameters of its config's
    constructor.
    """
    tree = ast.parse((Path(__file__).parent / "exported" / CODE[0]).read_text("utf-8"))
    constructor = next(node for node in ast.walk(tree) if getattr(node, "name", "") == "__init__")
    other = {"self", "use_cache", *_RENAMED_FIELDS.values()}
    return [argument.arg for argument in constructor.args.args if argument.arg not in other]


def class_name(config: ModelConfig) -> str:
    return f"SmallGPTFor{_head_name(config)}"


def _head_name(config: ModelConfig) -> str:
    return "MaskedLM" if config.attention_mask == "bidirectional" else "CausalLM"


def hugging_face_name(name: str) -> str:
    return name


def to_hugging_face(
    config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    return dict(tensors)


def from_hugging_face(
    config: ModelConfig, names, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    return {
        name: x
        for name, x in tensors.items()
        if not (config.tie_embeddings and name == "head.weight")
    }


def to_config(config: ModelConfig) -> dict:
    if config.architecture not in ARCHITECTURES:
        config.refuse(
            "architecture",
            "no PyTorch code for the export; smallgpt_jax/conversion/exported/ supports "
            + ", ".join(ARCHITECTURES),
        )
    for field, values in SUPPORTED_VALUES.items():
        used = getattr(config, field)
        if not set(used if isinstance(used, tuple) else [used]) <= set(values):
            config.refuse(field, f"no PyTorch code for the export; it supports {', '.join(values)}")
    if config.attention_mask == "prefix":
        config.refuse(
            "attention_mask", "no PyTorch code for the export; it supports causal, bidirectional"
        )
    known = {*known_fields(), *_RENAMED_FIELDS, *training_fields()}
    for field in dataclasses.fields(config):
        if field.name not in known and getattr(with_defaults(config), field.name) != field.default:
            config.refuse(
                field.name, f"no PyTorch code for the export; it supports only {field.default!r}"
            )
    fields = dataclasses.asdict(config)
    return {
        "model_type": "smallgpt",
        "architectures": [class_name(config)],
        "auto_map": {
            "AutoConfig": "configuration_smallgpt.SmallGPTConfig",
            f"AutoModelFor{_head_name(config)}": f"modeling_smallgpt.{class_name(config)}",
        },
        **(
            {"mask_token_id": config.vocab_size - 1}
            if config.attention_mask == "bidirectional"
            else {}
        ),
        **{
            name: fields.get(name) for name in known_fields()
        },  # null: not a field of the architecture
        **{theirs: fields[ours] for ours, theirs in _RENAMED_FIELDS.items()},
    }


def from_config(theirs: ConfigJson) -> dict:
    names = {name: name for name in known_fields()} | _RENAMED_FIELDS
    shared = ModelConfig.names()
    return {
        ours: theirs.model_field(name)
        for ours, name in names.items()
        if name in theirs.fields and (theirs.fields[name] is not None or ours in shared)
    }
