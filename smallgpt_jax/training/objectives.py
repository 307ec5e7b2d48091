"""Training objectives: how a batch becomes examples, and terms added to the cross-entropy.

Masked and prefix language models have other examples; heads that predict later tokens, and the distance to a
teacher, are terms. Validation measures the cross-entropy alone. All draws are functions of the batch and a key, which
`step.py` derives from the seed and the step.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.data.packing import Batch
from smallgpt_jax.models import LanguageModel, lora
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.parameters import name_axes, with_axes
from smallgpt_jax.ops.cross_entropy import cross_entropy
from smallgpt_jax.run.config import TrainConfig

# Of the tokens to predict, masked language models see these fractions as the mask token and as a random token. The
# others are not changed (BERT: Devlin et al., arXiv 1810.04805, section 3.1).
MASKED, RANDOM = 0.8, 0.1


class Examples(NamedTuple):
    batch: Batch
    prefix_BxT: jax.Array | None = None  # bool: positions in their text's bidirectional prefix; None: no prefixes
    selected_BxT: jax.Array | None = None  # bool: of the targets in the batch's mask, those in the loss; None: all

    @property
    def inputs_BxT(self):
        return self.batch.tokens_BxT1[:, :-1]

    @property
    def targets_BxT(self):
        return self.batch.tokens_BxT1[:, 1:] if self.batch.targets_BxT is None else self.batch.targets_BxT

    @property
    def loss_mask_BxT(self):
        """None: all targets."""
        masks = [mask for mask in (self.batch.loss_mask_BxT, self.selected_BxT) if mask is not None]
        return masks[0] & masks[-1] if masks else None

    @property
    def num_targets(self):
        mask_BxT = self.loss_mask_BxT
        return self.batch.tokens_BxT1[:, 1:].size if mask_BxT is None else jnp.sum(mask_BxT)

    @property
    def all_targets(self):
        """Returns the number of targets in the batch's mask, selected or not."""
        return Examples(self.batch).num_targets

    def weights(self, total):
        """Returns (B, T) float32: 1/total for targets in the loss mask, otherwise 0."""
        mask_BxT = self.loss_mask_BxT
        if mask_BxT is None:
            mask_BxT = jnp.ones(self.batch.tokens_BxT1[:, 1:].shape)
        return mask_BxT.astype(jnp.float32) / total

    def context(self, train: bool = False) -> Context:
        return Context(train=train, segment_ids_BxT=self.batch.segment_ids_BxT, prefix_BxT=self.prefix_BxT,
                       loss_mask_BxT=self.batch.loss_mask_BxT)


def next_tokens(batch: Batch, key) -> Examples:
    return Examples(batch)


def continuations(batch: Batch, key) -> Examples:
    """Draws the length of each text's prefix, uniform from 0 to its length − 1; the loss is of what follows it."""
    context = Examples(batch).context()
    rows, time = batch.tokens_BxT1.shape[0], batch.tokens_BxT1.shape[1] - 1
    positions_BxT = jnp.broadcast_to(context.positions(time), (rows, time))
    starts_BxT = jnp.arange(time)[None] - positions_BxT
    is_last_BxT = jnp.concatenate([positions_BxT[:, 1:] == 0, jnp.ones((rows, 1), bool)], axis=1)
    ends_BxT = jax.lax.cummin(jnp.where(is_last_BxT, jnp.arange(1, time + 1)[None], time), axis=1, reverse=True)
    # One number per text: the one that was drawn for its first position.
    fractions_BxT = jnp.take_along_axis(jax.random.uniform(key, (rows, time)), starts_BxT, axis=1)
    return with_prefixes(batch, jnp.floor(fractions_BxT * (ends_BxT - starts_BxT)).astype(jnp.int32))


def with_prefixes(batch: Batch, lengths_BxT) -> Examples:
    """`lengths_BxT`: of the prefixes of the positions' texts. A prefix's last position predicts the token after it."""
    positions_BxT = Examples(batch).context().positions(batch.tokens_BxT1.shape[1] - 1)
    return Examples(batch, positions_BxT < lengths_BxT, positions_BxT + 1 >= lengths_BxT)


def answers(batch: Batch, key) -> Examples:
    """The prefix of a text is its prompt, up to the position that predicts the first counted target."""
    time = batch.tokens_BxT1.shape[1] - 1
    counted_BxT = batch.loss_mask_BxT.astype(jnp.int32)
    before_BxT = jnp.cumsum(counted_BxT, axis=1) - counted_BxT
    starts_BxT = jnp.arange(time)[None] - Examples(batch).context().positions(time)
    return Examples(batch, before_BxT == jnp.take_along_axis(before_BxT, starts_BxT, axis=1))


def masked_tokens(batch: Batch, key, *, rate: float, vocab_size: int) -> Examples:
    """Draws the tokens to predict, with probability `rate`, and replaces most of them in the input. The target of a
    position is its own token. The mask token is the last row of the embedding.
    """
    tokens_BxT = batch.tokens_BxT1[:, :-1]
    select, change, replace = jax.random.split(key, 3)
    is_selected_BxT = jax.random.uniform(select, tokens_BxT.shape) < rate
    change_BxT = jax.random.uniform(change, tokens_BxT.shape)
    random_BxT = jax.random.randint(replace, tokens_BxT.shape, 0, vocab_size, tokens_BxT.dtype)
    changed_BxT = jnp.where(change_BxT < MASKED, vocab_size - 1,
                            jnp.where(change_BxT < MASKED + RANDOM, random_BxT, tokens_BxT))
    inputs_BxT = jnp.where(is_selected_BxT, changed_BxT, tokens_BxT)
    return Examples(batch._replace(
        tokens_BxT1=jnp.concatenate([inputs_BxT, batch.tokens_BxT1[:, -1:]], axis=1), targets_BxT=tokens_BxT),
        selected_BxT=is_selected_BxT)


