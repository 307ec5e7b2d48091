"""The language model: embedding, trunk (the architecture), final norm, output head."""

import flax.linen as nn
import jax.numpy as jnp

from smallgpt_jax.devices import sharding
from smallgpt_jax.models.architectures import find_architecture, make_config
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import EVALUATION, Context
from smallgpt_jax.models.layers import INIT_STD, norm, normal
from smallgpt_jax.models.variants import Smear
from smallgpt_jax.ops.cross_entropy import cap

TABLE_AXES = ("vocab", "embed")  # logical axes of the embedding and of the head

# Up to this input width, the initial std of the head's weights is 0.02. Wider heads have a smaller
# std, because the initial logits have variance width × std². With std 0.02, the initial loss of a
# wider head would exceed ln(vocab_size) by more than 0.05.
_HEAD_WIDTH_AT_INIT_STD = 256


def head_std(width: int) -> float:
    return INIT_STD * min(1.0, (_HEAD_WIDTH_AT_INIT_STD / width) ** 0.5)


def embed(table_VxD, tokens_BxT, dtype: str):
    """Returns the tokens' rows of the table, (B, T, D), in `dtype`."""
    # The table stays float32, because the gradient of a frequent token sums too many terms for
    # bfloat16.
    return sharding.look_up(table_VxD, TABLE_AXES, tokens_BxT, dtype)


class LanguageModel(nn.Module):
    """Build it with `models.build`. In training, `apply` needs the rng "dropout"."""

    config: ModelConfig

    def setup(self):
        c = self.config
        initial, shape = normal(INIT_STD, *TABLE_AXES), (c.vocab_size, c.d_model)
        self.token_embedding = self.param("token_embedding", initial, shape)
        if c.position == "learned":  # attention applies the other position encodings
            initial, shape = normal(INIT_STD, "position", "embed"), (c.context_length, c.d_model)
            self.position_embedding = self.param("position_embedding", initial, shape)
        if c.smear:
            self.smear = Smear()
        self.trunk = find_architecture(c.architecture)(c)
        if not c.ends_with_norm:
            self.final_norm = norm(c)
        self.dropout = nn.Dropout(c.dropout)

    def hidden(self, tokens_BxT, context: Context = EVALUATION):
        """Returns the head's input, (B, T, W). Learned positions limit T to context_length."""
        dtype = self.config.dtype
        x_BxTxD = embed(self.token_embedding, tokens_BxT, dtype)
        if self.config.smear:
            x_BxTxD = self.smear(x_BxTxD, context)
        if self.config.position == "learned":
            x_BxTxD += self.position_vectors(tokens_BxT.shape[1], context).astype(dtype)
        x_BxTxD = self.dropout(x_BxTxD, deterministic=not context.train)
        x_BxTxD = nn.with_logical_constraint(x_BxTxD, ("batch", "time", "embed_activation"))
        # value embeddings look the tokens up again
        x_BxTxW = self.trunk(x_BxTxD, context.replace(tokens_BxT=tokens_BxT))
        if not self.config.ends_with_norm:
            x_BxTxW = self.final_norm(x_BxTxW)
        # Without this constraint, XLA's partitioner chooses a slow sharding for the gradient of
        # `x_BxTxW`.
        return nn.with_logical_constraint(x_BxTxW, ("batch", "time", "embed_activation"))

    def position_vectors(self, time: int, context: Context):
        """Returns (B or 1, T, D)."""
        if not context.decode and context.segment_ids_BxT is None:
            return self.position_embedding[None, :time]
        table_PxD = sharding.gather_weight(self.position_embedding, ("position", "embed"))
        # mode="clip", because the padding of short rows can be beyond the last position of the
        # embedding.
        return jnp.take(table_PxD, context.positions(time), axis=0, mode="clip")

    @nn.compact
    def head_weight(self):
        """Returns the weights of the output head, (V, W), in the compute dtype."""
        c = self.config
        if c.tie_embeddings:
            weight = self.token_embedding
        else:
            initial = normal(head_std(c.output_width), *TABLE_AXES)
            weight = self.param("head", initial, (c.vocab_size, c.output_width))
        return sharding.gather_weight(weight.astype(c.dtype), TABLE_AXES)

    def __call__(self, tokens_BxT, context: Context = EVALUATION):
        """Returns the logits of the next token at each position, (B, T, V) float32."""
        return self.logits(self.hidden(tokens_BxT, context))

    def next_logits(self, tokens_BxT, context: Context):
        """Returns the logits after each row's `context.length_B` tokens, (B, V) float32."""
        x_BxTxW = self.hidden(tokens_BxT, context)
        last_B = jnp.maximum(context.length_B, 1)  # finished rows have no new token
        last_Bx1xW = jnp.take_along_axis(x_BxTxW, last_B[:, None, None] - 1, axis=1)
        return self.logits(last_Bx1xW)[:, 0]

    def logits(self, x_BxTxW):
        batch, time, width = x_BxTxW.shape
        x_RxW = x_BxTxW.reshape(-1, width)
        logits_RxV = jnp.dot(x_RxW, self.head_weight().T, preferred_element_type=jnp.float32)
        return cap(logits_RxV, self.config.logit_softcap).reshape(batch, time, -1)


def build(**fields) -> LanguageModel:
    """Returns the model of the fields of a config's `model` group. Raises UserError."""
    return LanguageModel(make_config(**fields))
