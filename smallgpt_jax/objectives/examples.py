"""The examples that a batch gives: those of causal, prefix and masked language models.

All draws are functions of the batch and a key, which `step.py` derives from the seed and the step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from smallgpt_jax.data.packing import Batch
from smallgpt_jax.models.context import Context

# Of the tokens to predict, masked language models see these fractions as the mask token and as a
# random token. The others are not changed (BERT: Devlin et al., arXiv 1810.04805, section 3.1).
MASKED, RANDOM = 0.8, 0.1


class Examples(NamedTuple):
    batch: Batch
    prefix_BxT: jax.Array | None = (
        None  # bool: positions in their text's bidirectional prefix; None: no prefixes
    )
    selected_BxT: jax.Array | None = (
        None  # bool: of the targets in the batch's mask, those in the loss; None: all
    )

    @property
    def inputs_BxT(self):
        return self.batch.tokens_BxT1[:, :-1]

    @property
    def targets_BxT(self):
        return (
            self.batch.tokens_BxT1[:, 1:]
            if self.batch.targets_BxT is None
            else self.batch.targets_BxT
        )

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
        return Context(
            train=train,
            segment_ids_BxT=self.batch.segment_ids_BxT,
            prefix_BxT=self.prefix_BxT,
            loss_mask_BxT=self.batch.loss_mask_BxT,
        )


def next_tokens(batch: Batch, key) -> Examples:
    return Examples(batch)


def continuations(batch: Batch, key) -> Examples:
    """Draws the length of each text's prefix, uniform from 0 to its length − 1; the loss includes
    only what follows it.

    The last position of a prefix predicts the first token after it, as in generation after a
    prompt.
    """
    context = Examples(batch).context()
    rows, time = batch.tokens_BxT1.shape[0], batch.tokens_BxT1.shape[1] - 1
    positions_BxT = jnp.broadcast_to(context.positions(time), (rows, time))
    starts_BxT = jnp.arange(time)[None] - positions_BxT
    is_last_BxT = jnp.concatenate([positions_BxT[:, 1:] == 0, jnp.ones((rows, 1), bool)], axis=1)
    ends_BxT = jax.lax.cummin(
        jnp.where(is_last_BxT, jnp.arange(1, time + 1)[None], time), axis=1, reverse=True
    )
    # One number per text: the one that was drawn for its first position.
    fractions_BxT = jnp.take_along_axis(jax.random.uniform(key, (rows, time)), starts_BxT, axis=1)
    return with_prefixes(
        batch, jnp.floor(fractions_BxT * (ends_BxT - starts_BxT)).astype(jnp.int32)
    )


def with_prefixes(batch: Batch, lengths_BxT) -> Examples:
    """`lengths_BxT` are the lengths of the prefixes of the positions' texts."""
    positions_BxT = Examples(batch).context().positions(batch.tokens_BxT1.shape[1] - 1)
    return Examples(batch, positions_BxT < lengths_BxT, positions_BxT + 1 >= lengths_BxT)


def answers(batch: Batch, key) -> Examples:
    """The prefix of a text is its prompt, up to the position that predicts the first counted
    target.
    """
    time = batch.tokens_BxT1.shape[1] - 1
    counted_BxT = batch.loss_mask_BxT.astype(jnp.int32)
    before_BxT = jnp.cumsum(counted_BxT, axis=1) - counted_BxT
    starts_BxT = jnp.arange(time)[None] - Examples(batch).context().positions(time)
    return Examples(batch, before_BxT == jnp.take_along_axis(before_BxT, starts_BxT, axis=1))


def masked_tokens(batch: Batch, key, *, rate: float, vocab_size: int) -> Examples:
    """Draws the tokens to predict, with probability `rate`, and replaces most of them in the input.
    The target of a position is its own token. The mask token is the last row of the embedding.
    """
    tokens_BxT = batch.tokens_BxT1[:, :-1]
    select, change, replace = jax.random.split(key, 3)
    is_selected_BxT = jax.random.uniform(select, tokens_BxT.shape) < rate
    change_BxT = jax.random.uniform(change, tokens_BxT.shape)
    random_BxT = jax.random.randint(replace, tokens_BxT.shape, 0, vocab_size, tokens_BxT.dtype)
    changed_BxT = jnp.where(
        change_BxT < MASKED,
        vocab_size - 1,
        jnp.where(change_BxT < MASKED + RANDOM, random_BxT, tokens_BxT),
    )
    inputs_BxT = jnp.where(is_selected_BxT, changed_BxT, tokens_BxT)
    return Examples(
        batch._replace(
            tokens_BxT1=jnp.concatenate([inputs_BxT, batch.tokens_BxT1[:, -1:]], axis=1),
            targets_BxT=tokens_BxT,
        ),
        selected_BxT=is_selected_BxT,
    )
