"""The architectures, and the language model around each of them."""

import dataclasses
import difflib

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.cgpt import CGPT
from smallgpt_jax.models.gpt import GPT
from smallgpt_jax.models.layers import (
    EVALUATION,
    INIT_STD,
    Mode,
    ModelConfig,
    layer_norm,
    normal,
)
from smallgpt_jax.models.lgpt import LGPT
from smallgpt_jax.models.pgpt import PGPT

ARCHITECTURES = {"gpt": GPT, "pgpt": PGPT, "lgpt": LGPT, "cgpt": CGPT}
BUILT_IN = (GPT, PGPT, LGPT, CGPT)  # those whose decoding the tests compare with the full forward pass

TABLE_AXES = ("vocab", "embed")  # of the embedding and of the head

# The variance of the first logits is width × std²; above this width GPT-2's 0.02 would lift the
# loss of an untrained model by more than 0.05 over ln(vocabulary).
HEAD_WIDTH_AT_INIT_STD = 256


class LanguageModel(nn.Module):
    """Token embedding, position embedding if positions are learned, an architecture's trunk, final
    LayerNorm, output head.

    Build it with `build`, which checks the configuration first. Applied with `Mode(train=True)` it
    needs the random stream "dropout".
    """

    config: ModelConfig

    def setup(self):
        c = self.config
        trunk = ARCHITECTURES[c.architecture]
        self.token_embedding = self.param(
            "token_embedding", normal(INIT_STD, *TABLE_AXES), (c.vocab_size, c.d_model))
        if c.position == "learned":  # what else there is belongs to attention
            self.position_embedding = self.param(
                "position_embedding", normal(INIT_STD, "position", "embed"),
                (c.context_length, c.d_model))
        self.trunk = trunk(c)
        self.final_norm = layer_norm(c, name=None)
        self.dropout = nn.Dropout(c.dropout)

    def hidden(self, tokens_BxT, mode: Mode = EVALUATION):
        """What the head reads: (B, T, W), W the trunk's output width.

        T ≤ context_length if positions are learned; else it is only what training has shown the model.
        """
        dtype = self.config.dtype
        # Each device looks up whole rows: an embedding kept in parts by width is gathered first. In float32,
        # for the gradient's sake: a frequent token's row is the sum of more terms than bfloat16 can add.
        table_VxD = sharding.gathered(self.token_embedding, TABLE_AXES)
        x_BxTxD = jnp.take(table_VxD, tokens_BxT, axis=0).astype(dtype)
        if self.config.position == "learned":
            x_BxTxD += self.position_vectors(tokens_BxT.shape[1], mode).astype(dtype)
        x_BxTxD = self.dropout(x_BxTxD, deterministic=not mode.train)
        x_BxTxD = nn.with_logical_constraint(x_BxTxD, ("batch", "time", "embed_activation"))
        x_BxTxW = self.final_norm(self.trunk(x_BxTxD, mode))
        # Also the place of its gradient: left to itself, XLA's partitioner has got that one wrong.
        return nn.with_logical_constraint(x_BxTxW, ("batch", "time", "embed_activation"))

    def position_vectors(self, time: int, mode: Mode):
        """The position embedding of each token, (B or 1, T, D)."""
        if not mode.decode and mode.segments_BxT is None:
            return self.position_embedding[None, :time]
        # What fills up short rows may lie beyond the last position.
        return jnp.take(self.position_embedding, mode.positions(time), axis=0, mode="clip")

    @nn.compact
    def head_weight(self, mode: Mode = EVALUATION):
        """The output matrix, (V, W), in the type of products: the head's own, or the embedding.

        Decoding keeps a head of its own as (W, V), whose products with few rows are faster on a CPU.
        """
        c = self.config
        if c.tie_embeddings:
            weight = self.token_embedding
        else:
            width = ARCHITECTURES[c.architecture].output_width(c)
            if mode.decode:
                return self.param("head_matrix", nn.initializers.zeros, (width, c.vocab_size)).astype(c.dtype).T
            std = INIT_STD * min(1.0, (HEAD_WIDTH_AT_INIT_STD / width) ** 0.5)
            weight = self.param("head", normal(std, *TABLE_AXES), (c.vocab_size, width))
        return sharding.gathered(weight.astype(c.dtype), TABLE_AXES)

    def __call__(self, tokens_BxT, mode: Mode = EVALUATION):
        """Logits of each position's next token, (B, T, V) float32."""
        return self.logits(self.hidden(tokens_BxT, mode))

    def next_logits(self, tokens_BxT, mode: Mode):
        """Logits of the token after each row's `mode.length_B` tokens, (B, V) float32."""
        x_BxTxW = self.hidden(tokens_BxT, mode)
        last = jnp.take_along_axis(x_BxTxW, jnp.maximum(mode.length_B, 1)[:, None, None] - 1, axis=1)
        return self.logits(last, mode)[:, 0]

    def logits(self, x_BxTxW, mode: Mode = EVALUATION):
        batch, time, width = x_BxTxW.shape
        logits_RxV = jnp.dot(x_BxTxW.reshape(-1, width), self.head_weight(mode).T, preferred_element_type=jnp.float32)
        return logits_RxV.reshape(batch, time, -1)


