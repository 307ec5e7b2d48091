"""Gated DeltaNet (Yang, Kautz & Hatamizadeh, arXiv 2412.06464): a mixer with a state of constant size.

Shapes: B batch, T time, D model width, H heads, K key width, V value width.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.convolution import ShortConvolution
from smallgpt_jax.models.layers import INIT_STD, Dense, deepnorm_gain, residual_std, rms_norm
from smallgpt_jax.models.recurrence import (
    TAPS,
    carry_state,
    decay_rates,
    refuse_prefix,
    step_sizes,
    zero_at_padding,
)
from smallgpt_jax.ops.gated_delta import gated_delta

LEAST_RATE = 0.01  # initial decay rates are uniform in (0, 16) in the paper's code; log 0 has no value
NORM_EPSILON = 1e-6  # added to the squared norms of queries and keys, as in the paper's code


class GatedDeltaNet(nn.Module):
    """The block of section 3.4, figure 1. Its cache has B·H·K·V float32 elements, and B·3·H·(2·K + V) in `dtype`.

    Queries, keys and values pass a convolution and SiLU; queries and keys are then divided by their norms, and queries
    by √K. The decay is α = exp(−exp(A_log)·softplus(x·w + dt_bias)), and β = sigmoid(x·w). Each head's output has an
    RMSNorm and a gate. With a `rank_ratio`, only the two matrices of α and β are full.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c, (batch, time, _) = self.config, x_BxTxD.shape
        refuse_prefix(c, context)
        q, k, v = self.queries_keys_values(x_BxTxD, context)
        log_decay_BxTxH, beta_BxTxH = self.gates(x_BxTxD, context)
        y_BxTxHxV = carry_state(
            self, context, time, (batch, c.num_heads, c.delta_key_width, c.delta_value_width),
            functools.partial(gated_delta, q, k, v, log_decay_BxTxH, beta_BxTxH, backend=c.attention))
        gate_BxTxHxV = self.projection("gate", c.delta_value_width)(x_BxTxD, context)
        y_BxTxHxV = rms_norm(c, "out_norm")(y_BxTxHxV) * nn.silu(gate_BxTxHxV)
        return Dense((c.d_model,), ("heads", "head_width", "embed"), residual_std(c), c.use_bias, c.dtype,
                     c.rank_ratio, name="out")(y_BxTxHxV, context)

    def queries_keys_values(self, x_BxTxD, context: Context):
        """Returns float32 arrays (B, T, H, K or V)."""
        c, (batch, time, _) = self.config, x_BxTxD.shape
        qkv = jnp.concatenate([
            self.projection("query", c.delta_key_width)(x_BxTxD, context),
            self.projection("key", c.delta_key_width)(x_BxTxD, context),
            self.projection("value", c.delta_value_width, deepnorm_gain(c))(x_BxTxD, context)], axis=-1)
        convolution = ShortConvolution(TAPS, "heads", name="convolution")
        qkv = nn.silu(convolution(qkv.reshape(batch, time, -1), context)).reshape(qkv.shape)
        q, k, v = jnp.split(qkv, (c.delta_key_width, 2 * c.delta_key_width), axis=-1)
        return normalize(q) / math.sqrt(c.delta_key_width), normalize(k), v

    def gates(self, x_BxTxD, context: Context):
        """Returns log α and β, (B, T, H) float32, which are 0 at padding."""
        c = self.config
        decay_BxTxH, beta_BxTxH = (
            Dense((c.num_heads,), ("embed", "heads"), INIT_STD, False, c.dtype, name=name)(x_BxTxD, context)
            for name in ("decay", "beta"))
        log_decay_BxTxH = -decay_rates(self, c.num_heads, LEAST_RATE)[None, None] * step_sizes(self, decay_BxTxH)
        beta_BxTxH = nn.sigmoid(beta_BxTxH.astype(jnp.float32))
        return zero_at_padding(log_decay_BxTxH, context), zero_at_padding(beta_BxTxH, context)

    def projection(self, name: str, width: int, gain: float = 1.0) -> Dense:
        c = self.config
        return Dense((c.num_heads, width), ("embed", "heads", "head_width"), INIT_STD * gain, c.use_bias, c.dtype,
                     c.rank_ratio, name=name)


def normalize(x):
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPSILON)
