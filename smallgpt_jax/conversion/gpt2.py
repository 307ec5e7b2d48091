"""GPT-2's names and layouts: Hugging Face's GPT2LMHeadModel, and, of blocks, whatever descends from it.

GPT-2 has biases everywhere, an output head tied to the embedding and the tanh form of GELU. Its linear
weights lie (inputs, outputs), those of its descendants (nanoGPT, the paper's code) as PyTorch has them.
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
               "gelu_fast": "gelu_tanh"}  # theirs: ours
# What their config may say beyond the sizes, and the only value that our model computes.
FIXED = {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
         "add_cross_attention": False}


def their_name(name: str) -> str:
    """The name of one of our tensors in a GPT2LMHeadModel."""
    if block := re.fullmatch(r"trunk\.blocks\.(\d+)\.(.*)\.(weight|bias)", name):
        return f"transformer.h.{block[1]}.{BLOCK_NAMES[block[2]]}.{block[3]}"
    return OTHER_NAMES.get(name, name)


def heads_first(x: np.ndarray, num_heads: int) -> np.ndarray:
    """The outputs of a projection to queries, keys, values, each of all heads → those of each head."""
    return x.reshape(3, num_heads, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def heads_last(x: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of `heads_first`."""
    return x.reshape(num_heads, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def is_gpt2(config: ModelConfig) -> bool:
    """Whether a GPT2LMHeadModel computes what this model does."""
    return (config.architecture == "gpt" and config.use_bias and config.tie_embeddings
            and config.activation == "gelu_tanh" and config.position == "learned")


def to_hugging_face(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our tensors as those of a GPT2LMHeadModel."""
    theirs = {}
    for name, x in tensors.items():
        if ".qkv." in name:
            x = heads_last(x, config.num_heads)
        is_linear = name.startswith("trunk.") and x.ndim == 2
        theirs[their_name(name)] = np.ascontiguousarray(x.T if is_linear else x)
    return theirs


def from_hugging_face(config: ModelConfig, names, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a GPT2LMHeadModel, or of the GPT2Model in it, as ours; `names` are those that our
    model has. What is not known keeps its name."""
    ours = {their_name(name): name for name in names}
    renamed = {}
    for name, x in tensors.items():
        if re.fullmatch(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias", name):
            continue  # the causal mask, which old files hold
        full = name if name in ours else f"transformer.{name}"
        if name == "lm_head.weight" and "head.weight" not in names:
            continue  # the tied head
        if (known := ours.get(full)) is None:
            renamed[name] = x
            continue
        x = x.T if known.startswith("trunk.") and x.ndim == 2 else x
        if ".qkv." in known and len(x) % (3 * config.num_heads) == 0:
            x = heads_first(x, config.num_heads)
        renamed[known] = x
    return renamed


def to_config(config: ModelConfig) -> dict:
    """The config.json of the GPT2LMHeadModel that computes what this model does."""
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab_size,
        "n_positions": config.context_length, "n_embd": config.d_model, "n_layer": config.num_layers,
        "n_head": config.num_heads, "n_inner": config.mlp_width,
        "activation_function": "gelu_new", "embd_pdrop": config.dropout, "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0, "tie_word_embeddings": True, **FIXED}


def from_config(theirs: Mapping, where: str) -> dict:
    """The fields of our `model` group for the config.json of a GPT-2.

    Raises UserError for what our model does not compute, for values of another type, or if a size is missing.
    """
    def size(*names: str, default: int | None = None) -> int:
        found = next((theirs[name] for name in names if theirs.get(name) is not None), default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise UserError(f"{where}: {names[0]} is {found!r}; must be an integer, at least 1")
        return found

    for name, wanted in FIXED.items():
        if theirs.get(name, wanted) != wanted:
            raise UserError(f"{where}: {name}={theirs[name]!r} is not supported, only {wanted!r}")
    activation = theirs.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise UserError(f"{where}: activation_function={activation!r} is not supported, only "
                        f"{', '.join(ACTIVATIONS)}")
    width = size("n_embd", "hidden_size")
    inner = size("n_inner", default=4 * width)
    if inner % width:
        raise UserError(f"{where}: n_inner={inner} is not a multiple of n_embd={width}, which is not supported")
    is_tied = theirs.get("tie_word_embeddings", True)
    if not isinstance(is_tied, bool):
        raise UserError(f"{where}: tie_word_embeddings is {is_tied!r}; must be true or false")
    return dict(
        architecture="gpt", vocab_size=size("vocab_size"), context_length=size("n_positions", "n_ctx"),
        num_layers=size("n_layer", "num_hidden_layers"), num_heads=size("n_head", "num_attention_heads"),
        d_model=width, mlp_ratio=inner / width, activation=ACTIVATIONS[activation], position="learned",
        use_bias=True, tie_embeddings=is_tied)
