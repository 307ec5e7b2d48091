"""The language model: embedding, trunk (the architecture), final norm, output head."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.devices import sharding
from smallgpt_jax.models.architectures import find_architecture
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import EVALUATION, Context
from smallgpt_jax.models.custom_code import custom_classes
from smallgpt_jax.models.layers import INIT_STD, norm, normal

TABLE_AXES = ("vocab", "embed")  # logical axes of the embedding and of the head

# Up to this input width, the initial std of the head's weights is 0.02. Wider heads have a smaller std, because the
# initial logits have variance width × std². With std 0.02, the initial loss of a wider head would exceed
# ln(vocab_size) by more than 0.05.
HEAD_WIDTH_AT_INIT_STD = 256

TRACED_POSITIONS = 128


class LanguageModel(nn.Module):
    """A decoder-only language model: embedding, trunk of the architecture, final norm, output head.

    Build it with `models.build`, which validates the config. With `Context(train=True)`, `apply` needs the rng
    "dropout".
    """

    config: ModelConfig

    def setup(self):
        c = self.config
        self.token_embedding = self.param(
            "token_embedding", normal(INIT_STD, *TABLE_AXES), (c.vocab_size, c.d_model))
        if c.position == "learned":  # attention applies the other position encodings
            self.position_embedding = self.param(
                "position_embedding", normal(INIT_STD, "position", "embed"),
                (c.context_length, c.d_model))
        self.trunk = find_architecture(c.architecture)(c)
        if not c.ends_with_norm:
            self.final_norm = norm(c)
        self.dropout = nn.Dropout(c.dropout)

    def hidden(self, tokens_BxT, context: Context = EVALUATION):
        """Returns the input of the output head, (B, T, W), where W is the trunk's output width.

        With learned positions, T must be at most context_length; other position encodings accept any T.
        """
        dtype = self.config.dtype
        # Gather the embedding, because devices look up whole rows. Keep it in float32, because the gradient of a
        # frequent token sums too many terms for bfloat16.
        table_VxD = sharding.gather_fsdp(self.token_embedding, TABLE_AXES)
        x_BxTxD = jnp.take(table_VxD, tokens_BxT, axis=0).astype(dtype)
        if self.config.position == "learned":
            x_BxTxD += self.position_vectors(tokens_BxT.shape[1], context).astype(dtype)
        x_BxTxD = self.dropout(x_BxTxD, deterministic=not context.train)
        x_BxTxD = nn.with_logical_constraint(x_BxTxD, ("batch", "time", "embed_activation"))
        x_BxTxW = self.trunk(x_BxTxD, context)
        if not self.config.ends_with_norm:
            x_BxTxW = self.final_norm(x_BxTxW)
        # The sharding constraint also applies to the gradient of `x_BxTxW`. Without the constraint, XLA's partitioner
        # chooses a slow sharding for the gradient.
        return nn.with_logical_constraint(x_BxTxW, ("batch", "time", "embed_activation"))

    def position_vectors(self, time: int, context: Context):
        """Returns the position embedding of each token, (B or 1, T, D)."""
        if not context.decode and context.segment_ids_BxT is None:
            return self.position_embedding[None, :time]
        # mode="clip", because the padding of short rows can be beyond the last position of the embedding.
        table_PxD = sharding.gather_fsdp(self.position_embedding, ("position", "embed"))  # as for the token embedding
        return jnp.take(table_PxD, context.positions(time), axis=0, mode="clip")

    @nn.compact
    def head_weight(self):
        """Returns the weights of the output head, (V, W), in the compute dtype.

        V is the vocabulary size and W the trunk's output width. With tied embeddings, the token embedding is returned.
        """
        c = self.config
        if c.tie_embeddings:
            weight = self.token_embedding
        else:
            std = INIT_STD * min(1.0, (HEAD_WIDTH_AT_INIT_STD / c.output_width) ** 0.5)
            weight = self.param("head", normal(std, *TABLE_AXES), (c.vocab_size, c.output_width))
        return sharding.gather_fsdp(weight.astype(c.dtype), TABLE_AXES)

    def __call__(self, tokens_BxT, context: Context = EVALUATION):
        """Returns the logits of the next token at each position, (B, T, V) float32."""
        return self.logits(self.hidden(tokens_BxT, context))

    def next_logits(self, tokens_BxT, context: Context):
        """Returns the logits of the token that follows each row's `context.length_B` tokens, (B, V) float32."""
        x_BxTxW = self.hidden(tokens_BxT, context)
        last = jnp.take_along_axis(x_BxTxW, jnp.maximum(context.length_B, 1)[:, None, None] - 1, axis=1)
        return self.logits(last)[:, 0]

    def logits(self, x_BxTxW):
        batch, time, width = x_BxTxW.shape
        logits_RxV = jnp.dot(x_BxTxW.reshape(-1, width), self.head_weight().T, preferred_element_type=jnp.float32)
        return logits_RxV.reshape(batch, time, -1)


