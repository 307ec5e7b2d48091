"""The key–value cache of decoding; its axis G is for key–value heads of all texts."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from smallgpt_jax.ops.attention_mask import AttentionMask


class CachedKeys(NamedTuple):
    """The slots of a cache, or the keys and values of a prompt before they are stored."""

    keys_GxSxK: jax.Array
    values_GxSxK: jax.Array
    # (G or 1, S), negative for empty slots; None: each slot's number
    positions_GxS: jax.Array | None = None


def update_cache(cache_GxSxK, x_GxTxK, start_G):
    """Writes row g from `start_G[g]` on; beyond the end nothing, or the last slot if T = 1."""
    rows, time, _ = x_GxTxK.shape
    if time > 1:
        slots_GxT = start_G[:, None] + jnp.arange(time)[None]
        return cache_GxSxK.at[jnp.arange(rows)[:, None], slots_GxT].set(x_GxTxK, mode="drop")
    if rows == 1:  # this is faster on CPUs than the vmap below
        return jax.lax.dynamic_update_slice(cache_GxSxK, x_GxTxK, (0, start_G[0], 0))

    def write(row_SxK, x_TxK, start):
        return jax.lax.dynamic_update_slice(row_SxK, x_TxK, (start, 0))

    return jax.vmap(write)(cache_GxSxK, x_GxTxK, start_G)


def rolling_positions(end_G, slots: int):
    """Returns each slot's position after `end_G` writes, (G, slots); negative if empty."""
    # After 6 writes into 4 slots, the positions are 4, 5, 2 and 3.
    newest_Gx1 = end_G[:, None] - 1
    return newest_Gx1 - (newest_Gx1 - jnp.arange(slots)[None]) % slots


def update_rolling_cache(cache_GxSxK, x_GxTxK, start_G, count_G):
    """Writes the first `count_G[g]` entries of row g, from position `start_G[g]` on."""
    slots, time = cache_GxSxK.shape[1], x_GxTxK.shape[1]
    if time == 1:
        # If a row's only entry is padding, the row is finished, and padding may overwrite its
        # cache.
        return update_cache(cache_GxSxK, x_GxTxK, start_G % slots)
    # For each slot, which of the new entries it gets; negative: it keeps what it has.
    index_GxS = rolling_positions(start_G + count_G, slots) - start_G[:, None]
    valid_GxS = jnp.clip(index_GxS, 0, time - 1)
    new_GxSxK = jnp.take_along_axis(x_GxTxK, valid_GxS[..., None], axis=1)
    is_new_GxS = index_GxS >= 0
    return jnp.where(is_new_GxS[..., None], new_GxSxK, cache_GxSxK)


def cached_attention(q_GxRxTxK, cache: CachedKeys, positions_GxT, mask: AttentionMask, slopes_GxR):
    """Returns softmax(q·keysᵀ/√K)·values, (G, R, T, K), of queries at `positions_GxT`."""
    assert mask == AttentionMask(mask.window), "decoding has one causal text per row"
    rows, per_group, time, head_width = q_GxRxTxK.shape
    # Q = R·T: the queries of all heads that share keys, in one matrix
    q_GxQxK = q_GxRxTxK.reshape(rows, per_group * time, head_width) / math.sqrt(head_width)
    scores_GxQxS = jnp.einsum(
        "gqk,gsk->gqs", q_GxQxK, cache.keys_GxSxK, preferred_element_type=jnp.float32
    )
    key_positions_GxS = cache.positions_GxS
    if key_positions_GxS is None:
        key_positions_GxS = jnp.arange(cache.keys_GxSxK.shape[1])[None]
    distances_GxTxS = positions_GxT[:, :, None] - key_positions_GxS[:, None]
    allowed_GxTxS = (distances_GxTxS >= 0) & (key_positions_GxS >= 0)[:, None]
    if mask.window:
        allowed_GxTxS &= distances_GxTxS < mask.window
    if slopes_GxR is not None:
        biases_GxRxTxS = slopes_GxR[:, :, None, None] * distances_GxTxS[:, None]
        scores_GxQxS -= biases_GxRxTxS.reshape(scores_GxQxS.shape)
    allowed_GxQxS = jnp.tile(allowed_GxTxS, (1, per_group, 1)) if per_group > 1 else allowed_GxTxS
    weights_GxQxS = jax.nn.softmax(jnp.where(allowed_GxQxS, scores_GxQxS, -1e30))
    weights_GxQxS = weights_GxQxS.astype(cache.values_GxSxK.dtype)
    y_GxQxK = jnp.einsum("gqs,gsk->gqk", weights_GxQxS, cache.values_GxSxK)
    return y_GxQxK.reshape(q_GxRxTxK.shape)
