"""ConvGPT (arXiv 2404.14462, section 3.3): LinearGPT with convolutions over time between stages."""

import flax.linen as nn
import jax.numpy as jnp

from smallgpt_jax import sharding
from smallgpt_jax.models.layers import Mode, ModelConfig, normal, remembered, zeros
from smallgpt_jax.models.lgpt import LGPT


class CausalConv(nn.Module):
    """Convolution over time that sees only the past, (B, T, D) → (B, T, features).

    y[t] = b + Σ_j W[j]·x[t − (kernel_size − 1) + j], with zeros before the first position of a text. With
    kernel_size 1 this is a dense layer. When decoding, each row's last kernel_size − 1 inputs are
    kept: B·(kernel_size − 1)·D numbers of the model's type.
    """

    features: int
    kernel_size: int
    dtype: str

    @nn.compact
    def __call__(self, x_BxTxD, mode: Mode):
        batch, time, width = x_BxTxD.shape
        fan_in = self.kernel_size * width
        axes = ("conv_time", "embed", "embed_compressed")
        kernel = self.param("kernel", normal(fan_in**-0.5, *axes),
                            (self.kernel_size, width, self.features))
        kernel = sharding.gathered(kernel.astype(self.dtype), axes)
        bias = self.param("bias", zeros("embed_compressed"), (self.features,))
        padded = self.with_past(x_BxTxD.astype(self.dtype), mode)
        y = bias.reshape(1, -1).astype(self.dtype)
        for j in range(self.kernel_size):  # two-dimensional products, see Dense
            past = padded[:, j:j + time]
            if mode.segments_BxT is not None:
                is_of_this_text_BxT = mode.positions(time) >= self.kernel_size - 1 - j
                past = jnp.where(is_of_this_text_BxT[:, :, None], past, 0)
            y += past.reshape(-1, width) @ kernel[j]
        return y.reshape(batch, time, self.features)

    def with_past(self, x_BxTxD, mode: Mode):
        """x with the kernel_size − 1 inputs before it in front, (B, kernel_size − 1 + T, D)."""
        batch, _, width = x_BxTxD.shape
        taps = self.kernel_size - 1
        if not mode.decode or taps == 0:
            return jnp.pad(x_BxTxD, ((0, 0), (taps, 0), (0, 0)))
        past, _ = remembered(self, "past", (batch, taps, width), x_BxTxD.dtype)
        padded = jnp.concatenate([past.value, x_BxTxD], axis=1)
        last_BxC = mode.length_B[:, None] + jnp.arange(taps)[None]  # what fills up a row does not count
        past.value = jnp.take_along_axis(padded, last_BxC[:, :, None], axis=1)
        return padded


class CGPT(LGPT):
    """LGPT whose dense layers between the stages are causal convolutions of `conv_kernel` taps."""

    own_fields = (*LGPT.own_fields, "conv_kernel")

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        super().check(config)
        if not 1 <= config.conv_kernel <= config.context_length:
            config.refuse("conv_kernel", "must be from 1 to config.model.context_length"
                          f"={config.context_length}")

    def compress(self, stage: ModelConfig, name: str) -> nn.Module:
        return CausalConv(stage.d_model // 2, self.config.conv_kernel, stage.dtype, name=name)