class Outputs(NamedTuple):
    x_BxTxW: jax.Array  # input of the output head
    head_VxW: jax.Array  # weights of the output head
    embedding_VxD: jax.Array  # token embedding, in float32
    collections: Mapping[str, Any]  # the variable collections that modules wrote to
    logit_softcap: float = 0.0  # as config.model.logit_softcap


def forward(model: LanguageModel, params, model_state, examples: Examples, dropout_key=None, sown=()) -> Outputs:
    """With a `dropout_key`, in training mode, in which "state" and the collections `sown` change."""
    trains = dropout_key is not None
    (x_BxTxW, head_VxW), collections = model.apply(
        {"params": params, "state": model_state},
        method=lambda model: (model.hidden(examples.inputs_BxT, examples.context(trains)), model.head_weight()),
        rngs={"dropout": dropout_key} if trains else {}, mutable=["state", *sown] if trains else [])
    return Outputs(x_BxTxW, head_VxW, params["token_embedding"], collections, model.config.logit_softcap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """A term of the training loss, logged without its `weight`. Its parameters are sharded, optimized and checkpointed
    like the model's, but inference and exports do not read them.
    """

    sown: ClassVar[tuple[str, ...]] = ()  # variable collections that the term reads

    weight: float
    abstract_constants: Any = None  # shapes and shardings

    def init(self, key):
        """Returns the initial parameters, with axis names; {} if the term has none."""
        return {}

    def constants(self):
        """Returns the arrays of `abstract_constants`."""

    def __call__(self, outputs: Outputs, variables, examples: Examples, weights_BxT) -> jax.Array:
        """Sums over rows, each target weighted; `variables` are the term's parameters or constants."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Objective:
    loss_chunks: int = 1
    z_loss: float = 0.0
    # (whole batch, key) → examples. The key differs from step to step; in validation, it is always the same.
    examples: Callable[[Batch, jax.Array], Examples] = next_tokens
    # the same for prompts with answers; the loss mask of the batch has the answers
    tuning_examples: Callable[[Batch, jax.Array], Examples] = next_tokens
    terms: Mapping[str, Term] = dataclasses.field(default_factory=dict)
    adapters: Callable | None = None  # key → the pairs of LoRA, which are trained like the parameters of terms
    # trained parameters → the model's, and further ones that it does not read
    weights: Callable[[dict], dict] = dict

    def cross_entropy(self, outputs: Outputs, examples: Examples, weights_BxT, z_loss: float = 0.0):
        return cross_entropy(
            outputs.x_BxTxW, outputs.head_VxW, examples.targets_BxT, weights_BxT, self.loss_chunks, z_loss,
            outputs.logit_softcap)

    @property
    def sown(self) -> tuple[str, ...]:
        return tuple(collection for term in self.terms.values() for collection in term.sown)

    @property
    def abstract_constants(self) -> dict[str, Any]:
        return {name: term.abstract_constants for name, term in self.terms.items()
                if term.abstract_constants is not None}

    def constants(self) -> dict[str, Any]:
        return {name: self.terms[name].constants() for name in self.abstract_constants}

    def init_heads(self, seed: int) -> dict[str, Any]:
        """Returns {name of the term: its parameters}, without terms that have none."""
        return nn.unbox(self._init_boxed(seed))

    def _init_boxed(self, seed: int) -> dict[str, Any]:
        key = jax.random.key(seed)
        heads = {name: term.init(jax.random.fold_in(key, zlib.crc32(name.encode())))
                 for name, term in self.terms.items()}
        if self.adapters:
            heads[lora.NAME] = self.adapters(jax.random.fold_in(key, zlib.crc32(lora.NAME.encode())))
        return {name: params for name, params in heads.items() if params}

    def abstract_heads(self) -> dict[str, Any]:
        """Returns `init_heads` as trees of `models.Parameter`."""
        with nn.intercept_methods(name_axes):
            return with_axes(jax.eval_shape(self._init_boxed, 0))


def causal(train: TrainConfig, model: LanguageModel) -> Objective:
    return Objective(train.loss_chunks, train.z_loss)


def prefix(train: TrainConfig, model: LanguageModel) -> Objective:
    return dataclasses.replace(causal(train, model), examples=continuations, tuning_examples=answers)


def masked(train: TrainConfig, model: LanguageModel) -> Objective:
    return dataclasses.replace(causal(train, model), examples=functools.partial(
        masked_tokens, rate=train.mask_rate, vocab_size=model.config.vocab_size))


# {config.train.objective: function (train group, model) → Objective}
OBJECTIVES = {"causal": causal, "prefix": prefix, "masked": masked}


def make_objective(train: TrainConfig, model: LanguageModel, **terms: Term) -> Objective:
    train.validate_choice("objective", OBJECTIVES)
    objective = OBJECTIVES[train.objective](train, model)
    return dataclasses.replace(objective, terms={**objective.terms, **terms})
