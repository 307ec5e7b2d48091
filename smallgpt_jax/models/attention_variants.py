"""Attention with options that our comparisons tried (docs/results.md)."""

import flax.linen as nn
import jax.numpy as jnp

from smallgpt_jax.devices import sharding
from smallgpt_jax.models.attention import Attention
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.initializers import INIT_STD, normal
from smallgpt_jax.models.layers import Dense

TABLE_AXES = ("vocab", "embed")  # as of the token embedding


def is_variant(config: ModelConfig) -> bool:
    return config.attention_gate or any(config.value_embeddings)


class AttentionVariant(Attention):
    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        q_BxHxTxK, k_BxGxTxK, v_BxGxTxK = self.heads(x_BxTxD, context)
        if any(self.config.value_embeddings):
            v_BxGxTxK += self.value_embeddings(context)
        y_BxHxTxK = self.attend(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, context)
        if self.config.attention_gate:
            y_BxHxTxK *= self.gate(x_BxTxD, context)
        return self.output(y_BxHxTxK, context)

    def value_embeddings(self, context: Context):
        """Returns the tokens' rows of a table (V, G·K), to add to the values, (B, G, T, K)."""
        c = self.config
        shape = (c.vocab_size, c.kv_heads * c.head_width)
        table_VxE = self.param("value_embedding", normal(INIT_STD, *TABLE_AXES), shape)
        # Not `sharding.look_up`: the paths of a pgpt are vmapped, and XLA cannot partition its
        # shard_map there.
        gathered_VxE = sharding.gather_weight(table_VxE, TABLE_AXES)
        rows_BxTxE = jnp.take(gathered_VxE, context.tokens_BxT, axis=0).astype(c.dtype)
        rows_BxTxGxK = rows_BxTxE.reshape(*context.tokens_BxT.shape, c.kv_heads, c.head_width)
        return jnp.swapaxes(rows_BxTxGxK, 1, 2)

    def gate(self, x_BxTxD, context: Context):
        """Returns sigmoid(x·w) for each head, (B, H, T, 1) (arXiv 2505.06708)."""
        c = self.config
        axes = ("embed", "heads")
        gate = Dense((c.num_heads,), axes, INIT_STD, False, c.dtype, name="gate")
        return jnp.swapaxes(nn.sigmoid(gate(x_BxTxD, context)), 1, 2)[..., None]
