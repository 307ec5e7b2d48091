"""Mamba-2 (Dao & Gu, arXiv 2405.21060): a mixer with a state of constant size.

Shapes: B batch, T time, D model width, H heads, N state size, P width of a head's values.
"""

import functools

import flax.linen as nn
import jax.numpy as jnp

from smallgpt_jax.models.context import Context
from smallgpt_jax.models.convolution import ShortConvolution
from smallgpt_jax.models.layers import deepnorm_gain, ones, rms_norm
from smallgpt_jax.models.recurrence import TAPS, RecurrentMixer, refuse_prefix, zero_at_padding
from smallgpt_jax.ops.chunks import RecurrenceInputs
from smallgpt_jax.ops.state_space import state_space

_LEAST_RATE = 1.0  # initial decay rates are uniform in (1, 16), as in the paper's code


class Mamba2(RecurrentMixer):
    """The block of section 7, figure 6, with one group: all heads share keys k and queries q, (B, T,
    1, N), the paper's B and C. Its cache has B·H·N·P float32 elements, and B·3·(H·P + 2·N) in
    `dtype`.

    Values v (the paper's x), k and q pass a convolution and SiLU. With Δ = softplus(x·w + dt_bias),
    the state decays by a = exp(−Δ·exp(A_log)) and adds k·(Δ·v)ᵀ; D·v is added to what q reads. The
    norm follows the gate. With a `rank_ratio`, the matrices of k, q and Δ are full.
    """

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c, (batch, time, _) = self.config, x_BxTxD.shape
        refuse_prefix(c, context)
        shape = (batch, time, c.num_heads, c.mamba_head_width)
        v_BxTxHxP = self.project("value", c.mamba_head_width, x_BxTxD, context, deepnorm_gain(c))
        convolution = ShortConvolution(TAPS, "heads", name="convolution")
        v_BxTxI = convolution(v_BxTxHxP.reshape(batch, time, -1), context)
        v_BxTxHxP = nn.silu(v_BxTxI).reshape(shape)
        k_BxTxN = self.narrow("key", c.mamba_state, "state", x_BxTxD, context)
        q_BxTxN = self.narrow("query", c.mamba_state, "state", x_BxTxD, context)
        # Apart from the values, because a mesh shards these by heads, which share keys and queries.
        kq_BxTxJ = jnp.concatenate([k_BxTxN, q_BxTxN], axis=-1)
        convolution = ShortConvolution(TAPS, "state", name="key_query_convolution")
        kq_BxTxJ = nn.silu(convolution(kq_BxTxJ, context))
        k_BxTx1xN, q_BxTx1xN = jnp.split(kq_BxTxJ[:, :, None], 2, axis=-1)
        steps_BxTxH = self.step_sizes(self.narrow("step", c.num_heads, "heads", x_BxTxD, context))
        steps_BxTxH = zero_at_padding(steps_BxTxH, context)
        inputs = RecurrenceInputs(
            q_BxTx1xN,
            k_BxTx1xN,
            steps_BxTxH[..., None] * v_BxTxHxP,
            -self.decay_rates(_LEAST_RATE) * steps_BxTxH,
        )
        rule = functools.partial(state_space, inputs, backend=c.attention)
        state_shape = (batch, c.num_heads, c.mamba_state, c.mamba_head_width)
        y_BxTxHxP = self.carry_state(context, time, state_shape, rule)
        skip_H = self.param("D", ones("heads"), (c.num_heads,))
        y_BxTxHxP += skip_H[None, None, :, None] * v_BxTxHxP
        gate_BxTxHxP = self.project("gate", c.mamba_head_width, x_BxTxD, context)
        y_BxTxHxP *= nn.silu(gate_BxTxHxP.astype(jnp.float32))
        y_BxTxI = rms_norm(c, "out_norm")(y_BxTxHxP.reshape(batch, time, -1))
        return self.out(y_BxTxI.reshape(shape), context)