def abstract_params(model: LanguageModel, variables=None):
    """Returns the shapes and axis names of the parameters, as a tree of LogicallyPartitioned. Allocates no arrays.

    `variables` are `abstract_variables(model)`. If they are None, they are computed.
    """
    return (variables or abstract_variables(model))["params"]


def abstract_model_state(model: LanguageModel, variables=None):
    """Returns the shapes of the variable collection "state", which is part of TrainState; {} for most models.

    `variables` are `abstract_variables(model)`, computed by default.
    """
    return nn.unbox((variables or abstract_variables(model)).get("state", {}))


def abstract_variables(model: LanguageModel):
    """Returns the shapes of all variables, {collection: tree}. Each call traces the model.

    Each parameter is in a LogicallyPartitioned with its axis names. A parameter without axis names, such as those of
    flax's own layers, gets the name None for each of its own axes.
    """
    # Trace built-in models with few positions: their variables do not depend on this number. For Qwen3-0.6B, with a
    # context length of 40,960, this takes 0.5 s instead of 23 s.
    c = model.config
    time = c.context_length if custom_classes(c) else min(c.context_length, TRACED_POSITIONS)
    with nn.intercept_methods(name_axes):
        variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, time), jnp.int32))
    return {**variables, "params": boxed(variables["params"])}


def name_axes(call, arguments, keywords, method: nn.module.InterceptorContext):
    """Calls a module's method, and then boxes the parameters that the module has created without axis names.

    In a box, `nn.scan` and `nn.vmap` record the axes that they add. Otherwise, a stack of vectors would be taken for a
    matrix.
    """
    result, module = call(*arguments, **keywords), method.module
    own = module.variables.get("params", {}) if module.scope else {}
    for name, value in own.items():
        if not isinstance(value, (Mapping, nn.Partitioned)):  # a mapping contains the parameters of a submodule
            module.put_variable("params", name, boxed(value))
    return result


def boxed(params):
    """Returns the tree with all arrays in boxes. The axes of arrays that had no box are named None."""
    return jax.tree.map(lambda x: x if isinstance(x, nn.Partitioned) else PlainAxes(x, names=(None,) * x.ndim), params,
                        is_leaf=lambda x: isinstance(x, nn.Partitioned))


class PlainAxes(nn.LogicallyPartitioned):
    """A box for a parameter without axis names. Unlike its base class, it accepts added axes without a name."""

    def add_axis(self, index: int, params: dict):
        return super().add_axis(index, {nn.PARTITION_NAME: None, **params})

    def remove_axis(self, index: int, params: dict):
        return super().remove_axis(index, {nn.PARTITION_NAME: None, **params})


def require_factors(model: LanguageModel, boxed_params) -> None:
    """Raises UserError if `config.rank_ratio` is set, but no layer uses it.

    Custom architectures use it only through the blocks or the dense layers of this package.
    `boxed_params` is `abstract_params(model)`.
    """
    boxes = jax.tree.leaves(boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
    if model.config.rank_ratio and not any("rank" in box.names for box in boxes):
        model.config.refuse("rank_ratio", f"no layer of {model.config.architecture} uses this field; set it to 0")


def num_parameters(model: LanguageModel, boxed_params=None) -> int:
    """Returns the number of parameters. `boxed_params` is `abstract_params(model)`, computed by default."""
    return sum(x.size for x in jax.tree.leaves(boxed_params or abstract_params(model)))


def num_active_parameters(model: LanguageModel, boxed_params=None) -> int:
    """Returns the number of parameters that one token uses. This excludes experts that were not chosen for the token.

    `boxed_params` is as in `num_parameters`.
    """
    boxes = jax.tree.leaves(boxed_params or abstract_params(model),
                            is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
    c = model.config
    return sum(box.value.size * c.experts_per_token // c.num_experts if "expert" in box.names else box.value.size
               for box in boxes)
