"""Heads that predict further tokens in training, with the embedding and the output head of the
model.

Shapes: B batch, T time, D width of the embedding, W width of the head's input, N future tokens, P
length of a pseudo-sequence, S positions per row whose future is predicted, R = B·S.
"""

import abc
import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.config.lookup import find_named
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.models import LanguageModel, ModelConfig
from smallgpt_jax.models.attention import Attention
from smallgpt_jax.models.context import EVALUATION, Context
from smallgpt_jax.models.flops import counted_config
from smallgpt_jax.models.initializers import INIT_STD, normal, residual_std
from smallgpt_jax.models.language_model import embed
from smallgpt_jax.models.layers import Dense, block_dense, make_mlp, norm, rms_norm
from smallgpt_jax.models.stacks import layer_configs, stack_blocks
from smallgpt_jax.objectives.examples import Examples
from smallgpt_jax.objectives.objective import Outputs, Term, forward_products
from smallgpt_jax.ops.cross_entropy import LossOptions, cross_entropy
from smallgpt_jax.run.config import TrainConfig


def head_config(config: ModelConfig) -> ModelConfig:
    """Returns the config of a prediction head's block: the last block's, of the output's width."""
    (last,) = layer_configs(config.last_stage, 1, first=config.depth - 1)
    width = config.output_width
    # An lgpt's output may be narrower than its last block (`compress_last_stage`). Without a head_dim,
    # the number of attention heads must divide it.
    heads = last.num_heads if last.head_dim else math.gcd(last.num_heads, width)
    block = last.replace(
        d_model=width,
        num_heads=heads,
        dropout=0.0,
        rank_ratio=0.0,
        value_embeddings=(),  # the block reads neither tokens
        input_mix=False,  # nor the input of the stack
        loops=1,
        num_kv_heads=last.num_kv_heads if heads == last.num_heads else 0,
    )
    if block.mlp != "moe":
        return block
    # A head has no experts, but an MLP as wide as those that one token uses.
    active = block.experts_per_token + block.num_shared_experts
    return block.replace(mlp=block.expert_mlp, mlp_ratio=active * block.mlp_ratio)


class MultiTokenModule(nn.Module):
    """Predicts one token further than the module before it (DeepSeek-V3, 2412.19437)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, h_BxTxW, embedded_BxTxD, context: Context):
        """Returns the input of the next module and that of the head."""
        c = self.config
        # as in the paper, both inputs are normalized before they are joined
        h_BxTxW = rms_norm(c, "hidden_norm")(h_BxTxW)
        embedded_BxTxD = rms_norm(c, "embedding_norm")(embedded_BxTxD)
        joint = jnp.concatenate([h_BxTxW, embedded_BxTxD], axis=-1)
        axes, std = ("embed", "embed_compressed"), joint.shape[-1] ** -0.5
        dense = Dense((c.d_model,), axes, std, False, c.dtype, name="joint")
        h_BxTxW = stack_blocks([c], context)(dense(joint, context))
        if c.norm_position != "pre":  # the block ends with a norm
            return h_BxTxW, h_BxTxW
        return h_BxTxW, norm(c, "final_norm")(h_BxTxW)


class MultiTokenModules(nn.Module):
    config: ModelConfig
    depth: int

    @nn.compact
    def __call__(self, h_BxTxW, embedded, context: Context = EVALUATION):
        """Returns the head's inputs for the tokens after the `embedded` ones, (B, T, D) arrays."""
        # The array k is of the tokens k positions further.
        head_inputs = []
        for k, embedded_BxTxD in enumerate(embedded, start=1):
            module = MultiTokenModule(self.config, name=str(k))
            h_BxTxW, x_BxTxW = module(h_BxTxW, embedded_BxTxD, context)
            head_inputs.append(x_BxTxW)
        return head_inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class FutureTokens(Term, abc.ABC):
    config: ModelConfig
    count: int
    chunks: int

    @property
    @abc.abstractmethod
    def head(self) -> nn.Module: ...

    def init(self, key):
        c = self.config
        x_1xTxW = jnp.zeros((1, self.count, c.output_width), c.dtype)
        embedded_1xTxD = jnp.zeros((1, self.count, c.d_model), c.dtype)
        variables = self.head.init(key, x_1xTxW, [embedded_1xTxD] * self.count)
        return variables["params"]

    def train_products(self, model: LanguageModel) -> int:
        counted = dataclasses.replace(self, config=counted_config(self.config))
        return 3 * forward_products(counted, model)

    def embedded(self, outputs: Outputs, tokens_BxT):
        return embed(outputs.embedding_VxD, tokens_BxT, self.config.dtype)


