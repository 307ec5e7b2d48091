"""Chunks of positions, the decays inside them, and the states between them, for recurrences with a
state.

Shapes: B batch, T time, H heads, G = 1 or H heads of queries and keys; N chunks of C positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from smallgpt_jax.devices.platform import platform

CHUNK = 64  # largest number of positions per chunk; a power of two
_TPU_CHUNK = 128  # the same on TPUs, which pad the last axis of a matrix to 128
GROUP = 16  # chunks per group


class RecurrenceInputs(NamedTuple):
    """What a recurrence reads of each token, beside the state. Logarithms of decays are ≤ 0."""

    q_BxTxGxK: jax.Array
    k_BxTxGxK: jax.Array
    v_BxTxHxV: jax.Array
    log_decay_BxTxH: jax.Array
    beta_BxTxH: jax.Array | None = None  # the fraction that the delta rule replaces

    def map(self, function) -> "RecurrenceInputs":
        return jax.tree.map(function, self)


def chunk_length(time: int) -> int:
    """Returns the positions per chunk, a power of two."""
    longest = _TPU_CHUNK if platform() == "tpu" else CHUNK
    return min(longest, 1 << (time - 1).bit_length())  # 1, 2, 4, 4, 8, … for 1, 2, 3, 4, 5, …


def in_chunks(x_BxTxHxK, length: int):
    """(B, T, H, …) → (N, B, H, C, …), padded with zeros."""
    batch, time, *rest = x_BxTxHxK.shape
    # Zeros as log decay, β and value leave the state as it is.
    padding = [(0, 0), (0, -time % length)] + [(0, 0)] * len(rest)
    chunks_BxNxCxHxK = jnp.pad(x_BxTxHxK, padding).reshape(batch, -1, length, *rest)
    return jnp.moveaxis(chunks_BxNxCxHxK, (1, 3), (0, 2))


def joined(y_NxBxHxCxV, time: int):
    """Inverts `in_chunks`: (B, T, H, V), without the padding."""
    y_BxNxCxHxV = jnp.moveaxis(y_NxBxHxCxV, (0, 2), (1, 3))
    batch, _, _, *rest = y_BxNxCxHxV.shape
    return y_BxNxCxHxV.reshape(batch, -1, *rest)[:, :time]


def decays_in_chunk(log_decay_NxBxHxC, begins_NxBx1xC):
    """Returns Γ, (N, B, H, C, C), and γ and ω, (N, B, H, C), which are 0 across the beginning of a
    text.

    Γ_ij is the decay from token j to token i ≥ j, γ_i that from before the chunk to token i, and
    ω_j that from token j to the end of the chunk. Each logarithm is a sum over the tokens between
    only. As a difference of two sums from the start of the chunk, it would lose its last digits to
    a strong decay, or to another text.
    """
    length = log_decay_NxBxHxC.shape[-1]
    until_i = jnp.tri(length, dtype=bool)
    after_j = jnp.tri(length, k=-1)
    texts_NxBx1xC = jnp.cumsum(begins_NxBx1xC, axis=-1)  # how many texts have begun in the chunk
    is_read = until_i[None, None, None]  # i reads what j has added
    is_read &= texts_NxBx1xC[..., :, None] == texts_NxBx1xC[..., None, :]
    # (i, j): row i keeps the logarithms up to i, and column j sums those after j.
    up_to_i = jnp.where(until_i[None, None, None], log_decay_NxBxHxC[..., None, :], 0.0)
    log_decays = product(up_to_i, after_j)
    # The last row and the first column of Γ, computed apart: the gradient of a slice is a slow sum
    # on TPUs.
    from_start = product(log_decay_NxBxHxC, until_i.T.astype(jnp.float32))
    to_end = product(log_decay_NxBxHxC, after_j)
    decays = jnp.where(is_read, jnp.exp(log_decays), 0.0)
    is_first_text = texts_NxBx1xC == 0
    kept = jnp.where(is_first_text, jnp.exp(from_start), 0.0)
    is_last_text = texts_NxBx1xC == texts_NxBx1xC[..., -1:]
    until_end = jnp.where(is_last_text, jnp.exp(to_end), 0.0)
    return decays, kept, until_end


@jax.custom_vjp
def states_before_chunks(kept_NxBxH, erased_NxBxHxKxK, added_NxBxHxKxV, state_BxHxKxV):
    """Returns the state before each chunk, (N, B, H, K, V), and the last state, (B, H, K, V).

    A chunk makes kept·S − erased·S + added of a state S; without `erased` (None), kept·S + added.
    """
    return _run_chunks(kept_NxBxH, erased_NxBxHxKxK, added_NxBxHxKxV, state_BxHxKxV)


def _forward(kept, erased, added, state):
    states, last = states_before_chunks(kept, erased, added, state)
    return (states, last), (kept, erased, states)


def _backward(residuals, cotangents):
    """The states' gradients obey the transposed recurrence, from the last chunk to the first."""
    kept, erased, states = residuals
    by_states, by_last = cotangents
    # S_{n+1} = kept·S_n − erased·S_n + added, so the gradient by S_n is
    #     G_n = by_states_n + kept·G_{n+1} − erasedᵀ·G_{n+1},
    # and that by `added` is G_{n+1}, the state before chunk n of the reversed recurrence.
    transposed = None if erased is None else jnp.swapaxes(erased, -1, -2)
    by_added, by_state = _run_chunks(kept, transposed, by_states, by_last, reverse=True)
    by_erased = None if erased is None else -by_added @ jnp.swapaxes(states, -1, -2)
    by_kept = jnp.sum(by_added * states, axis=(-2, -1))
    return by_kept, by_erased, by_added, by_state


