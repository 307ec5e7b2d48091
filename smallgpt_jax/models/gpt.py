"""GPT, the baseline of arXiv 2404.14462: blocks in sequence."""

import flax.linen as nn

from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.stacks import layer_configs, stack_blocks


class GPT(nn.Module):
    config: ModelConfig

    Config = ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        return stack_blocks(layer_configs(self.config, self.config.num_layers), context)(x_BxTxD)
