"""Gated DeltaNet (Yang, Kautz & Hatamizadeh, arXiv 2412.06464): a mixer with a state of constant size.

Shapes: B batch, T time, D model width, H heads, K key width, V value width.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.errors import UserError
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context, cache_variable
from smallgpt_jax.models.convolution import ShortConvolution
from smallgpt_jax.models.layers import INIT_STD, Dense, deepnorm_gain, residual_std, rms_norm
from smallgpt_jax.ops.gated_delta import gated_delta

TAPS = 4  # of the convolution of queries, keys and values
NORM_EPSILON = 1e-6  # added to the squared norms of queries and keys, as in the paper's code


class GatedDeltaNet(nn.Module):
    """The block of section 3.4, figure 1. Its cache has B·H·K·V float32 elements, and B·3·H·(2·K + V) in `dtype`.

    Queries, keys and values pass a convolution and SiLU; queries and keys are then divided by their norms, and queries
    by √K. The decay is α = exp(−exp(A_log)·softplus(x·w + dt_bias)) (Dao & Gu, arXiv 2405.21060), and β = sigmoid(x·w).
    Each head's output has an RMSNorm and a gate. Only the two matrices of α and β have full rank with a `rank_ratio`.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c = self.config
        if context.prefix_lengths_B is not None:
            raise UserError(f"config.model.mixers={c.mixers!r}: a recurrent mixer reads tokens in order and has no "
                            "bidirectional prefix; use attention in all blocks, or another config.train.objective")
        q, k, v = self.queries_keys_values(x_BxTxD, context)
        log_decay_BxTxH, beta_BxTxH = self.gates(x_BxTxD, context)
        y_BxTxHxV = self.apply_rule(q, k, v, log_decay_BxTxH, beta_BxTxH, context)
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
        c, axes = self.config, ("embed", "heads")
        decay_BxTxH, beta_BxTxH = (
            Dense((c.num_heads,), axes, INIT_STD, False, c.dtype, name=name)(x_BxTxD, context).astype(jnp.float32)
            for name in ("decay", "beta"))
        rate_H = jnp.exp(self.param("A_log", nn.with_logical_partitioning(initial_log_rates, ("heads",)),
                                    (c.num_heads,)))
        bias_H = self.param("dt_bias", nn.with_logical_partitioning(initial_step_biases, ("heads",)), (c.num_heads,))
        log_decay_BxTxH = -rate_H[None, None] * nn.softplus(decay_BxTxH + bias_H[None, None])
        beta_BxTxH = nn.sigmoid(beta_BxTxH)
        if not context.decode:
            return log_decay_BxTxH, beta_BxTxH
        is_token_BxTx1 = (jnp.arange(x_BxTxD.shape[1])[None] < context.length_B[:, None])[:, :, None]
        return jnp.where(is_token_BxTx1, log_decay_BxTxH, 0), jnp.where(is_token_BxTx1, beta_BxTxH, 0)

    def apply_rule(self, q_BxTxHxK, k_BxTxHxK, v_BxTxHxV, log_decay_BxTxH, beta_BxTxH, context: Context):
        """Returns (B, T, H, V) float32. In decoding, reads and writes the state in the cache."""
        batch, time, heads, key_width = q_BxTxHxK.shape
        shape = (batch, heads, key_width, v_BxTxHxV.shape[-1])
        arguments = q_BxTxHxK, k_BxTxHxK, v_BxTxHxV, log_decay_BxTxH, beta_BxTxH
        if not context.decode:
            return gated_delta(*arguments, context.positions(time) == 0, jnp.zeros(shape))[0]
        state, _ = cache_variable(self, "state", shape, jnp.float32)
        y_BxTxHxV, state.value = gated_delta(*arguments, jnp.zeros((1, time), bool), state.value)
        return y_BxTxHxV

    def projection(self, name: str, width: int, gain: float = 1.0) -> Dense:
        c = self.config
        return Dense((c.num_heads, width), ("embed", "heads", "head_width"), INIT_STD * gain, c.use_bias, c.dtype,
                     c.rank_ratio, name=name)


def normalize(x):
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPSILON)


def initial_log_rates(key, shape, dtype=jnp.float32):
    """Rates are uniform in (0, 16), as in the paper's code."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


def initial_step_biases(key, shape, dtype=jnp.float32):
    """softplus(dt_bias) is log-uniform in (0.001, 0.1), as in Mamba-2 (arXiv 2405.21060)."""
    steps = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(0.001), math.log(0.1)))
    return steps + jnp.log(-jnp.expm1(-steps))  # the inverse of softplus
