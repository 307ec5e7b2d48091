"""Names and layouts of tensors in Hugging Face's GPT2LMHeadModel.

GPT-2 has biases in its linear layers and LayerNorms, an output head tied to the embedding, and the tanh approximation
of GELU. Its linear weights have the shape (inputs, outputs). nanoGPT and the paper's code use the same names within a
block, but their linear weights have the shape (outputs, inputs), as usual in PyTorch.
"""

import re
from collections.abc import Mapping

import numpy as np

from smallgpt_jax.errors import UserError
from smallgpt_jax.models import ModelConfig

BLOCK_NAMES = {
    "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
OTHER_NAMES = {
    "token_embedding.weight": "transformer.wte.weight", "position_embedding.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight", "final_norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight"}
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
               "gelu_fast": "gelu_tanh"}  # GPT-2's name: our name
# For these fields of GPT-2's config, our model supports only these values.
SUPPORTED_VALUES = {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
                    "add_cross_attention": False}


def hugging_face_name(name: str) -> str:
    """Returns GPT2LMHeadModel's name for one of our tensors."""
    if block := re.fullmatch(r"trunk\.blocks\.(\d+)\.(.*)\.(weight|bias)", name):
        return f"transformer.h.{block[1]}.{BLOCK_NAMES[block[2]]}.{block[3]}"
    return OTHER_NAMES.get(name, name)


def heads_first(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the first axis of `x`, the outputs of a QKV projection, from the order (3, H, K) to the order (H, 3, K).

    H is the number of heads, K the head width.
    """
    return x.reshape(3, num_heads, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def heads_last(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Inverts `heads_first`: reorders the first axis of `x` from the order (H, 3, K) to the order (3, H, K)."""
    return x.reshape(num_heads, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def is_gpt2(config: ModelConfig) -> bool:
    """Whether a GPT2LMHeadModel computes the same function as this model."""
    return (config.architecture == "gpt" and config.use_bias and config.tie_embeddings
            and config.activation == "gelu_tanh" and config.position == "learned")


def to_hugging_face(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts our tensors to the names and layouts of a GPT2LMHeadModel."""
    theirs = {}
    for name, x in tensors.items():
        if ".qkv." in name:
            x = heads_last(x, config.num_heads)
        is_linear = name.startswith("trunk.") and x.ndim == 2
        theirs[hugging_face_name(name)] = np.ascontiguousarray(x.T if is_linear else x)
    return theirs


def from_hugging_face(config: ModelConfig, names, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts the tensors of a GPT2LMHeadModel or GPT2Model to our names and layouts.

    `names` are the tensor names of our model. Tensors that our model does not have keep their names.
    """
    ours = {hugging_face_name(name): name for name in names}
    renamed = {}
    for name, x in tensors.items():
        if re.fullmatch(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias", name):
            continue  # the causal mask, which old files contain
        full = name if name in ours else f"transformer.{name}"
        if name == "lm_head.weight" and "head.weight" not in names:
            continue  # a copy of the tied embedding
        if (known := ours.get(full)) is None:
            renamed[name] = x
            continue
        x = x.T if known.startswith("trunk.") and x.ndim == 2 else x
        if ".qkv." in known and len(x) % (3 * config.num_heads) == 0:
            x = heads_first(x, config.num_heads)
        renamed[known] = x
    return renamed


def to_config(config: ModelConfig) -> dict:
    """Returns the config.json of a GPT2LMHeadModel that computes the same function as our model."""
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab_size,
        "n_positions": config.context_length, "n_embd": config.d_model, "n_layer": config.num_layers,
        "n_head": config.num_heads, "n_inner": config.mlp_width,
        "activation_function": "gelu_new", "embd_pdrop": config.dropout, "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0, "tie_word_embeddings": True, **SUPPORTED_VALUES}


def from_config(theirs: Mapping, where: str) -> dict:
    """Returns the fields of our `model` config group for a GPT-2 with the given config.json.

    `theirs` is the content of config.json. `where` is the path of config.json, for error messages. Raises UserError for
    missing sizes, values of the wrong type, and values that our model does not support.
    """
    def size(*names: str, default: int | None = None) -> int:
        found = next((theirs[name] for name in names if theirs.get(name) is not None), default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise UserError(f"{where}: {names[0]}={found!r}: must be an integer, at least 1")
        return found

    for name, supported in SUPPORTED_VALUES.items():
        if theirs.get(name, supported) != supported:
            raise UserError(f"{where}: {name}={theirs[name]!r}: not supported; must be {supported!r}")
    activation = theirs.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise UserError(f"{where}: activation_function={activation!r}: not supported; must be one of "
                        f"{', '.join(ACTIVATIONS)}")
    width = size("n_embd", "hidden_size")
    inner = size("n_inner", default=4 * width)
    if inner % width:
        raise UserError(f"{where}: n_inner={inner}: not supported; must be a multiple of n_embd={width}")
    is_tied = theirs.get("tie_word_embeddings", True)
    if not isinstance(is_tied, bool):
        raise UserError(f"{where}: tie_word_embeddings={is_tied!r}: must be true or false")
    return dict(
        architecture="gpt", vocab_size=size("vocab_size"), context_length=size("n_positions", "n_ctx"),
        num_layers=size("n_layer", "num_hidden_layers"), num_heads=size("n_head", "num_attention_heads"),
        d_model=width, mlp_ratio=inner / width, activation=ACTIVATIONS[activation], position="learned",
        use_bias=True, tie_embeddings=is_tied)
