"""The key–value cache of decoding: its slots, and attention that reads it.

A row of the cache belongs to one key–value head of one text: G is (number of texts) × (key–value heads per text).
"""

import math

import jax
import jax.numpy as jnp

from smallgpt_jax.ops.attention_mask import AttentionMask


def update_cache(cache_GxSxK, x_GxTxK, start_G):
    """Returns the cache after `x_GxTxK` has been written to it.

    The T entries of row g are written to row g of the cache, beginning at slot `start_G[g]`. If T > 1, entries beyond
    the end of the cache are dropped. If T is 1, an entry beyond the end overwrites the last slot.
    """
    rows, time, _ = x_GxTxK.shape
    if time > 1:
        slots_GxT = start_G[:, None] + jnp.arange(time)[None]
        return cache_GxSxK.at[jnp.arange(rows)[:, None], slots_GxT].set(x_GxTxK, mode="drop")
    if rows == 1:  # this is faster on CPUs than the vmap below
        return jax.lax.dynamic_update_slice(cache_GxSxK, x_GxTxK, (0, start_G[0], 0))
    return jax.vmap(lambda row, x, start: jax.lax.dynamic_update_slice(row, x, (start, 0)))(
        cache_GxSxK, x_GxTxK, start_G)


def rolling_positions(end_G, slots: int):
    """Returns the position that each slot of a rolling cache holds, (G, slots).

    `end_G` is the number of positions that have been written, per row. Position p is written to slot p mod `slots`, so
    the cache holds the newest positions. The result is negative for an empty slot.
    """
    newest_Gx1 = end_G[:, None] - 1
    return newest_Gx1 - (newest_Gx1 - jnp.arange(slots)[None]) % slots


def update_rolling_cache(cache_GxSxK, x_GxTxK, start_G, count_G):
    """Returns a rolling cache after the entries in `x_GxTxK` have been written to it.

    Only the first `count_G[g]` of the T entries of row g are written; the other entries are padding. `start_G` is the
    position of each row's first entry.
    """
    slots, time = cache_GxSxK.shape[1], x_GxTxK.shape[1]
    if time == 1:
        # If a row's only entry is padding, the row is finished, and padding may overwrite its cache.
        return update_cache(cache_GxSxK, x_GxTxK, start_G % slots)
    index_GxS = rolling_positions(start_G + count_G, slots) - start_G[:, None]
    new_GxSxK = jnp.take_along_axis(x_GxTxK, jnp.clip(index_GxS, 0, time - 1)[..., None], axis=1)
    return jnp.where((index_GxS >= 0)[..., None], new_GxSxK, cache_GxSxK)


def cached_attention(q_GxRxTxK, keys_GxSxK, values_GxSxK, positions_GxT, mask: AttentionMask, slopes_GxR=None,
                     key_positions_GxS=None):
    """Returns softmax(q·keysᵀ/√K)·values over the keys that `mask` allows, (G, R, T, K).

    Each of the G rows of the cache belongs to one key–value head of one text, and R query heads attend to it.
    `slopes_GxR` are ALiBi slopes. `key_positions_GxS` are the positions of the keys; they are negative for empty slots.
    By default, slot s holds position s.
    """
    assert mask.segment_ids_BxT is None and mask.prefix_lengths_B is None, "decoding has one causal text per row"
    rows, per_group, time, head_width = q_GxRxTxK.shape
    q_GxQxK = q_GxRxTxK.reshape(rows, per_group * time, head_width) / math.sqrt(head_width)  # Q = R·T
    scores_GxQxS = jnp.einsum("gqk,gsk->gqs", q_GxQxK, keys_GxSxK, preferred_element_type=jnp.float32)
    if key_positions_GxS is None:
        key_positions_GxS = jnp.arange(keys_GxSxK.shape[1])[None]
    distances_GxTxS = positions_GxT[:, :, None] - key_positions_GxS[:, None]
    allowed_GxTxS = (distances_GxTxS >= 0) & (key_positions_GxS >= 0)[:, None]
    if mask.window:
        allowed_GxTxS &= distances_GxTxS < mask.window
    if slopes_GxR is not None:
        scores_GxQxS -= (slopes_GxR[:, :, None, None] * distances_GxTxS[:, None]).reshape(scores_GxQxS.shape)
    allowed_GxQxS = jnp.tile(allowed_GxTxS, (1, per_group, 1)) if per_group > 1 else allowed_GxTxS
    weights_GxQxS = jax.nn.softmax(jnp.where(allowed_GxQxS, scores_GxQxS, -1e30))
    y_GxQxK = jnp.einsum("gqs,gsk->gqk", weights_GxQxS.astype(values_GxSxK.dtype), values_GxSxK)
    return y_GxQxK.reshape(q_GxRxTxK.shape)
