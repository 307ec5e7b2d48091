"""The examples that a batch gives: those of causal, prefix and masked language models.

All draws of a row are functions of the row and its key; see `row_keys`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from smallgpt_jax.data.packing import Batch
from smallgpt_jax.models.context import Context

# Of the tokens to predict, masked language models see these fractions as the mask token and as a
# random token. The others are not changed (BERT: Devlin et al., arXiv 1810.04805, section 3.1).
_MASKED, _RANDOM = 0.8, 0.1


class Examples(NamedTuple):
    batch: Batch
    # bool: positions in their text's bidirectional prefix; None: no prefixes
    prefix_BxT: jax.Array | None = None
    # bool: of the targets in the batch's mask, those in the loss; None: all
    selected_BxT: jax.Array | None = None

    @property
    def inputs_BxT(self):
        return self.batch.tokens_BxT1[:, :-1]

    @property
    def targets_BxT(self):
        if self.batch.targets_BxT is not None:
            return self.batch.targets_BxT
        return self.batch.tokens_BxT1[:, 1:]

    @property
    def loss_mask_BxT(self):
        """None: all targets."""
        if self.selected_BxT is None:
            return self.batch.loss_mask_BxT
        if self.batch.loss_mask_BxT is None:
            return self.selected_BxT
        return self.batch.loss_mask_BxT & self.selected_BxT

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


def row_keys(key, batch: Batch):
    """Returns one key per row, (B,)."""
    # In validation, a row has the key of its number, so that the examples depend neither on the
    # batch size nor on the order.
    numbers_B = batch.row_numbers_B
    if numbers_B is None:
        numbers_B = jnp.arange(len(batch.tokens_BxT1))
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers_B)


def next_tokens(batch: Batch, keys_B) -> Examples:
    return Examples(batch)


def continuations(batch: Batch, keys_B) -> Examples:
    """Draws the length of each text's prefix, from 0 to its length − 1; the loss is what follows."""
    rows, time = batch.tokens_BxT1.shape[0], batch.tokens_BxT1.shape[1] - 1
    # For texts of 3 and 2 positions: positions 0 1 2 0 1, starts 0 0 0 3 3, ends 3 3 3 5 5.
    positions_BxT = jnp.broadcast_to(Examples(batch).context().positions(time), (rows, time))
    starts_BxT = jnp.arange(time)[None] - positions_BxT
    is_last_BxT = jnp.concatenate([positions_BxT[:, 1:] == 0, jnp.ones((rows, 1), bool)], axis=1)
    ends_at_last_BxT = jnp.where(is_last_BxT, jnp.arange(1, time + 1)[None], time)
    ends_BxT = jax.lax.cummin(ends_at_last_BxT, axis=1, reverse=True)
    if batch.segment_ids_BxT is None and batch.loss_mask_BxT is not None:
        # The padding at the end of a row is no part of its text.
        counted_ends_BxT = jnp.where(batch.loss_mask_BxT, jnp.arange(1, time + 1)[None], 1)
        ends_BxT = jnp.minimum(ends_BxT, jnp.max(counted_ends_BxT, axis=1, keepdims=True))
    drawn_BxT = jax.vmap(lambda key: jax.random.uniform(key, (time,)))(keys_B)
    # One number per text: the one that was drawn for its first position.
    fractions_BxT = jnp.take_along_axis(drawn_BxT, starts_BxT, axis=1)
    text_lengths_BxT = ends_BxT - starts_BxT
    prefix_lengths_BxT = jnp.floor(fractions_BxT * text_lengths_BxT).astype(jnp.int32)
    return with_prefixes(batch, prefix_lengths_BxT)


def with_prefixes(batch: Batch, lengths_BxT) -> Examples:
    """`lengths_BxT` are the lengths of the prefixes of the positions' texts."""
    time = batch.tokens_BxT1.shape[1] - 1
    positions_BxT = Examples(batch).context().positions(time)
    is_in_prefix_BxT = positions_BxT < lengths_BxT
    # The last position of a prefix predicts the first token after it.
    is_selected_BxT = positions_BxT + 1 >= lengths_BxT
    return Examples(batch, is_in_prefix_BxT, is_selected_BxT)


def answers(batch: Batch, keys_B) -> Examples:
    """The prefix of a text is its prompt, up to what predicts the first counted target."""
    time = batch.tokens_BxT1.shape[1] - 1
    counted_BxT = batch.loss_mask_BxT.astype(jnp.int32)
    counted_before_BxT = jnp.cumsum(counted_BxT, axis=1) - counted_BxT
    starts_BxT = jnp.arange(time)[None] - Examples(batch).context().positions(time)
    # In the prompt, as many targets were counted in the row as at the text's start.
    before_text_BxT = jnp.take_along_axis(counted_before_BxT, starts_BxT, axis=1)
    return Examples(batch, prefix_BxT=counted_before_BxT == before_text_BxT)


def masked_tokens(batch: Batch, keys_B, *, rate: float, mask_token: int) -> Examples:
    """Draws the tokens to predict, with probability `rate`, and replaces most of them in the input.
    The target of a position is its own token. Random tokens are ids of the tokenizer.
    """
    tokens_BxT = batch.tokens_BxT1[:, :-1]
    rows, time = tokens_BxT.shape
    vocab_size_B = batch.vocab_size_B
    if vocab_size_B is None:
        vocab_size_B = jnp.full(rows, mask_token)

    def draw(key, vocab_size):
        select, change, replace = jax.random.split(key, 3)
        return (
            jax.random.uniform(select, (time,)),
            jax.random.uniform(change, (time,)),
            jax.random.randint(replace, (time,), 0, vocab_size, tokens_BxT.dtype),
        )

    select_BxT, change_BxT, random_BxT = jax.vmap(draw)(keys_B, vocab_size_B)
    # At least one token per row, as in BERT's code: a step without targets would have no loss.
    counted_BxT = Examples(batch).weights(1) > 0
    least_Bx1 = jnp.min(jnp.where(counted_BxT, select_BxT, 1.0), axis=1, keepdims=True)
    is_selected_BxT = (select_BxT < rate) | (select_BxT == least_Bx1)
    random_or_same_BxT = jnp.where(change_BxT < _MASKED + _RANDOM, random_BxT, tokens_BxT)
    changed_BxT = jnp.where(change_BxT < _MASKED, mask_token, random_or_same_BxT)
    inputs_BxT = jnp.where(is_selected_BxT, changed_BxT, tokens_BxT)
    # The last token is a target of next-token prediction only; `Examples.inputs_BxT` drops it.
    tokens_BxT1 = jnp.concatenate([inputs_BxT, batch.tokens_BxT1[:, -1:]], axis=1)
    batch = batch._replace(tokens_BxT1=tokens_BxT1, targets_BxT=tokens_BxT)
    return Examples(batch, selected_BxT=is_selected_BxT)
