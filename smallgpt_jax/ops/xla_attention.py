"""Attention in plain JAX. Arguments are as in `attention.attention`, with queries divided by √K."""

import jax
import jax.numpy as jnp

from smallgpt_jax.ops import bfloat16
from smallgpt_jax.ops.attention_mask import AttentionMask

QUERIES = 128  # queries per chunk


def reference(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """The oracle of tests and benchmarks: computes all scores at once, including masked ones.
    Values of any width.
    """
    time = q_BxHxTxK.shape[2]
    return _weighted_values(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask, slopes_H, 0, slice(0, time))


def counted(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """The products that count as attention's FLOPs, only traced, never run. The window reduces
    them, the causal mask does not, as in model FLOPs utilization (Chowdhery et al., arXiv
    2204.02311, appendix B).
    """
    time = q_BxHxTxK.shape[2]
    reach = mask.window if mask.is_causal else min(2 * mask.window - 1, time)
    keys = slice(0, reach if mask.window else time)
    return _weighted_values(
        q_BxHxTxK, k_BxGxTxK[:, :, keys], v_BxGxTxK[:, :, keys], AttentionMask(), None, 0, keys
    )


def chunked(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """Processes QUERIES queries at a time, without the keys that the mask excludes for all of
    them.
    """
    time, dtype, parts = q_BxHxTxK.shape[2], q_BxHxTxK.dtype, []
    q_BxHxTxK, k_BxGxTxK, v_BxGxTxK = map(bfloat16.sliceable, (q_BxHxTxK, k_BxGxTxK, v_BxGxTxK))
    for start in range(0, time, QUERIES):
        keys = mask.keys(start, min(start + QUERIES, time), time)
        q, k, v = (
            x.astype(dtype)
            for x in (
                q_BxHxTxK[:, :, start : start + QUERIES],
                k_BxGxTxK[:, :, keys],
                v_BxGxTxK[:, :, keys],
            )
        )
        parts.append(bfloat16.sliceable(_weighted_values(q, k, v, mask, slopes_H, start, keys)))
    return jnp.concatenate(parts, axis=2).astype(dtype)


def _weighted_values(
    q_BxHxTxK, k_BxGxSxK, v_BxGxSxK, mask: AttentionMask, slopes_H, start: int, keys: slice
):
    """Returns (B, H, T, K). Normalizing after the product with the values saves a pass over the (T,
    S) weights.
    """
    batch, heads, time, _ = q_BxHxTxK.shape
    groups = k_BxGxSxK.shape[1]
    per_group = heads // groups
    q_BxGxRxK = q_BxHxTxK.reshape(
        batch, groups, per_group * time, -1
    )  # R: queries per key–value head
    is_bfloat16 = bfloat16.applies(q_BxHxTxK.dtype)
    scores_BxGxRxS = (
        bfloat16.product(q_BxGxRxK, jnp.swapaxes(k_BxGxSxK, 2, 3))
        if is_bfloat16
        else jnp.einsum("bhtk,bhsk->bhts", q_BxGxRxK, k_BxGxSxK, preferred_element_type=jnp.float32)
    )
    if (
        slopes_H is not None
    ):  # each text is contiguous, so distances in the row equal distances in the text
        distances_TxS = jnp.abs(
            jnp.arange(start, start + time)[:, None] - jnp.arange(keys.start, keys.stop)[None]
        )
        biases_HxTxS = slopes_H[:, None, None] * distances_TxS[None]
        scores_BxGxRxS -= biases_HxTxS.reshape(groups, per_group * time, -1)[None]
    allowed_BxTxS = mask.allowed(start, time, keys)
    allowed_BxRxS = jnp.tile(allowed_BxTxS, (1, per_group, 1)) if per_group > 1 else allowed_BxTxS
    scores_BxGxRxS += jnp.where(allowed_BxRxS, 0.0, -1e30)[:, None]
    largest_BxGxRx1 = jax.lax.stop_gradient(jnp.max(scores_BxGxRxS, axis=-1, keepdims=True))
    weights_BxGxRxS = jnp.exp(scores_BxGxRxS - largest_BxGxRx1)
    y_BxGxRxK = (
        bfloat16.product(weights_BxGxRxS, v_BxGxSxK)
        if is_bfloat16
        else jnp.einsum(
            "bhts,bhsk->bhtk",
            weights_BxGxRxS.astype(v_BxGxSxK.dtype),
            v_BxGxSxK,
            preferred_element_type=jnp.float32,
        )
    )
    y_BxGxRxK = (y_BxGxRxK / jnp.sum(weights_BxGxRxS, axis=-1, keepdims=True)).astype(
        v_BxGxSxK.dtype
    )
    return y_BxGxRxK.reshape(batch, heads, time, -1)
