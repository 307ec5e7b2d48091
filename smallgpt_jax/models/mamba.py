"""Mamba-2 (Dao & Gu, arXiv 2405.21060): a mixer with a state of constant size.

Shapes: B batch, T time, D model width, H heads, N state size, P width of a head's values.
"""

import functools

import flax.linen as nn
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
from smallgpt_jax.ops.state_space import state_space

LEAST_RATE = 1.0  # initial decay rates are uniform in (1, 16), as in the paper's code


class Mamba2(nn.Module):
    """The block of section 7, figure 6, with one group: all heads share B and C, (B, T, 1, N). Its cache has B·H·N·P
    float32 elements, and B·3·(H·P + 2·N) in `dtype`.

    Values v (the paper's x), B and C pass a convolution and SiLU. With Δ = softplus(x·w + dt_bias), the state decays by
    a = exp(−Δ·exp(A_log)) and adds B·(Δ·v)ᵀ; D·v is added to what C reads. The norm follows the gate. With a
    `rank_ratio`, the matrices of B, C and Δ are full.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c, (batch, time, _) = self.config, x_BxTxD.shape
        refuse_prefix(c, context)
        width = c.num_heads * c.mamba_head_width
        v_BxTxHxP = self.project("value", x_BxTxD, context, deepnorm_gain(c))
        v_BxTxI = ShortConvolution(TAPS, "heads", name="convolution")(v_BxTxHxP.reshape(batch, time, width), context)
        v_BxTxHxP = nn.silu(v_BxTxI).reshape(v_BxTxHxP.shape)
        b_BxTx1xN, c_BxTx1xN = self.keys_and_queries(x_BxTxD, context)
        steps_BxTxH = step_sizes(self, self.narrow("step", c.num_heads, "heads", x_BxTxD, context))
        steps_BxTxH = zero_at_padding(steps_BxTxH, context)
        log_decay_BxTxH = -decay_rates(self, c.num_heads, LEAST_RATE)[None, None] * steps_BxTxH
        y_BxTxHxP = carry_state(
            self, context, time, (batch, c.num_heads, c.mamba_state, c.mamba_head_width),
            functools.partial(state_space, c_BxTx1xN, b_BxTx1xN, steps_BxTxH[..., None] * v_BxTxHxP, log_decay_BxTxH,
                              backend=c.attention))
        skip_H = self.param("D", nn.with_logical_partitioning(nn.initializers.ones, ("heads",)), (c.num_heads,))
        y_BxTxHxP += skip_H[None, None, :, None] * v_BxTxHxP
        y_BxTxHxP *= nn.silu(self.project("gate", x_BxTxD, context).astype(jnp.float32))
        y_BxTxI = rms_norm(c, "out_norm")(y_BxTxHxP.reshape(batch, time, width))
        return Dense((c.d_model,), ("heads", "head_width", "embed"), residual_std(c), c.use_bias, c.dtype,
                     c.rank_ratio, name="out")(y_BxTxI.reshape(y_BxTxHxP.shape), context)

    def keys_and_queries(self, x_BxTxD, context: Context):
        """Returns B and C, (B, T, 1, N) float32."""
        bc_BxTxJ = jnp.concatenate([self.narrow(name, self.config.mamba_state, "state", x_BxTxD, context)
                                    for name in ("key", "query")], axis=-1)
        bc_BxTxJ = nn.silu(ShortConvolution(TAPS, "state", name="key_query_convolution")(bc_BxTxJ, context))
        return jnp.split(bc_BxTxJ[:, :, None], 2, axis=-1)

    def project(self, name: str, x_BxTxD, context: Context, gain: float = 1.0):
        """Returns (B, T, H, P)."""
        c = self.config
        return Dense((c.num_heads, c.mamba_head_width), ("embed", "heads", "head_width"), INIT_STD * gain, c.use_bias,
                     c.dtype, c.rank_ratio, name=name)(x_BxTxD, context)

    def narrow(self, name: str, width: int, axis: str, x_BxTxD, context: Context):
        return Dense((width,), ("embed", axis), INIT_STD, False, self.config.dtype, name=name)(x_BxTxD, context)
