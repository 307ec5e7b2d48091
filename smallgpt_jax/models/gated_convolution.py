"""The gated short convolution of LFM2 (arXiv 2511.23404), a mixer whose memory is its last inputs."""

import flax.linen as nn

from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.convolution import ShortConvolution
from smallgpt_jax.models.layers import INIT_STD, Dense, deepnorm_gain, residual_std
from smallgpt_jax.models.recurrence import refuse_prefix


class GatedConvolution(nn.Module):
    """y = W_out·(c ⊙ convolution(b ⊙ v)), where b, c and v are products of x with matrices, and the convolution has
    `conv_taps` taps per channel. Its cache has B·(conv_taps − 1)·D elements.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c = self.config
        refuse_prefix(c, context)
        v_BxTxD = self.dense("value", ("embed", "mlp"), INIT_STD * deepnorm_gain(c))(x_BxTxD, context)
        v_BxTxD *= self.dense("input_gate", ("embed", "mlp"), INIT_STD)(x_BxTxD, context)
        y_BxTxD = ShortConvolution(c.conv_taps, "mlp", name="convolution")(v_BxTxD, context)
        y_BxTxD *= self.dense("output_gate", ("embed", "mlp"), INIT_STD)(x_BxTxD, context)
        return self.dense("out", ("mlp", "embed"), residual_std(c))(y_BxTxD, context)

    def dense(self, name: str, axes: tuple[str, str], std: float) -> Dense:
        c = self.config
        return Dense((c.d_model,), axes, std, c.use_bias, c.dtype, c.rank_ratio, name=name)
