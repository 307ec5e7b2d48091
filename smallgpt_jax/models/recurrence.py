"""Parts of all recurrent mixers: the state in the cache, padding, documents, initial steps."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.errors import UserError
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context, cache_variable

TAPS = 4  # of the short convolutions, as in the papers


def refuse_prefix(config: ModelConfig, context: Context) -> None:
    if context.prefix_BxT is not None or config.attention_mask != "causal":
        raise UserError(f"config.model.mixers={config.mixers[0]!r}: does not see later tokens; use attention in all "
                        "blocks, or another config.train.objective")


def carry_state(module: nn.Module, context: Context, time: int, shape: tuple[int, ...], rule: Callable):
    """Returns y of `rule`(begins_BxT, state) → (y, last state). In decoding, the cache of `module` has the state."""
    if not context.decode:
        return rule(context.positions(time) == 0, jnp.zeros(shape))[0]
    state, _ = cache_variable(module, "state", shape, jnp.float32)
    y, state.value = rule(jnp.zeros((1, time), bool), state.value)
    return y


def zero_at_padding(x_BxTxH, context: Context):
    if not context.decode:
        return x_BxTxH
    is_token_BxT = jnp.arange(x_BxTxH.shape[1])[None] < context.length_B[:, None]
    return jnp.where(is_token_BxT[:, :, None], x_BxTxH, 0)


def decay_rates(module: nn.Module, heads: int, least: float):
    """Returns exp(A_log), (H,), initially uniform in (least, 16)."""
    def initial(key, shape, dtype=jnp.float32):
        return jnp.log(jax.random.uniform(key, shape, dtype, least, 16.0))

    return jnp.exp(module.param("A_log", nn.with_logical_partitioning(initial, ("heads",)), (heads,)))


def step_sizes(module: nn.Module, x_BxTxH):
    """Returns softplus(x + dt_bias) in float32, initially log-uniform in (0.001, 0.1) (Mamba-2, arXiv 2405.21060)."""
    def initial(key, shape, dtype=jnp.float32):
        steps = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(0.001), math.log(0.1)))
        return steps + jnp.log(-jnp.expm1(-steps))  # the inverse of softplus

    bias_H = module.param("dt_bias", nn.with_logical_partitioning(initial, ("heads",)), (x_BxTxH.shape[-1],))
    return nn.softplus(x_BxTxH.astype(jnp.float32) + bias_H[None, None])
