"""LinearGPT (arXiv 2404.14462, section 3.2): stages of blocks, each half as wide as the last."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.layers import Dense
from smallgpt_jax.models.stacks import layer_configs, stack_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class LGPTConfig(ModelConfig):
    # blocks in each stage; must divide num_layers
    blocks_per_stage: int = 2
    # halve the width after the last stage, too
    compress_last_stage: bool = True
    # number of heads: "fixed" (constant) | "scaled" (halved with the width)
    stage_heads: str = "fixed"

    @property
    def num_stages(self) -> int:
        return self.num_layers // self.blocks_per_stage

    @property
    def num_compressions(self) -> int:
        return self.num_stages if self.compress_last_stage else self.num_stages - 1

    @property
    def last_stage(self) -> "LGPTConfig":
        return stages(self)[-1]

    @property
    def ends_with_norm(self) -> bool:
        return super().ends_with_norm and not self.compress_last_stage

    @property
    def output_width(self) -> int:
        return self.d_model // 2**self.num_compressions

    @classmethod
    def shape(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Two stages. The paper's six would leave models below 100M with outputs of few numbers."""
        return {**super().shape(fields), "blocks_per_stage": max(1, fields["num_layers"] // 2)}

    @property
    def rate_factor(self) -> float:
        return 0.45 * super().rate_factor

    def validate(self) -> None:
        super().validate()
        self.validate_range("blocks_per_stage", least=1)
        if self.num_layers % self.blocks_per_stage:
            self.refuse(
                "blocks_per_stage", f"must divide config.model.num_layers={self.num_layers}"
            )
        self.validate_choice("stage_heads", ("fixed", "scaled"))
        halvings = self.num_compressions
        if self.d_model % 2**halvings:
            rule = f"is halved {halvings} times, so 2^{halvings} must divide it"
            self.refuse("d_model", f"{rule}; change it or config.model.blocks_per_stage")
        smallest = 2 ** (self.num_stages - 1)
        for field in ("num_heads", "num_kv_heads"):
            if self.stage_heads == "scaled" and getattr(self, field) % smallest:
                rule = f"is halved after each of {self.num_stages} stages but the last"
                self.refuse(field, f"{rule}, so 2^{self.num_stages - 1}={smallest} must divide it")
        for stage in stages(self):  # a fixed number of heads must also divide narrower stages
            if not self.head_dim and stage.d_model % stage.num_heads:
                self.refuse("num_heads", f"must divide {stage.d_model}, the width of a stage")
            stage.validate_block()


class LGPT(nn.Module):
    """(B, T, D) → (B, T, D / 2^C), where C is the number of layers that halve the width."""

    config: LGPTConfig

    Config = LGPTConfig

    @nn.compact
    def __call__(self, x, context: Context):
        length = self.config.blocks_per_stage
        for i, stage in enumerate(stages(self.config)):
            configs = layer_configs(stage, length, first=i * length)
            x = stack_blocks(configs, context, name=f"stage_{i}")(x)
            if i < self.config.num_compressions:
                x = self.compress(stage, name=f"compress_{i}")(x, context)
        return x

    def compress(self, stage: ModelConfig, name: str) -> nn.Module:
        """Returns the dense layer after a stage, which halves the width: (B, T, D) → (B, T, D/2)."""
        # The std 1/√D preserves the variance; with 0.02, it would fall below the norms' ε in narrow
        # stages.
        axes, std = ("embed", "embed_compressed"), stage.d_model**-0.5
        return Dense((stage.d_model // 2,), axes, std, True, stage.dtype, name=name)


def stages(config: LGPTConfig) -> list[LGPTConfig]:
    """Returns one config per stage, of half the width of the one before."""
    configs = []
    for i in range(config.num_stages):
        heads_divisor = 2**i if config.stage_heads == "scaled" else 1
        stage = config.replace(
            d_model=config.d_model // 2**i,
            num_heads=config.num_heads // heads_divisor,
            num_kv_heads=config.num_kv_heads // heads_divisor,
        )
        configs.append(stage)
    return configs