states_before_chunks.defvjp(_forward, _backward)


def _run_chunks(kept, erased, added, state, reverse: bool = False):
    """Returns what `states_before_chunks` returns; if `reverse`, of the recurrence from the last
    chunk to the first.

    Except on CPUs, groups of chunks are computed side by side, each from a state of 0. A group
    makes of a state what a chunk makes of it, so the states before the groups follow from the same
    recurrence.
    """
    number = len(kept)
    if number <= GROUP or platform() == "cpu":
        return _scan(kept, erased, added, state, reverse)
    # Padded chunks keep the state.
    kept, erased, added = _in_groups(kept, 1), _in_groups(erased), _in_groups(added)
    kept_before = _products_before(kept, reverse)[..., None, None]
    # Before a chunk, kept_before·S − E·S + A is left of the state S before its group. A and E
    # obey the chunks' recurrence: A adds `added`, E adds kept_before·erased.
    both = (added, None if erased is None else kept_before * erased)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x[0]), both)
    before_chunks, after_group = _scan(kept, erased, both, zeros, reverse)
    added, erased = before_chunks
    added_by_group, erased_by_group = after_group
    kept_by_group = jnp.prod(kept, axis=0)
    groups, state = _run_chunks(kept_by_group, erased_by_group, added_by_group, state, reverse)
    added += kept_before * groups[None]
    if erased is not None:
        added -= erased @ groups[None]
    return jnp.swapaxes(added, 0, 1).reshape(-1, *state.shape)[:number], state


def _in_groups(x, padding: float = 0):
    """Puts GROUP adjacent chunks on the first axis: (N, …) → (GROUP, N / GROUP, …), padded."""
    if x is None:
        return None
    missing = -len(x) % GROUP  # 7 for 25 chunks, which make two groups of 16
    padding_of_axes = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, padding_of_axes, constant_values=padding)
    groups = x.reshape(-1, GROUP, *x.shape[1:])
    return jnp.swapaxes(groups, 0, 1)


def _products_before(kept, reverse: bool):
    """Returns the products of all earlier ones along the first axis; if `reverse`, later ones."""
    one = jnp.ones_like(kept[:1])
    shifted = [kept[1:], one] if reverse else [one, kept[:-1]]
    return jax.lax.cumprod(jnp.concatenate(shifted), reverse=reverse)


def _scan(kept, erased, added, state, reverse: bool):
    """Runs state ← kept·state − erased @ state + added over N chunks, from the last one if `reverse`.

    `kept`: (N, …); `erased` (or None) and the leaves of `added`: (N, …, two axes). `state`: one array,
    or a tree of the structure of `added`. Returns the states before each chunk and the last one.
    """

    def next_chunk(state, chunk):
        kept, erased, added = chunk

        def next_state(state, added):
            kept_and_added = kept[..., None, None] * state + added
            return kept_and_added if erased is None else kept_and_added - erased @ state

        return jax.tree.map(next_state, state, added), state

    last, states = jax.lax.scan(next_chunk, state, (kept, erased, added), reverse=reverse)
    return states, last


def product(a, b):
    """Returns a·b of float32 matrices without rounding them to bfloat16, as TPUs do by default."""
    return jnp.matmul(a, b, precision="highest")
