"""GPT: N blocks in a row, the baseline of arXiv 2404.14462."""

import flax.linen as nn

from smallgpt_jax.models.layers import Mode, Trunk, blocks


class GPT(Trunk):
    """`num_layers` pre-LayerNorm blocks, (B, T, D) → (B, T, D)."""

    @nn.compact
    def __call__(self, x_BxTxD, mode: Mode):
        return blocks(self.config, self.config.num_layers, mode, name="blocks")(x_BxTxD)
