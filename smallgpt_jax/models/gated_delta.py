"""Gated DeltaNet (Yang, Kautz & Hatamizadeh, arXiv 2412.06464): a mixer with a state of constant
size.

Shapes: B batch, T time, D model width, H heads, K key width, V value width.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.models.context import Context
from smallgpt_jax.models.convolution import ShortConvolution
from smallgpt_jax.models.layers import deepnorm_gain, rms_norm
from smallgpt_jax.models.recurrence import TAPS, RecurrentMixer, refuse_prefix, zero_at_padding
from smallgpt_jax.ops.chunks import RecurrenceInputs
from smallgpt_jax.ops.gated_delta import gated_delta

# Initial decay rates are uniform in (0, 16) in the paper's code; log 0 has no value.
_LEAST_RATE = 0.01
_NORM_EPSILON = 1e-6  # added to the squared norms of queries and keys, as in the paper's code


class GatedDeltaNet(RecurrentMixer):
    """The block of section 3.4, figure 1. Its cache has B·H·K·V float32 elements, and B·3·H·(2·K +
    V) in `dtype`.

    Queries, keys and values pass a convolution and SiLU; queries and keys are then divided by their
    norms, and queries by √K. The decay is α = exp(−exp(A_log)·softplus(x·w + dt_bias)), and β =
    sigmoid(x·w). Each head's output has an RMSNorm and a gate. With a `rank_ratio`, only the two
    matrices of α and β are full.
    """

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c, (batch, time, _) = self.config, x_BxTxD.shape
        refuse_prefix(c, context)
        key_width, value_width = c.delta_key_width, c.delta_value_width
        q = self.project("query", key_width, x_BxTxD, context)
        k = self.project("key", key_width, x_BxTxD, context)
        v = self.project("value", value_width, x_BxTxD, context, deepnorm_gain(c))
        qkv = jnp.concatenate([q, k, v], axis=-1)  # one convolution for all three
        convolution = ShortConvolution(TAPS, "heads", name="convolution")
        qkv = nn.silu(convolution(qkv.reshape(batch, time, -1), context)).reshape(qkv.shape)
        q, k, v = jnp.split(qkv, (key_width, 2 * key_width), axis=-1)
        decay_BxTxH = self.narrow("decay", c.num_heads, "heads", x_BxTxD, context)
        beta_BxTxH = self.narrow("beta", c.num_heads, "heads", x_BxTxD, context)
        log_decay_BxTxH = -self.decay_rates(_LEAST_RATE) * self.step_sizes(decay_BxTxH)
        beta_BxTxH = nn.sigmoid(beta_BxTxH.astype(jnp.float32))
        inputs = RecurrenceInputs(
            _normalize(q) / math.sqrt(key_width),
            _normalize(k),
            v,
            zero_at_padding(log_decay_BxTxH, context),
            zero_at_padding(beta_BxTxH, context),
        )
        rule = functools.partial(gated_delta, inputs, backend=c.attention)
        state_shape = (batch, c.num_heads, key_width, value_width)
        y_BxTxHxV = self.carry_state(context, time, state_shape, rule)
        gate_BxTxHxV = self.project("gate", value_width, x_BxTxD, context)
        return self.out(rms_norm(c, "out_norm")(y_BxTxHxV) * nn.silu(gate_BxTxHxV), context)


def _normalize(x):
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _NORM_EPSILON)
