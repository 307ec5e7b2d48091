"""Causal convolutions over time. The inputs before position 0 of a text are 0; the cache stores the last inputs."""

import flax.linen as nn
import jax.numpy as jnp

from smallgpt_jax.models.context import Context, cache_variable
from smallgpt_jax.models.initializers import normal, zeros


class ShortConvolution(nn.Module):
    """y[t] = Σ_j taps[j]·x[t − (J − 1) + j], one filter of J taps per channel, (B, T, C) → (B, T, C), in float32."""

    num_taps: int
    axis: str  # logical name of the channels

    @nn.compact
    def __call__(self, x_BxTxC, context: Context):
        time, width = x_BxTxC.shape[1:]
        taps_JxC = self.param("taps", normal(self.num_taps**-0.5, "tap", self.axis), (self.num_taps, width))
        padded = with_past(self, x_BxTxC, self.num_taps - 1, context)
        y_BxTxC = jnp.zeros_like(x_BxTxC, jnp.float32)
        for j in range(self.num_taps):
            past_BxTxC = in_text(padded[:, j:j + time], self.num_taps - 1 - j, context)
            y_BxTxC += taps_JxC[j][None, None] * past_BxTxC
        return y_BxTxC


class Canon(nn.Module):
    """x + conv(x), (B, T, D) → (B, T, D) (Canon layers: Allen-Zhu, arXiv 2512.17351)."""

    num_taps: int

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        convolution = ShortConvolution(self.num_taps, "channel", name="convolution")
        return (x_BxTxD + convolution(x_BxTxD, context)).astype(x_BxTxD.dtype)


class Smear(nn.Module):
    """x[t] + λ·sigmoid(w·x[t])·x[t − 1], with λ = 0 at first (github.com/KellerJordan/modded-nanogpt)."""

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        w_D = self.param("gate", zeros("channel"), x_BxTxD.shape[-1:])
        strength = self.param("strength", zeros(), ())
        gate_BxT = strength * nn.sigmoid(jnp.einsum("btd,d->bt", x_BxTxD.astype(jnp.float32), w_D))
        previous_BxTxD = in_text(with_past(self, x_BxTxD, 1, context)[:, :-1], 1, context)
        return (x_BxTxD + gate_BxT[..., None] * previous_BxTxD).astype(x_BxTxD.dtype)


def with_past(module: nn.Module, x_BxTxD, count: int, context: Context):
    """Prepends the previous `count` inputs, (B, count + T, D). In decoding, `module` caches them."""
    batch, _, width = x_BxTxD.shape
    if not context.decode or count == 0:
        return jnp.pad(x_BxTxD, ((0, 0), (count, 0), (0, 0)))
    past, _ = cache_variable(module, "past", (batch, count, width), x_BxTxD.dtype)
    padded = jnp.concatenate([past.value, x_BxTxD], axis=1)
    # Each row of `padded` can end with padding tokens. `last_BxC` contains the indices of the `count` inputs before
    # the padding tokens.
    last_BxC = context.length_B[:, None] + jnp.arange(count)[None]
    past.value = jnp.take_along_axis(padded, last_BxC[:, :, None], axis=1)
    return padded


def in_text(past_BxTxD, back: int, context: Context):
    """Returns the inputs from `back` positions ago, with 0 in place of those of another text."""
    if context.segment_ids_BxT is None:  # `with_past` has prepended zeros
        return past_BxTxD
    return jnp.where((context.positions(past_BxTxD.shape[1]) >= back)[:, :, None], past_BxTxD, 0)
