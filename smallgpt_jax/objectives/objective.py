"""Training objectives: how a batch becomes examples, and terms added to the cross-entropy.

Masked and prefix language models have other examples; heads that predict later tokens, and the
distance to a teacher, are terms. Validation measures the cross-entropy alone.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax

from smallgpt_jax.config.lookup import find_named
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.models import LanguageModel, ModelConfig
from smallgpt_jax.models.custom_code import custom_classes
from smallgpt_jax.models.flops import count_operations
from smallgpt_jax.models.parameters import name_axes, with_axes
from smallgpt_jax.objectives.examples import (
    Examples,
    answers,
    continuations,
    masked_tokens,
    next_tokens,
)
from smallgpt_jax.ops.cross_entropy import LossOptions, cross_entropy
from smallgpt_jax.optim import lora
from smallgpt_jax.run.config import TrainConfig


class Outputs(NamedTuple):
    x_BxTxW: jax.Array  # input of the output head
    head_VxW: jax.Array  # weights of the output head
    embedding_VxD: jax.Array  # token embedding, in float32
    collections: Mapping[str, Any]  # the variable collections that modules wrote to
    logit_softcap: float = 0.0  # as config.model.logit_softcap


def forward(
    model: LanguageModel, params, model_state, examples: Examples, dropout_key=None, sown=()
) -> Outputs:
    """With a `dropout_key`, in training mode, and "state" and `sown` change."""
    trains = dropout_key is not None

    def hidden_and_head(model):  # the logits never exist whole; see ops/cross_entropy.py
        return model.hidden(examples.inputs_BxT, examples.context(trains)), model.head_weight()

    (x_BxTxW, head_VxW), collections = model.apply(
        {"params": params, "state": model_state},
        method=hidden_and_head,
        rngs={"dropout": dropout_key} if trains else {},
        mutable=["state", *sown] if trains else [],
    )
    return Outputs(
        x_BxTxW, head_VxW, params["token_embedding"], collections, model.config.logit_softcap
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """A term of the training loss, logged without its `weight`.

    It may have constants, or parameters. These are sharded, optimized and checkpointed like the
    model's, but are not part of the model: inference and exports do not read them.
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
        """Sums over rows, each target weighted; `variables`: parameters or constants."""
        raise NotImplementedError

    def train_products(self, model: LanguageModel) -> int:
        """Returns the FLOPs of matrix products in training on one row. Raises UnknownFlops."""
        # as of the model, 3 times those of the forward pass
        return 3 * forward_products(self, model)


def forward_products(term: Term, model: LanguageModel) -> int:
    """Returns the FLOPs of the term's own products on one row."""
    c = model.config
    outputs = (
        jax.ShapeDtypeStruct((1, c.context_length, c.output_width), c.dtype),
        jax.ShapeDtypeStruct((c.vocab_size, c.output_width), c.dtype),
        jax.ShapeDtypeStruct((c.vocab_size, c.d_model), "float32"),
    )
    variables = jax.eval_shape(lambda: nn.unbox(term.init(jax.random.key(0))))
    tokens_1xT1 = jax.ShapeDtypeStruct((1, c.context_length + 1), "int32")
    weights_1xT = jax.ShapeDtypeStruct((1, c.context_length), "float32")

    # without collections: a term that reads them has its own `train_products`
    def loss(outputs, variables, tokens_1xT1, weights_1xT):
        return term(Outputs(*outputs, {}), variables, Examples(Batch(tokens_1xT1)), weights_1xT)

    return count_operations(loss, outputs, variables, tokens_1xT1, weights_1xT).products


@dataclasses.dataclass(frozen=True)
class Objective:
    loss_chunks: int = 1
    z_loss: float = 0.0
    # (whole batch, one key per row) → examples. The keys differ from step to step; in validation, a
    # row always has the same.
    examples: Callable[[Batch, jax.Array], Examples] = next_tokens
    # the same for prompts with answers; the loss mask of the batch has the answers
    tuning_examples: Callable[[Batch, jax.Array], Examples] = next_tokens
    terms: Mapping[str, Term] = dataclasses.field(default_factory=dict)
    # key → the pairs of LoRA, which are trained like the parameters of terms
    adapters: Callable | None = None
    # trained parameters → the model's, and further ones that it does not read
    weights: Callable[[dict], dict] = dict

    def cross_entropy(self, outputs: Outputs, examples: Examples, weights_BxT, z_loss: float = 0.0):
        return cross_entropy(
            outputs.x_BxTxW,
            outputs.head_VxW,
            examples.targets_BxT,
            weights_BxT,
            self.loss_chunks,
            LossOptions(z_loss, outputs.logit_softcap),
        )

    def weights_dtype(self, config: ModelConfig) -> str:
        """Returns the dtype of gathered weights. Terms, LoRA, custom modules read float32."""
        return "float32" if self.terms or self.adapters or custom_classes(config) else config.dtype

    @property
    def sown(self) -> tuple[str, ...]:
        return tuple(collection for term in self.terms.values() for collection in term.sown)

    @property
    def abstract_constants(self) -> dict[str, Any]:
        return {
            name: term.abstract_constants
            for name, term in self.terms.items()
            if term.abstract_constants is not None
        }

    def constants(self) -> dict[str, Any]:
        return {name: self.terms[name].constants() for name in self.abstract_constants}

    def init_heads(self, seed: int) -> dict[str, Any]:
        """Returns {name of the term: its parameters}, without terms that have none."""
        return nn.unbox(self._init_boxed(seed))

    def _init_boxed(self, seed: int) -> dict[str, Any]:
        def key_of(name: str):  # does not depend on which other terms there are
            return jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))

        heads = {name: term.init(key_of(name)) for name, term in self.terms.items()}
        if self.adapters:
            heads[lora.NAME] = self.adapters(key_of(lora.NAME))
        return {name: params for name, params in heads.items() if params}

    def abstract_heads(self) -> dict[str, Any]:
        """Returns `init_heads` as trees of `models.Parameter`."""
        # a user's head may have parameters without names of axes
        with nn.intercept_methods(name_axes):
            return with_axes(jax.eval_shape(self._init_boxed, 0))


def _causal(train: TrainConfig, model: LanguageModel) -> Objective:
    return Objective(train.loss_chunks, train.z_loss)


def _prefix(train: TrainConfig, model: LanguageModel) -> Objective:
    objective = _causal(train, model)
    return dataclasses.replace(objective, examples=continuations, tuning_examples=answers)


def _masked(train: TrainConfig, model: LanguageModel) -> Objective:
    mask_token = model.config.vocab_size - 1  # no tokenizer uses the last row of the embedding
    examples = functools.partial(masked_tokens, rate=train.mask_rate, mask_token=mask_token)
    return dataclasses.replace(_causal(train, model), examples=examples)


# {config.train.objective: function (train group, model) → Objective}
OBJECTIVES = {"causal": _causal, "prefix": _prefix, "masked": _masked}


def find_objective(name: str):
    where = f"config.train.objective={short_repr(name)}"
    return find_named(name, OBJECTIVES, where, ("train", "model"))


def make_objective(train: TrainConfig, model: LanguageModel, **terms: Term) -> Objective:
    objective = find_objective(train.objective)(train, model)
    return dataclasses.replace(objective, terms={**objective.terms, **terms})
