"""The gated short convolution of LFM2 (arXiv 2511.23404), a mixer."""

import flax.linen as nn

from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.convolution import ShortConvolution
from smallgpt_jax.models.layers import INIT_STD, block_dense, deepnorm_gain, residual_std
from smallgpt_jax.models.recurrence import refuse_prefix


class GatedConvolution(nn.Module):
    """y = W_out·(c ⊙ convolution(b ⊙ v)), where b, c and v are products of x with matrices, and the
    convolution has `conv_taps` taps per channel. Its cache has B·(conv_taps − 1)·D elements.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c = self.config
        refuse_prefix(c, context)

        def project(name: str, std: float = INIT_STD):
            return block_dense(c, name, (c.d_model,), ("embed", "mlp"), std)(x_BxTxD, context)

        v_BxTxD = project("value", INIT_STD * deepnorm_gain(c))
        v_BxTxD = v_BxTxD * project("input_gate")
        y_BxTxD = ShortConvolution(c.conv_taps, "mlp", name="convolution")(v_BxTxD, context)
        y_BxTxD *= project("output_gate")
        out = block_dense(c, "out", (c.d_model,), ("mlp", "embed"), residual_std(c))
        return out(y_BxTxD, context)