def build(**fields) -> LanguageModel:
    """The model with these fields of the `model` group.

    Raises UserError, before anything is built, when no such model can exist.
    """
    try:
        config = ModelConfig(**fields)
    except TypeError as error:  # a config.json of another version
        raise UserError(f"config.model: {str(error).removeprefix('ModelConfig.__init__() ')}") from None
    if str(config.architecture) not in ARCHITECTURES:
        near = difflib.get_close_matches(str(config.architecture), ARCHITECTURES, n=1)
        config.refuse("architecture", f"must be one of {', '.join(ARCHITECTURES)}"
                      + (f"; did you mean {near[0]!r}?" if near else ""))
    config.check_types()
    trunk = ARCHITECTURES[config.architecture]
    for field in sorted(own_fields()):
        if field in trunk.own_fields and getattr(config, field) is None:
            config.refuse(field, f"{config.architecture} needs a value here")
        if field not in trunk.own_fields and getattr(config, field) is not None:
            config.refuse(field, f"{config.architecture} has no such part; remove it")
    config.check()
    trunk.check(config)
    if config.tie_embeddings and trunk.output_width(config) != config.d_model:
        raise UserError(
            f"config.model.tie_embeddings=True: the trunk of {config.architecture} ends at width "
            f"{trunk.output_width(config)}, the embedding has {config.d_model}; they cannot share a "
            "matrix")
    return LanguageModel(config)


def own_fields() -> set[str]:
    """The fields of the `model` group that only some architectures have."""
    return {field for trunk in ARCHITECTURES.values() for field in trunk.own_fields}


def completed(fields: dict) -> dict:
    """Fields of the `model` group as an older version wrote them, and what such models were in the others."""
    then = {field.name: field.default for field in dataclasses.fields(ModelConfig)
            if field.default is not dataclasses.MISSING}
    if fields.get("architecture") == "pgpt":
        then["path_weights"] = "learned"
    return then | fields


def abstract_params(model: LanguageModel):
    """Shapes and axis names of the parameters, nothing allocated: a tree of LogicallyPartitioned.

    Parameters that name no axes, as flax's own layers make them, get names that are None: no rule is for those,
    so each device has the whole parameter.
    """
    def with_names(x):
        return x if isinstance(x, nn.LogicallyPartitioned) else nn.LogicallyPartitioned(
            nn.unbox(x), names=(None,) * nn.unbox(x).ndim)

    tokens = jax.ShapeDtypeStruct((1, model.config.context_length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    return jax.tree.map(with_names, params, is_leaf=lambda x: isinstance(x, nn.Partitioned))


def num_parameters(model: LanguageModel) -> int:
    return sum(x.size for x in jax.tree.leaves(abstract_params(model)))
