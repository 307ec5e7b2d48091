"""Names and layouts of tensors in Hugging Face's GPT2LMHeadModel.

Its linear weights have the shape (inputs, outputs). nanoGPT and the paper's code use the same names
within a block, but their linear weights have the shape (outputs, inputs), as usual in PyTorch.
"""

import re

import numpy as np

from smallgpt_jax.conversion.config_json import ConfigJson, other_fields
from smallgpt_jax.conversion.tensors import Tensors
from smallgpt_jax.models import ModelConfig

MODEL_TYPES = ("gpt2",)
CODE = ()  # no files: transformers contains the code of this model
BLOCK_NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
OTHER_NAMES = {
    "token_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
# GPT-2's name → our name
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
FIXED = dict(
    architecture="gpt",
    use_bias=True,
    tie_embeddings=True,
    activation="gelu_tanh",
    position="learned",
)
FREE = ("vocab_size", "context_length", "num_layers", "num_heads", "d_model", "mlp_ratio")
# For these fields of GPT-2's config, our model supports only these values. A file that lacks one is
# accepted, since they are the defaults.
SUPPORTED_VALUES = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def hugging_face_name(name: str) -> str:
    if block := re.fullmatch(r"trunk\.blocks\.(\d+)\.(.*)\.(weight|bias)", name):
        return f"transformer.h.{block[1]}.{BLOCK_NAMES[block[2]]}.{block[3]}"
    return OTHER_NAMES.get(name, name)


def heads_first(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders axis 0 of `x`, the outputs of a QKV projection, from (3, H, K) to (H, 3, K): from all
    queries, all keys, all values to query, key and value of each of H heads of width K.
    """
    return x.reshape(3, num_heads, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def _heads_last(x: np.ndarray, num_heads: int) -> np.ndarray:
    return x.reshape(num_heads, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def supports(config: ModelConfig) -> bool:
    return not other_fields(config, FIXED, FREE)


def class_name(config: ModelConfig) -> str:
    return "GPT2LMHeadModel"


def to_hugging_face(config: ModelConfig, tensors: Tensors) -> Tensors:
    theirs = {}
    for name, x in tensors.items():
        if ".qkv." in name:
            x = _heads_last(x, config.num_heads)
        # embeddings and the head are outside the trunk, and not transposed
        is_linear = name.startswith("trunk.") and x.ndim == 2
        theirs[hugging_face_name(name)] = np.ascontiguousarray(x.T if is_linear else x)
    return theirs


def from_hugging_face(config: ModelConfig, names, tensors: Tensors) -> Tensors:
    """Accepts tensors of a GPT2Model, too. Tensors that are not in `names` keep their names."""
    ours = {hugging_face_name(name): name for name in names}
    renamed = {}
    for name, x in tensors.items():
        if re.fullmatch(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias", name):
            continue  # the causal mask, which old files contain
        if name == "lm_head.weight" and "head.weight" not in names:
            continue  # a copy of the tied embedding
        full_name = name if name in ours else f"transformer.{name}"
        if full_name not in ours:
            renamed[name] = x
            continue
        our_name = ours[full_name]
        if our_name.startswith("trunk.") and x.ndim == 2:
            x = x.T
        # tensors of other shapes stay as they are; `tensors.to_variables` refuses them by name
        if ".qkv." in our_name and x.ndim and len(x) % (3 * config.num_heads) == 0:
            x = heads_first(x, config.num_heads)
        renamed[our_name] = x
    return renamed


def to_config(config: ModelConfig) -> dict:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_embd": config.d_model,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_width,
        "activation_function": "gelu_new",
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,  # on attention weights, which we do not drop
        "tie_word_embeddings": True,
        **SUPPORTED_VALUES,
    }


def from_config(theirs: ConfigJson) -> dict:
    theirs.require(SUPPORTED_VALUES)
    activation = theirs.fields.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        theirs.refuse(
            "activation_function",
            activation,
            f"not supported; must be one of {', '.join(_ACTIVATIONS)}",
        )
    width = theirs.size("n_embd", "hidden_size")
    return FIXED | dict(
        vocab_size=theirs.size("vocab_size"),
        context_length=theirs.size("n_positions", "n_ctx"),
        num_layers=theirs.size("n_layer", "num_hidden_layers"),
        num_heads=theirs.size("n_head", "num_attention_heads"),
        d_model=width,
        mlp_ratio=theirs.size("n_inner", default=4 * width) / width,
        activation=_ACTIVATIONS[activation],
        tie_embeddings=theirs.flag("tie_word_embeddings", True),
    )
