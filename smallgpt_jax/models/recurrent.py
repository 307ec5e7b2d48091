"""Mixers with a memory of constant size: Gated DeltaNet and Mamba-2, which have a state, and gated convolutions.

Shapes: B batch, T time, D model width, H heads, K key width, V value width (of Mamba-2: N state size, P value width).
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.errors import UserError
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context, cache_variable
from smallgpt_jax.models.convolution import ShortConvolution
from smallgpt_jax.models.layers import INIT_STD, Dense, block_dense, deepnorm_gain, ones, residual_std, rms_norm
from smallgpt_jax.ops.recurrences import gated_delta, state_space

TAPS = 4  # of the short convolutions, as in the papers
HEAD_AXES = ("embed", "heads", "head_width")
# Initial decay rates are uniform between these and 16 in the papers' code; log 0 has no value.
LEAST_DELTA_RATE, LEAST_MAMBA_RATE = 0.01, 1.0
NORM_EPSILON = 1e-6  # added to the squared norms of queries and keys, as in the code of Gated DeltaNet


class RecurrentMixer(nn.Module):
    config: ModelConfig

    def refuse_prefix(self, context: Context) -> None:
        if context.prefix_BxT is not None or self.config.attention_mask != "causal":
            raise UserError(f"config.model.mixers={self.config.mixers[0]!r}: does not see later tokens; use attention "
                            "in all blocks, or another config.train.objective")

    def project(self, name: str, width: int, x_BxTxD, context: Context, gain: float = 1.0):
        """Returns (B, T, H, width)."""
        return block_dense(self.config, name, (self.config.num_heads, width), HEAD_AXES, INIT_STD * gain)(
            x_BxTxD, context)

    def narrow(self, name: str, width: int, axis: str, x_BxTxD, context: Context):
        """Returns (B, T, width). The matrix is full, whatever the `rank_ratio`."""
        return Dense((width,), ("embed", axis), INIT_STD, False, self.config.dtype, name=name)(x_BxTxD, context)

    def out(self, y_BxTxHxV, context: Context):
        c = self.config
        return block_dense(c, "out", (c.d_model,), ("heads", "head_width", "embed"), residual_std(c))(
            y_BxTxHxV, context)

    def carry_state(self, context: Context, time: int, shape: tuple[int, ...], rule: Callable):
        """Returns y of `rule`(begins_BxT, state) → (y, last state). In decoding, the cache has the state."""
        if not context.decode:
            return rule(context.positions(time) == 0, jnp.zeros(shape))[0]
        state, _ = cache_variable(self, "state", shape, jnp.float32)
        y, state.value = rule(jnp.zeros((1, time), bool), state.value)
        return y

    def decay_rates(self, least: float):
        """Returns exp(A_log), (1, 1, H), initially uniform in (least, 16)."""
        def initial(key, shape, dtype=jnp.float32):
            return jnp.log(jax.random.uniform(key, shape, dtype, least, 16.0))

        initial = nn.with_logical_partitioning(initial, ("heads",))
        return jnp.exp(self.param("A_log", initial, (self.config.num_heads,)))[None, None]

    def step_sizes(self, x_BxTxH):
        """Returns softplus(x + dt_bias) in float32, initially log-uniform in (0.001, 0.1) (Mamba-2)."""
        def initial(key, shape, dtype=jnp.float32):
            steps = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(0.001), math.log(0.1)))
            return steps + jnp.log(-jnp.expm1(-steps))  # the inverse of softplus

        bias_H = self.param("dt_bias", nn.with_logical_partitioning(initial, ("heads",)), (x_BxTxH.shape[-1],))
        return nn.softplus(x_BxTxH.astype(jnp.float32) + bias_H[None, None])


def zero_at_padding(x_BxTxH, context: Context):
    if not context.decode:
        return x_BxTxH
    is_token_BxT = jnp.arange(x_BxTxH.shape[1])[None] < context.length_B[:, None]
    return jnp.where(is_token_BxT[:, :, None], x_BxTxH, 0)


class GatedDeltaNet(RecurrentMixer):
    """The block of section 3.4, figure 1, of Yang, Kautz & Hatamizadeh, arXiv 2412.06464. Its cache has B·H·K·V float32
    elements, and B·3·H·(2·K + V) in `dtype`.

    Queries, keys and values pass a convolution and SiLU; queries and keys are then divided by their norms, and queries
    by √K. The decay is α = exp(−exp(A_log)·softplus(x·w + dt_bias)), and β = sigmoid(x·w). Each head's output has an
    RMSNorm and a gate. With a `rank_ratio`, only the two matrices of α and β are full.
    """

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        self.refuse_prefix(context)
        c, (batch, time, _) = self.config, x_BxTxD.shape
        key_width, value_width = c.delta_key_width, c.delta_value_width
        qkv = jnp.concatenate([
            self.project("query", key_width, x_BxTxD, context), self.project("key", key_width, x_BxTxD, context),
            self.project("value", value_width, x_BxTxD, context, deepnorm_gain(c))], axis=-1)
        convolution = ShortConvolution(TAPS, "heads", name="convolution")
        qkv = nn.silu(convolution(qkv.reshape(batch, time, -1), context)).reshape(qkv.shape)
        q, k, v = jnp.split(qkv, (key_width, 2 * key_width), axis=-1)
        decay_BxTxH, beta_BxTxH = (self.narrow(name, c.num_heads, "heads", x_BxTxD, context)
                                   for name in ("decay", "beta"))
        log_decay_BxTxH = -self.decay_rates(LEAST_DELTA_RATE) * self.step_sizes(decay_BxTxH)
        beta_BxTxH = nn.sigmoid(beta_BxTxH.astype(jnp.float32))
        rule = functools.partial(
            gated_delta, normalize(q) / math.sqrt(key_width), normalize(k), v,
            zero_at_padding(log_decay_BxTxH, context), zero_at_padding(beta_BxTxH, context), backend=c.attention)
        y_BxTxHxV = self.carry_state(context, time, (batch, c.num_heads, key_width, value_width), rule)
        gate_BxTxHxV = self.project("gate", value_width, x_BxTxD, context)
        return self.out(rms_norm(c, "out_norm")(y_BxTxHxV) * nn.silu(gate_BxTxHxV), context)


def normalize(x):
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPSILON)


class Mamba2(RecurrentMixer):
    """The block of section 7, figure 6, of Dao & Gu, arXiv 2405.21060, with one group: all heads share B and C,
    (B, T, 1, N). Its cache has B·H·N·P float32 elements, and B·3·(H·P + 2·N) in `dtype`.

    Values v (the paper's x), B and C pass a convolution and SiLU. With Δ = softplus(x·w + dt_bias), the state decays by
    a = exp(−Δ·exp(A_log)) and adds B·(Δ·v)ᵀ; D·v is added to what C reads. The norm follows the gate. With a
    `rank_ratio`, the matrices of B, C and Δ are full.
    """

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        self.refuse_prefix(context)
        c, (batch, time, _) = self.config, x_BxTxD.shape
        shape = (batch, time, c.num_heads, c.mamba_head_width)
        v_BxTxHxP = self.project("value", c.mamba_head_width, x_BxTxD, context, deepnorm_gain(c))
        v_BxTxI = ShortConvolution(TAPS, "heads", name="convolution")(v_BxTxHxP.reshape(batch, time, -1), context)
        v_BxTxHxP = nn.silu(v_BxTxI).reshape(shape)
        bc_BxTxJ = jnp.concatenate([self.narrow(name, c.mamba_state, "state", x_BxTxD, context)
                                    for name in ("key", "query")], axis=-1)
        bc_BxTxJ = nn.silu(ShortConvolution(TAPS, "state", name="key_query_convolution")(bc_BxTxJ, context))
        b_BxTx1xN, c_BxTx1xN = jnp.split(bc_BxTxJ[:, :, None], 2, axis=-1)
        steps_BxTxH = self.step_sizes(self.narrow("step", c.num_heads, "heads", x_BxTxD, context))
        steps_BxTxH = zero_at_padding(steps_BxTxH, context)
        rule = functools.partial(
            state_space, c_BxTx1xN, b_BxTx1xN, steps_BxTxH[..., None] * v_BxTxHxP,
            -self.decay_rates(LEAST_MAMBA_RATE) * steps_BxTxH, backend=c.attention)
        y_BxTxHxP = self.carry_state(context, time, (batch, c.num_heads, c.mamba_state, c.mamba_head_width), rule)
        skip_H = self.param("D", ones("heads"), (c.num_heads,))
        y_BxTxHxP += skip_H[None, None, :, None] * v_BxTxHxP
        y_BxTxHxP *= nn.silu(self.project("gate", c.mamba_head_width, x_BxTxD, context).astype(jnp.float32))
        y_BxTxI = rms_norm(c, "out_norm")(y_BxTxHxP.reshape(batch, time, -1))
        return self.out(y_BxTxI.reshape(shape), context)


class GatedConvolution(RecurrentMixer):
    """y = W_out·(c ⊙ convolution(b ⊙ v)), where b, c and v are products of x with matrices, and the convolution has
    `conv_taps` taps per channel (LFM2, arXiv 2511.23404). Its cache has B·(conv_taps − 1)·D elements.
    """

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        self.refuse_prefix(context)
        c = self.config

        def dense(name: str, x_BxTxD, axes: tuple[str, str] = ("embed", "mlp"), std: float = INIT_STD):
            return block_dense(c, name, (c.d_model,), axes, std)(x_BxTxD, context)

        v_BxTxD = dense("value", x_BxTxD, std=INIT_STD * deepnorm_gain(c)) * dense("input_gate", x_BxTxD)
        y_BxTxD = ShortConvolution(c.conv_taps, "mlp", name="convolution")(v_BxTxD, context)
        y_BxTxD *= dense("output_gate", x_BxTxD)
        return dense("out", y_BxTxD, ("mlp", "embed"), residual_std(c))
