"""Causal convolutions over time. Inputs before a text are 0; the cache has the last inputs."""

import flax.linen as nn
import jax.numpy as jnp

from smallgpt_jax.devices import sharding
from smallgpt_jax.models.context import Context, cache_variable
from smallgpt_jax.models.initializers import normal, zeros


class ShortConvolution(nn.Module):
    """y[t] = Σ_j taps[j]·x[t − (J − 1) + j], with J taps per channel, (B, T, C) float32."""

    num_taps: int
    axis: str  # logical name of the channels

    @nn.compact
    def __call__(self, x_BxTxC, context: Context):
        shape = (self.num_taps, x_BxTxC.shape[-1])
        taps_JxC = self.param("taps", normal(self.num_taps**-0.5, "tap", self.axis), shape)
        y_BxTxC = jnp.zeros_like(x_BxTxC, jnp.float32)
        for j, past_BxTxC in enumerate(at_taps(self, x_BxTxC, self.num_taps, context)):
            y_BxTxC += taps_JxC[j][None, None] * past_BxTxC
        return y_BxTxC


class CausalConvolution(nn.Module):
    """y[t] = b + Σ_j W[j]·x[t − (J − 1) + j], (B, T, D) → (B, T, features), of J taps."""

    features: int
    num_taps: int
    dtype: str

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        batch, time, width = x_BxTxD.shape
        axes = ("conv_time", "embed", "embed_compressed")
        initial = normal((self.num_taps * width) ** -0.5, *axes)
        kernel = self.param("kernel", initial, (self.num_taps, width, self.features))
        kernel = sharding.gather_weight(kernel.astype(self.dtype), axes)
        bias = self.param("bias", zeros("embed_compressed"), (self.features,))
        y = bias.reshape(1, -1).astype(self.dtype)
        # Rows and positions are merged, because three-dimensional products are slower on CPUs (see
        # `ops.matmul`).
        pasts = at_taps(self, x_BxTxD.astype(self.dtype), self.num_taps, context)
        for j, past_BxTxD in enumerate(pasts):
            y += past_BxTxD.reshape(-1, width) @ kernel[j]
        return y.reshape(batch, time, self.features)


def at_taps(module: nn.Module, x_BxTxD, num_taps: int, context: Context):
    """Returns x[t − (J − 1) + j] for each of J taps j; 0 for inputs of other texts."""
    time = x_BxTxD.shape[1]
    padded = _with_past(module, x_BxTxD, num_taps - 1, context)
    pasts = [padded[:, j : j + time] for j in range(num_taps)]
    if context.segment_ids_BxT is None:  # `_with_past` has prepended zeros
        return pasts
    positions_BxT = context.positions(time)
    for j in range(num_taps):  # tap j reads num_taps − 1 − j positions back
        is_in_text_BxT = positions_BxT >= num_taps - 1 - j
        pasts[j] = jnp.where(is_in_text_BxT[:, :, None], pasts[j], 0)
    return pasts


def _with_past(module: nn.Module, x_BxTxD, count: int, context: Context):
    """Prepends the previous `count` inputs, (B, count + T, D), in decoding from the cache."""
    batch, _, width = x_BxTxD.shape
    if not context.decode or count == 0:
        return jnp.pad(x_BxTxD, ((0, 0), (count, 0), (0, 0)))
    past, _ = cache_variable(module, "past", (batch, count, width), x_BxTxD.dtype)
    padded = jnp.concatenate([past.value, x_BxTxD], axis=1)
    # The indices of the last `count` inputs of each row, before its padding tokens.
    last_BxC = context.length_B[:, None] + jnp.arange(count)[None]
    past.value = jnp.take_along_axis(padded, last_BxC[:, :, None], axis=1)
    return padded
