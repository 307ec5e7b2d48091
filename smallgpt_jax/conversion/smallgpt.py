"""The config of SmallGPTForCausalLM and SmallGPTForMaskedLM, this project's own PyTorch code
(`exported/`).

Their tensors have our names and layouts. transformers runs the code with `trust_remote_code=True`.
"""

import ast
import dataclasses
from pathlib import Path

from smallgpt_jax.conversion.config_json import ConfigJson, other_fields
from smallgpt_jax.conversion.tensors import Tensors
from smallgpt_jax.models import ModelConfig

MODEL_TYPES = ("smallgpt",)
CODE = (
    "configuration_smallgpt.py",
    "mlp_smallgpt.py",
    "modeling_smallgpt.py",
    "recurrent_smallgpt.py",
)
# Values that the exported PyTorch code supports, for fields that can have others: their tables in
# models/ or ops/ can be extended.
SUPPORTED_VALUES = {
    "architecture": ("gpt", "pgpt", "lgpt", "cgpt"),
    "norm": ("layer", "rms"),
    "mlp": ("dense", "gated", "moe"),
    "activation": ("gelu", "gelu_tanh", "silu", "relu2"),
    "mixers": ("attention", "delta", "mamba", "conv"),
}
# our names of the fields → their names in config.json
_RENAMED_FIELDS = {
    "tie_embeddings": "tie_word_embeddings",
    "dtype": "training_dtype",
    "dropout": "training_dropout",
}


def known_fields() -> list[str]:
    """Returns the fields that the PyTorch code reads, but those in _RENAMED_FIELDS."""
    # parsed, because an import would need PyTorch and transformers
    tree = ast.parse((Path(__file__).parent / "exported" / CODE[0]).read_text("utf-8"))
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    other = {"use_cache", *_RENAMED_FIELDS.values()}
    return [name for name in ast.literal_eval(table) if name not in other]


def class_name(config: ModelConfig) -> str:
    return f"SmallGPTFor{_head_name(config)}"


def _head_name(config: ModelConfig) -> str:
    return "MaskedLM" if config.attention_mask == "bidirectional" else "CausalLM"


def hugging_face_name(name: str) -> str:
    return name


def to_hugging_face(config: ModelConfig, tensors: Tensors) -> Tensors:
    return dict(tensors)


def from_hugging_face(config: ModelConfig, names, tensors: Tensors) -> Tensors:
    """Returns the tensors without a head that copies the tied embedding; names are ours already."""
    return {
        name: x
        for name, x in tensors.items()
        if not (config.tie_embeddings and name == "head.weight")
    }


def to_config(config: ModelConfig) -> dict:
    supported = {**SUPPORTED_VALUES, "attention_mask": ("causal", "bidirectional")}
    for field, values in supported.items():
        used = getattr(config, field)
        used = used if isinstance(used, tuple) else (used,)
        if not set(used) <= set(values):
            config.refuse(field, f"no PyTorch code for the export; it supports {', '.join(values)}")
    others = other_fields(config, fixed={}, free=(*known_fields(), *_RENAMED_FIELDS))
    for field, (_, needed) in others.items():
        config.refuse(field, f"no PyTorch code for the export; it supports only {needed!r}")
    theirs = {
        "model_type": "smallgpt",
        "architectures": [class_name(config)],
        "auto_map": {
            "AutoConfig": "configuration_smallgpt.SmallGPTConfig",
            f"AutoModelFor{_head_name(config)}": f"modeling_smallgpt.{class_name(config)}",
        },
    }
    if config.attention_mask == "bidirectional":
        theirs["mask_token_id"] = config.vocab_size - 1
    fields = dataclasses.asdict(config)
    for name in known_fields():
        theirs[name] = fields.get(name)  # null: not a field of the architecture
    for name, their_name in _RENAMED_FIELDS.items():
        theirs[their_name] = fields[name]
    return theirs


def from_config(theirs: ConfigJson) -> dict:
    their_names = {name: name for name in known_fields()} | _RENAMED_FIELDS
    shared = ModelConfig.field_names()
    fields = {}
    for name, their_name in their_names.items():
        if their_name not in theirs.fields:
            continue
        # null is the value of a field that another architecture has, and wrong in one that all have
        if theirs.fields[their_name] is not None or name in shared:
            fields[name] = theirs.model_field(their_name)
    return fields
