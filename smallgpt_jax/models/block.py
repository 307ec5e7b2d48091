"""The block of the paper and of GPT-2."""

import flax.linen as nn

from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.layers import make_mlp, norm
from smallgpt_jax.models.mixers import make_mixer


class Block(nn.Module):
    """x ← x + mixer(norm(x)), then x ← x + MLP(norm(x)). Other forms are in models/variants.py."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c = self.config
        mixer, mlp = make_mixer(c), make_mlp(c)
        mixer_norm, mlp_norm = norm(c, f"{mixer.name}_norm"), norm(c, "mlp_norm")
        dropout = nn.Dropout(c.dropout, deterministic=not context.train)

        x_BxTxD = x_BxTxD + dropout(mixer(mixer_norm(x_BxTxD), context))
        x_BxTxD = x_BxTxD + dropout(mlp(mlp_norm(x_BxTxD), context))

        x_BxTxD = nn.with_logical_constraint(x_BxTxD, ("batch", "time", "embed_activation"))
        self.sow("features", "output", x_BxTxD)  # compared with those of a teacher
        return x_BxTxD
