"""ConvGPT (arXiv 2404.14462, section 3.3): LinearGPT with convolutions as dense layers."""

import dataclasses

import flax.linen as nn

from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.convolution import CausalConvolution
from smallgpt_jax.models.lgpt import LGPT, LGPTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CGPTConfig(LGPTConfig):
    # taps of each convolution. With 1, as in the paper, it is a dense layer, and ConvGPT equals
    # LinearGPT
    conv_kernel: int = 1

    @property
    def rate_factor(self) -> float:
        return 0.8 * super().rate_factor

    def validate(self) -> None:
        super().validate()
        if not 1 <= self.conv_kernel <= self.context_length:
            most = f"config.model.context_length={self.context_length}"
            self.refuse("conv_kernel", f"must be from 1 to {most}")


class CGPT(LGPT):
    config: CGPTConfig

    Config = CGPTConfig

    def compress(self, stage: ModelConfig, name: str) -> nn.Module:
        return CausalConvolution(
            stage.d_model // 2, self.config.conv_kernel, stage.dtype, name=name
        )
