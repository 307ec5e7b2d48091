"""The language model around an architecture: embedding, trunk, final norm, head."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax import sharding
from smallgpt_jax.models.architectures import find_architecture
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import EVALUATION, Context
from smallgpt_jax.models.layers import INIT_STD, norm, normal

TABLE_AXES = ("vocab", "embed")  # of the embedding and of the head

# The variance of initial logits is width × std²; above this width GPT-2's 0.02 would raise the initial loss by more
# than 0.05 over ln(vocabulary).
HEAD_WIDTH_AT_INIT_STD = 256


class LanguageModel(nn.Module):
    """Token embedding, position embedding if positions are learned, an architecture's trunk, final norm, output head.

    Build it with `models.build`, which validates the config. `Context(train=True)` needs the random stream "dropout".
    """

    config: ModelConfig

    def setup(self):
        c = self.config
        self.token_embedding = self.param(
            "token_embedding", normal(INIT_STD, *TABLE_AXES), (c.vocab_size, c.d_model))
        if c.position == "learned":  # others are part of attention
            self.position_embedding = self.param(
                "position_embedding", normal(INIT_STD, "position", "embed"),
                (c.context_length, c.d_model))
        self.trunk = find_architecture(c.architecture)(c)
        self.final_norm = norm(c)
        self.dropout = nn.Dropout(c.dropout)

    def hidden(self, tokens_BxT, context: Context = EVALUATION):
        """Returns the head's input: (B, T, W), W the trunk's output width.

        T ≤ context_length if positions are learned; otherwise context_length is only the length seen in training.
        """
        dtype = self.config.dtype
        # Devices look up whole rows, so an embedding sharded by width is gathered first; in float32, because the
        # gradient of a frequent token's row has too many terms to be summed in bfloat16.
        table_VxD = sharding.gather_fsdp(self.token_embedding, TABLE_AXES)
        x_BxTxD = jnp.take(table_VxD, tokens_BxT, axis=0).astype(dtype)
        if self.config.position == "learned":
            x_BxTxD += self.position_vectors(tokens_BxT.shape[1], context).astype(dtype)
        x_BxTxD = self.dropout(x_BxTxD, deterministic=not context.train)
        x_BxTxD = nn.with_logical_constraint(x_BxTxD, ("batch", "time", "embed_activation"))
        x_BxTxW = self.final_norm(self.trunk(x_BxTxD, context))
        # Also constrains the sharding of the gradient; without it XLA's partitioner chose a bad one.
        return nn.with_logical_constraint(x_BxTxW, ("batch", "time", "embed_activation"))

    def position_vectors(self, time: int, context: Context):
        """Returns the position embedding of each token, (B or 1, T, D)."""
        if not context.decode and context.segment_ids_BxT is None:
            return self.position_embedding[None, :time]
        # Padding of short rows can exceed the last position.
        return jnp.take(self.position_embedding, context.positions(time), axis=0, mode="clip")

    @nn.compact
    def head_weight(self):
        """Returns the output matrix, (V, W), in the compute dtype: the head's own, or the tied embedding."""
        c = self.config
        if c.tie_embeddings:
            weight = self.token_embedding
        else:
            std = INIT_STD * min(1.0, (HEAD_WIDTH_AT_INIT_STD / c.output_width) ** 0.5)
            weight = self.param("head", normal(std, *TABLE_AXES), (c.vocab_size, c.output_width))
        return sharding.gather_fsdp(weight.astype(c.dtype), TABLE_AXES)

    def __call__(self, tokens_BxT, context: Context = EVALUATION):
        """Returns the logits of each position's next token, (B, T, V) float32."""
        return self.logits(self.hidden(tokens_BxT, context))

    def next_logits(self, tokens_BxT, context: Context):
        """Returns the logits of the token after each row's `context.length_B` tokens, (B, V) float32."""
        x_BxTxW = self.hidden(tokens_BxT, context)
        last = jnp.take_along_axis(x_BxTxW, jnp.maximum(context.length_B, 1)[:, None, None] - 1, axis=1)
        return self.logits(last)[:, 0]

    def logits(self, x_BxTxW):
        batch, time, width = x_BxTxW.shape
        logits_RxV = jnp.dot(x_BxTxW.reshape(-1, width), self.head_weight().T, preferred_element_type=jnp.float32)
        return logits_RxV.reshape(batch, time, -1)


def abstract_params(model: LanguageModel):
    """Returns the shapes and axis names of the parameters, a tree of LogicallyPartitioned; allocates nothing.

    Parameters without axis names, those of flax's own layers, get the names None and are replicated.
    """
    def with_names(x):
        return x if isinstance(x, nn.LogicallyPartitioned) else nn.LogicallyPartitioned(
            nn.unbox(x), names=(None,) * nn.unbox(x).ndim)

    return jax.tree.map(with_names, abstract_variables(model)["params"],
                        is_leaf=lambda x: isinstance(x, nn.Partitioned))


def abstract_model_state(model: LanguageModel):
    """Returns the shapes of the collection "state", carried from step to step; {} for most models."""
    return nn.unbox(abstract_variables(model).get("state", {}))


def abstract_variables(model: LanguageModel):
    tokens = jax.ShapeDtypeStruct((1, model.config.context_length), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)


def num_parameters(model: LanguageModel) -> int:
    return sum(x.size for x in jax.tree.leaves(abstract_params(model)))
