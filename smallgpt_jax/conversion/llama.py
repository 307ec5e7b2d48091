"""Names and layouts of tensors in Hugging Face's LlamaForCausalLM and Qwen3ForCausalLM.

Qwen3 also normalizes the queries and keys of each head, before the rotation. Queries, keys and
values have separate matrices; our `attention.qkv` combines the three in one matrix, grouped by
key–value head.
"""

import re

import numpy as np

from smallgpt_jax.conversion.config_json import ConfigJson, other_fields
from smallgpt_jax.conversion.tensors import Tensors
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import ModelConfig

MODEL_TYPES = ("llama", "qwen3")
CODE = ()  # no files: transformers contains the code of these models
_BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "attention.qkv": "self_attn.{q,k,v}_proj",
}
_OTHER_NAMES = {
    "token_embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
FIXED = dict(
    architecture="gpt", position="rope", norm="rms", mlp="gated", activation="silu", use_bias=False
)
FREE = (
    "vocab_size",
    "context_length",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "d_model",
    "head_dim",
    "mlp_ratio",
    "norm_epsilon",
    "rope_base",
    "qk_norm",
    "tie_embeddings",
)
# For these fields of the config, our model supports only these values.
_SUPPORTED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}


def supports(config: ModelConfig) -> bool:
    # Llama's config refuses a width that is not a multiple of the number of heads, even if head_dim
    # is given.
    return not other_fields(config, FIXED, FREE) and (
        config.qk_norm or config.d_model % config.num_heads == 0
    )


def class_name(config: ModelConfig) -> str:
    return "Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"


def hugging_face_name(name: str) -> str:
    """Returns transformers' name of our tensor; for attention.qkv, a pattern of three names."""
    if block := re.fullmatch(r"trunk\.blocks\.(\d+)\.(.*)\.weight", name):
        return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.weight"
    return _OTHER_NAMES.get(name, name)


def _projection_names(name: str) -> list[str]:
    return [hugging_face_name(name).replace("{q,k,v}", letter) for letter in "qkv"]


def to_hugging_face(config: ModelConfig, tensors: Tensors) -> Tensors:
    theirs = {}
    for name, x in tensors.items():
        if ".qkv." in name:
            # J: the queries of a key–value head, its key, its value
            x_GxJxKxD = x.reshape(config.kv_heads, -1, config.head_width, config.d_model)
            projections = x_GxJxKxD[:, :-2], x_GxJxKxD[:, -2], x_GxJxKxD[:, -1]
            for their_name, projection in zip(_projection_names(name), projections):
                theirs[their_name] = projection.reshape(-1, config.d_model)
        else:
            theirs[hugging_face_name(name)] = x
    return theirs


def from_hugging_face(config: ModelConfig, names, tensors: Tensors) -> Tensors:
    """Accepts tensors of a LlamaModel, too. Tensors that are not in `names` keep their names."""
    # a LlamaModel has no head, and its names lack the prefix
    tensors = {
        name if name.startswith(("model.", "lm_head.")) else f"model.{name}": x
        for name, x in tensors.items()
        if not name.endswith("rotary_emb.inv_freq")  # in old files
    }
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)  # a copy of the tied embedding
    ours = {}
    for name in names:
        their_names = _projection_names(name) if ".qkv." in name else [hugging_face_name(name)]
        if not all(their_name in tensors for their_name in their_names):
            continue  # `tensors.to_variables` refuses the rest by name
        theirs = {their_name: tensors.pop(their_name) for their_name in their_names}
        ours[name] = _fuse(config, theirs) if ".qkv." in name else theirs[their_names[0]]
    return ours | tensors


def _fuse(config: ModelConfig, projections: Tensors) -> np.ndarray:
    """Returns our attention.qkv of the query, key and value matrices, in this order."""
    groups, width = config.kv_heads, config.head_width
    for (name, x), heads in zip(projections.items(), (config.num_heads, groups, groups)):
        expected = (heads * width, config.d_model)
        if x.shape != expected:
            raise UserError(f"wrong shapes: {name} {x.shape}, expected {expected}")
    # per key–value head: its queries, one key, one value
    by_group = [x.reshape(groups, -1, width, config.d_model) for x in projections.values()]
    return np.concatenate(by_group, axis=1).reshape(-1, config.d_model)


def to_config(config: ModelConfig) -> dict:
    # transformers 5 reads rope_parameters and dtype, older versions rope_theta and torch_dtype.
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "architectures": [class_name(config)],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "attention_bias": False,
        **({} if config.qk_norm else {"mlp_bias": False}),
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
    }


def from_config(theirs: ConfigJson) -> dict:
    theirs.require(_SUPPORTED_VALUES)
    layer_types = theirs.fields.get("layer_types") or []
    is_list = isinstance(layer_types, list)
    if not is_list or any(kind != "full_attention" for kind in layer_types):
        theirs.refuse("layer_types", layer_types, "not supported; all must be 'full_attention'")
    is_qwen3 = theirs.fields["model_type"] == "qwen3"
    width = theirs.size("hidden_size")
    num_heads = theirs.size("num_attention_heads")
    # as in transformers, where a qwen3 has 32 key–value heads without the field, but not with null
    default_head_dim = 128 if is_qwen3 else max(1, width // num_heads)
    default_kv_heads = num_heads
    if is_qwen3 and "num_key_value_heads" not in theirs.fields:
        default_kv_heads = 32
    head_dim = theirs.size("head_dim", default=default_head_dim)
    num_kv_heads = theirs.size("num_key_value_heads", default=default_kv_heads)
    # 0 heads or width: what our config derives from the others, so that equal models compare equal
    return dict(
        vocab_size=theirs.size("vocab_size"),
        context_length=theirs.positions("max_position_embeddings"),
        num_layers=theirs.size("num_hidden_layers"),
        d_model=width,
        num_heads=num_heads,
        num_kv_heads=0 if num_kv_heads == num_heads else num_kv_heads,
        head_dim=0 if head_dim * num_heads == width else head_dim,
        mlp_ratio=theirs.size("intermediate_size") / width,
        norm_epsilon=theirs.number("rms_norm_eps", 1e-6),
        rope_base=_rope_base(theirs),
        qk_norm=is_qwen3,
        tie_embeddings=theirs.flag("tie_word_embeddings", False),
        **FIXED,
    )


def _rope_base(theirs: ConfigJson) -> float:
    """Refuses a rotation that is scaled, covers a part of a head, or depends on the layer."""
    # transformers 4 has rope_scaling and a rope_theta beside it; 5 has both in rope_parameters
    parameters = theirs
    for name in ("rope_parameters", "rope_scaling"):
        rope = theirs.fields.get(name) or {}
        is_dict = isinstance(rope, dict)
        if not is_dict or rope.get("rope_type", rope.get("type", "default")) != "default":
            theirs.refuse(name, rope, "not supported; the rope_type must be 'default'")
        if any(isinstance(value, dict) for value in rope.values()):
            theirs.refuse(name, rope, "not supported; must not depend on the type of a layer")
        parameters = parameters._replace(fields={**parameters.fields, **rope})
    parameters.require({"partial_rotary_factor": 1.0})
    return parameters.number("rope_theta", 10_000.0)
