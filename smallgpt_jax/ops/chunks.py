"""Chunks of positions, and the decays inside them, for recurrences with a state.

Shapes: B batch, T time, H heads; N chunks of C positions.
"""

import jax.numpy as jnp

CHUNK = 64  # largest number of positions per chunk; a power of two


def chunk_length(time: int) -> int:
    """Returns a power of two."""
    return min(CHUNK, 1 << (time - 1).bit_length())


def in_chunks(x_BxTxHxK, length: int):
    """(B, T, H, …) → (N, B, H, C, …), padded with zeros."""
    batch, time, *rest = x_BxTxHxK.shape
    padded = jnp.pad(x_BxTxHxK, ((0, 0), (0, -time % length), *((0, 0) for _ in rest)))
    return jnp.moveaxis(padded.reshape(batch, -1, length, *rest), (1, 3), (0, 2))


def joined(y_NxBxHxCxV, time: int):
    """Inverts `in_chunks`: (B, T, H, V), without the padding."""
    y_BxNxCxHxV = jnp.moveaxis(y_NxBxHxCxV, (0, 2), (1, 3))
    return y_BxNxCxHxV.reshape(len(y_BxNxCxHxV), -1, *y_BxNxCxHxV.shape[3:])[:, :time]


def decays_in_chunk(log_decay_NxBxHxC, begins_NxBx1xC):
    """Returns Γ, (N, B, H, C, C), and γ, (N, B, H, C), which are 0 across the beginning of a text.

    Γ_ij is the decay from token j to token i ≥ j, and γ_i that from before the chunk to token i. log Γ_ij is a sum over
    the tokens between j and i only. As a difference of two sums from the start of the chunk, it would lose its last
    digits to a strong decay, or to another text.
    """
    length = log_decay_NxBxHxC.shape[-1]
    until_i = jnp.tri(length, dtype=bool)[None, None, None]
    after_j = jnp.tri(length, k=-1)
    log_decays = product(jnp.where(until_i, log_decay_NxBxHxC[..., None, :], 0.0), after_j)
    texts_NxBx1xC = jnp.cumsum(begins_NxBx1xC, axis=-1)
    is_same = texts_NxBx1xC[..., :, None] == texts_NxBx1xC[..., None, :]
    decays = jnp.where(until_i & is_same, jnp.exp(log_decays), 0.0)
    first = jnp.where(begins_NxBx1xC[..., :1], 0.0, jnp.exp(log_decay_NxBxHxC[..., :1]))
    return decays, first * decays[..., 0]


def product(a, b):
    """Returns a·b of float32 matrices without rounding them to bfloat16, as TPUs do by default."""
    return jnp.matmul(a, b, precision="highest")
