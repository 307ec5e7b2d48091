"""LinearGPT (arXiv 2404.14462, section 3.2): stages of blocks, the width halved between them."""

import dataclasses

import flax.linen as nn

from smallgpt_jax.models.layers import Dense, Mode, ModelConfig, Trunk, blocks


class LGPT(Trunk):
    """Stages of `blocks_per_stage` blocks, each followed by a dense layer that halves the width.

    (B, T, D) → (B, T, D / 2^compressions); the last stage is followed by one too if
    `compress_last_stage`. With `stage_heads` "fixed" every stage has `num_heads` heads, which
    narrow with the width (the paper's form); with "scaled" the heads keep their width and each
    stage has half as many.
    """

    own_fields = ("blocks_per_stage", "compress_last_stage", "stage_heads")

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        if config.blocks_per_stage < 1:
            config.refuse("blocks_per_stage", "must be at least 1")
        if config.num_layers % config.blocks_per_stage:
            config.refuse(
                "blocks_per_stage", f"must divide config.model.num_layers={config.num_layers}")
        if config.stage_heads not in ("fixed", "scaled"):
            config.refuse("stage_heads", "must be 'fixed' or 'scaled'")
        halvings = num_compressions(config)
        if config.d_model % 2**halvings:
            config.refuse(
                "d_model", f"is halved {halvings} times, so 2^{halvings}={2**halvings} must divide it")
        num_stages = config.num_layers // config.blocks_per_stage
        if config.stage_heads == "scaled" and config.num_heads % 2 ** (num_stages - 1):
            config.refuse("num_heads", f"is halved from each of the {num_stages} stages to the next, so "
                          f"2^{num_stages - 1}={2 ** (num_stages - 1)} must divide it")
        for stage in stages(config):
            if stage.d_model % stage.num_heads:
                config.refuse("num_heads", f"must divide {stage.d_model}, the width of one of the stages")
            stage.check_rotation()

    @classmethod
    def output_width(cls, config: ModelConfig) -> int:
        return config.d_model // 2 ** num_compressions(config)

    @nn.compact
    def __call__(self, x, mode: Mode):
        for i, stage in enumerate(stages(self.config)):
            x = blocks(stage, self.config.blocks_per_stage, mode, name=f"stage_{i}")(x)
            if i < num_compressions(self.config):
                x = self.compress(stage, name=f"compress_{i}")(x, mode)
        return x

    def compress(self, stage: ModelConfig, name: str) -> nn.Module:
        """The layer from this stage's width to half of it, (B, T, D) → (B, T, D/2).

        Its initial weights keep the variance of what passes: GPT-2's 0.02 would shrink the
        residual stream of the narrow stages below the epsilon of their LayerNorms.
        """
        return Dense((stage.d_model // 2,), ("embed", "embed_compressed"), stage.d_model**-0.5,
                     True, stage.dtype, name=name)


def num_compressions(config: ModelConfig) -> int:
    num_stages = config.num_layers // config.blocks_per_stage
    return num_stages if config.compress_last_stage else num_stages - 1


def stages(config: ModelConfig) -> list[ModelConfig]:
    """The configuration of each stage's blocks: `config` with that stage's width and heads."""
    heads_shrink = config.stage_heads == "scaled"
    return [
        dataclasses.replace(
            config, d_model=config.d_model // 2**i,
            num_heads=config.num_heads // 2**i if heads_shrink else config.num_heads)
        for i in range(config.num_layers // config.blocks_per_stage)
    ]
