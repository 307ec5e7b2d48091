"""ConvGPT (arXiv 2404.14462, section 3.3): LinearGPT with causal convolutions instead of its dense layers."""

import dataclasses

import flax.linen as nn

from smallgpt_jax.devices import sharding
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.convolution import in_text, with_past
from smallgpt_jax.models.layers import normal, zeros
from smallgpt_jax.models.lgpt import LGPT, LGPTConfig


class CausalConv(nn.Module):
    """y[t] = b + Σ_j W[j]·x[t − (kernel_size − 1) + j], (B, T, D) → (B, T, features); x is 0 before a text's start."""

    features: int
    kernel_size: int
    dtype: str

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        batch, time, width = x_BxTxD.shape
        fan_in = self.kernel_size * width
        axes = ("conv_time", "embed", "embed_compressed")
        kernel = self.param("kernel", normal(fan_in**-0.5, *axes), (self.kernel_size, width, self.features))
        kernel = sharding.gather_fsdp(kernel.astype(self.dtype), axes)
        bias = self.param("bias", zeros("embed_compressed"), (self.features,))
        padded = with_past(self, x_BxTxD.astype(self.dtype), self.kernel_size - 1, context)
        y = bias.reshape(1, -1).astype(self.dtype)
        # Rows and positions are merged into one axis, because three-dimensional products are slower on CPUs than matrix
        # products (see `Dense`).
        for j in range(self.kernel_size):
            past = in_text(padded[:, j:j + time], self.kernel_size - 1 - j, context)
            y += past.reshape(-1, width) @ kernel[j]
        return y.reshape(batch, time, self.features)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CGPTConfig(LGPTConfig):
    # taps of each convolution. With 1, as in the paper, ConvGPT equals LinearGPT: a convolution with one tap is a dense
    # layer
    conv_kernel: int = 1

    def validate(self) -> None:
        super().validate()
        if not 1 <= self.conv_kernel <= self.context_length:
            self.refuse("conv_kernel", f"must be from 1 to config.model.context_length={self.context_length}")


class CGPT(LGPT):
    config: CGPTConfig

    Config = CGPTConfig

    def compress(self, stage: ModelConfig, name: str) -> nn.Module:
        return CausalConv(stage.d_model // 2, self.config.conv_kernel, stage.dtype, name=name)