class MultiToken(FutureTokens):
    """The mean loss of `count` sequential modules (DeepSeek-V3, equations 24 and 25)."""

    @property
    def head(self) -> nn.Module:
        return MultiTokenModules(head_config(self.config), self.count)

    def __call__(self, outputs: Outputs, variables, examples: Examples, weights_BxT) -> jax.Array:
        targets_BxT = examples.targets_BxT
        # Each module reads the token that the module before it, or the model, predicts.
        embedded = [self.embedded(outputs, ahead(targets_BxT, k)) for k in range(self.count)]
        hidden = self.head.apply(
            {"params": variables}, outputs.x_BxTxW, embedded, examples.context()
        )
        total = 0
        for k, x_BxTxW in enumerate(hidden, start=1):
            total += cross_entropy(
                x_BxTxW,
                outputs.head_VxW,
                ahead(targets_BxT, k),
                weights_ahead(examples, weights_BxT, k),
                self.chunks,
                LossOptions(softcap=outputs.logit_softcap),
            )
        return total / self.count


class CrossAttention(nn.Module):
    """Queries of (R, N, W) attend to all of (R, P, W)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_RxNxW, pseudo_RxPxW):
        c = self.config
        features, axes = (c.num_heads, c.head_width), ("embed", "heads", "head_width")

        def project(name, x):  # without dropout, so the context of evaluation applies
            return block_dense(c, name, features, axes, INIT_STD)(x, EVALUATION)

        q_RxNxHxK = project("query", x_RxNxW)
        k_RxPxHxK = project("key", pseudo_RxPxW)
        v_RxPxHxK = project("value", pseudo_RxPxW)
        scores_RxHxNxP = jnp.einsum(
            "rnhk,rphk->rhnp", q_RxNxHxK, k_RxPxHxK, preferred_element_type=jnp.float32
        )
        weights_RxHxNxP = jax.nn.softmax(scores_RxHxNxP / math.sqrt(c.head_width)).astype(c.dtype)
        y_RxNxHxK = jnp.einsum("rhnp,rphk->rnhk", weights_RxHxNxP, v_RxPxHxK)
        axes = ("heads", "head_width", "embed")
        out = block_dense(c, "out", (c.d_model,), axes, residual_std(c))
        return out(y_RxNxHxK, EVALUATION)


class PseudoSequenceDecoder(nn.Module):
    """Maps each vector linearly to a pseudo-sequence, which a decoder of one layer reads to predict
    the next N tokens (FTP: Walker, arXiv 2410.18160).
    """

    config: ModelConfig
    pseudo_length: int

    @nn.compact
    def __call__(self, x_BxSxW, embedded):
        """`embedded` are N arrays (B, S, D), the tokens before those to predict. Returns (R, N, W),
        with R = B·S: token n sees its position's pseudo sequence, and by causal attention the tokens
        1 to n.
        """
        c = self.config
        batch, positions, width = x_BxSxW.shape
        shape, axes = (self.pseudo_length, width), ("embed", "pseudo", "embed_compressed")
        dense = Dense(shape, axes, width**-0.5, True, c.dtype, name="pseudo_sequence")
        pseudo_RxPxW = dense(x_BxSxW, EVALUATION).reshape(batch * positions, -1, width)
        y_RxNxD = jnp.stack(embedded, axis=2).reshape(batch * positions, len(embedded), -1)
        axes, std = ("embed", "embed_compressed"), y_RxNxD.shape[-1] ** -0.5
        dense = Dense((width,), axes, std, False, c.dtype, name="tokens")
        y_RxNxW = dense(rms_norm(c, "tokens_norm")(y_RxNxD), EVALUATION)
        # In place of the model's position encoding: the places count from the head's position.
        places_NxW = self.param(
            "places", normal(INIT_STD, "position", "embed"), (len(embedded), width)
        )
        y_RxNxW += places_NxW[None].astype(c.dtype)
        y_RxNxW += Attention(c, name="attention")(norm(c, "attention_norm")(y_RxNxW), EVALUATION)
        y_RxNxW += CrossAttention(c, name="cross_attention")(
            norm(c, "cross_attention_norm")(y_RxNxW), pseudo_RxPxW
        )
        y_RxNxW += make_mlp(c)(norm(c, "mlp_norm")(y_RxNxW), EVALUATION)
        return norm(c, "final_norm")(y_RxNxW)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PseudoSequence(FutureTokens):
    """The mean loss of N tokens, weighted by γ^k, predicted from every N-th position."""

    pseudo_length: int
    discount: float

    @property
    def head(self) -> nn.Module:
        config = head_config(self.config).replace(
            mixers=("attention",),
            attention_windows=(),
            attention_mask="causal",
            attention="xla",
            position="none",
        )
        return PseudoSequenceDecoder(config, self.pseudo_length)

    def __call__(self, outputs: Outputs, variables, examples: Examples, weights_BxT) -> jax.Array:
        count, time = self.count, weights_BxT.shape[1]
        # Rows start at different positions, which only the row determines, so that all positions
        # are trained.
        first_Bx1 = jnp.sum(examples.inputs_BxT, axis=1, keepdims=True) % count
        positions_BxS = first_Bx1 + jnp.arange(0, time - count + 1, count)[None]

        def at(x_BxT):
            return jnp.take_along_axis(x_BxT, positions_BxS, axis=1)

        x_BxSxW = jnp.take_along_axis(outputs.x_BxTxW, positions_BxS[..., None], axis=1)
        # The decoder reads each token to predict the next one: the first is the input itself.
        tokens = [at(examples.inputs_BxT)]
        tokens += [at(ahead(examples.targets_BxT, k)) for k in range(count - 1)]
        embedded = [self.embedded(outputs, tokens_BxS) for tokens_BxS in tokens]
        y_RxNxW = self.head.apply({"params": variables}, x_BxSxW, embedded)
        targets = [at(ahead(examples.targets_BxT, k)) for k in range(count)]
        targets_BxSxN = jnp.stack(targets, axis=-1)
        discounts = [self.discount**k for k in range(count)]
        total = sum(discounts)
        weights = []
        for k, discount in enumerate(discounts):
            weights.append(discount / total * at(weights_ahead(examples, weights_BxT, k)))
        weights_BxSxN = jnp.stack(weights, axis=-1)
        scale = time / positions_BxS.shape[1]  # each position stands for about N positions
        return cross_entropy(
            y_RxNxW,
            outputs.head_VxW,
            targets_BxSxN.reshape(-1, count),
            scale * weights_BxSxN.reshape(-1, count),
            math.gcd(count, self.chunks),
            LossOptions(softcap=outputs.logit_softcap),
        )


def ahead(x_BxT, count: int):
    """Returns the values `count` positions further; those of the last positions mean nothing."""
    return jnp.roll(x_BxT, -count, axis=1)


def weights_ahead(examples: Examples, weights_BxT, count: int):
    """Returns the weights of the targets `count` positions further, 0 beyond row or document."""
    time = weights_BxT.shape[1]
    # Inside a prefix, where targets have no weight, attention may see what follows.
    is_counted_BxT = (weights_BxT > 0) & (jnp.arange(time)[None] < time - count)
    ids_BxT = examples.batch.segment_ids_BxT
    if ids_BxT is not None:
        is_counted_BxT &= ids_BxT == ahead(ids_BxT, count)
    return jnp.where(is_counted_BxT, ahead(weights_BxT, count), 0.0)


# {config.train.future_head: function (train group, shared arguments of the term) → term}
FUTURE_HEADS = {
    "mtp": lambda train, **shared: MultiToken(**shared),
    "ftp": lambda train, **shared: PseudoSequence(
        pseudo_length=train.pseudo_length, discount=train.future_discount, **shared
    ),
}


def find_future_head(name: str):
    return find_named(name, FUTURE_HEADS, f"config.train.future_head={short_repr(name)}")


def future_terms(train: TrainConfig, model: LanguageModel) -> dict[str, Term]:
    if not train.future_tokens:
        return {}
    make_term = find_future_head(train.future_head)
    if train.objective == "masked":
        train.refuse("future_tokens", "must be 0 with config.train.objective='masked'")
    if train.future_tokens >= model.config.context_length:
        limit = f"config.model.context_length={model.config.context_length}"
        train.refuse("future_tokens", f"must be less than {limit}")
    term = make_term(
        train,
        weight=train.future_weight,
        config=model.config,
        count=train.future_tokens,
        chunks=train.loss_chunks,
    )
    try:
        term.head.config.validate_block()
    except UserError as error:
        train.refuse(
            "future_tokens",
            f"the block of the head has the width {model.config.output_width} of the model's "
            f"output ({error}); set it to 0, or change the model",
        )
    return {train.future_head: term}
