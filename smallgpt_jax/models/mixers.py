"""Mixers: Linen modules that move information between positions, with a field `config`.

They are called with (B, T, D) activations and a `Context`. docs/your-own.md describes decoding and
separate documents.
"""

import flax.linen as nn

from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.models.attention import Attention
from smallgpt_jax.models.attention_variants import AttentionVariant, is_variant
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.custom_code import find_module
from smallgpt_jax.models.gated_convolution import GatedConvolution
from smallgpt_jax.models.gated_delta import GatedDeltaNet
from smallgpt_jax.models.mamba import Mamba2

# Names in config.model.mixers
MIXERS = {"attention": Attention, "delta": GatedDeltaNet, "mamba": Mamba2, "conv": GatedConvolution}
# Field → its values without attention; others would have no effect
_WITHOUT_ATTENTION = {
    "attention": ("auto", "xla"),
    "position": ("learned", "none"),
    "qk_norm": (False,),
    "num_kv_heads": (0,),
    "attention_windows": ((),),
    "attention_gate": (False,),
    "value_embeddings": ((),),
}


def find_mixer(name: str) -> type[nn.Module]:
    if "," in str(name):
        raise UserError(
            f"config.model.mixers={short_repr(name)}: not one name; quote each name, as in "
            f"{tuple(name.split(','))!r}"
        )
    return find_module("mixers", name, MIXERS)


def refuse_unread_fields(config: ModelConfig) -> None:
    """Raises UserError for values without effect. Mixers of users may read any field."""
    names = set(config.mixers[: config.depth])
    if "attention" in names or not names <= set(MIXERS):
        return
    for field, allowed in _WITHOUT_ATTENTION.items():
        if getattr(config, field) not in allowed:
            config.refuse(
                field,
                f"only attention uses it, and config.model.mixers={config.mixers!r} has no "
                f"attention in {config.depth} blocks; set it to "
                f"{' or '.join(map(repr, allowed))}, or add attention",
            )


def make_mixer(config: ModelConfig) -> nn.Module:
    mixer = find_mixer(config.mixers[0])
    if mixer is not Attention:
        return mixer(config, name="mixer")
    attention = AttentionVariant if is_variant(config) else Attention
    return attention(config, name="attention")
