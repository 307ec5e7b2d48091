"""Parts of all recurrent mixers: projections, the state in the cache, padding, initial steps.

Shapes: B batch, T time, H heads, V value width.
"""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.errors import UserError
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context, cache_variable
from smallgpt_jax.models.layers import INIT_STD, Dense, block_dense, residual_std

TAPS = 4  # of the short convolutions, as in the papers


def refuse_prefix(config: ModelConfig, context: Context) -> None:
    if context.prefix_BxT is not None or config.attention_mask != "causal":
        raise UserError(
            f"config.model.mixers={config.mixers[0]!r}: does not see later tokens; use attention "
            "in all blocks, or another config.train.objective"
        )


class RecurrentMixer(nn.Module):
    config: ModelConfig

    def project(self, name: str, width: int, x_BxTxD, context: Context, gain: float = 1.0):
        """Returns (B, T, H, width)."""
        features, axes = (self.config.num_heads, width), ("embed", "heads", "head_width")
        dense = block_dense(self.config, name, features, axes, INIT_STD * gain)
        return dense(x_BxTxD, context)

    def narrow(self, name: str, width: int, axis: str, x_BxTxD, context: Context):
        """Returns (B, T, width). The matrix is full, whatever the `rank_ratio`."""
        dense = Dense((width,), ("embed", axis), INIT_STD, False, self.config.dtype, name=name)
        return dense(x_BxTxD, context)

    def out(self, y_BxTxHxV, context: Context):
        c = self.config
        axes = ("heads", "head_width", "embed")
        return block_dense(c, "out", (c.d_model,), axes, residual_std(c))(y_BxTxHxV, context)

    def carry_state(self, context: Context, time: int, shape: tuple[int, ...], rule: Callable):
        """Returns y of `rule`(begins_BxT, state) → (y, last state), with a cached state."""
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
        """Returns softplus(x + dt_bias), initially log-uniform in (0.001, 0.1) (Mamba-2)."""

        def initial(key, shape, dtype=jnp.float32):
            least, most = math.log(0.001), math.log(0.1)
            steps = jnp.exp(jax.random.uniform(key, shape, dtype, least, most))
            return steps + jnp.log(-jnp.expm1(-steps))  # the inverse of softplus

        initial = nn.with_logical_partitioning(initial, ("heads",))
        bias_H = self.param("dt_bias", initial, (x_BxTxH.shape[-1],))
        return nn.softplus(x_BxTxH.astype(jnp.float32) + bias_H[None, None])


def zero_at_padding(x_BxTxH, context: Context):
    if not context.decode:
        return x_BxTxH
    is_token_BxT = jnp.arange(x_BxTxH.shape[1])[None] < context.length_B[:, None]
    return jnp.where(is_token_BxT[:, :, None], x_BxTxH, 0)
