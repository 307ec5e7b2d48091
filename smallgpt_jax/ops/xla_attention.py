"""Attention in plain JAX. Arguments are as in `attention.attention`, with queries divided by √K."""

import jax
import jax.numpy as jnp

from smallgpt_jax.ops import bfloat16
from smallgpt_jax.ops.attention_mask import AttentionMask, Block

QUERIES_PER_CHUNK = 128  # queries per chunk


def reference(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """The oracle of tests and benchmarks: computes all scores at once, also masked ones."""
    row = slice(0, q_BxHxTxK.shape[2])
    return _weighted_values(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask, slopes_H, Block(row, row))


def counted(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """The products that count as attention's FLOPs, only traced, never run. The window reduces
    them, the causal mask does not, as in model FLOPs utilization (Chowdhery et al., arXiv
    2204.02311, appendix B).
    """
    time = q_BxHxTxK.shape[2]
    reach = time
    if mask.window:  # a bidirectional window has as many keys on the other side of the query
        reach = mask.window if mask.is_causal else min(2 * mask.window - 1, time)
    block = Block(slice(0, time), slice(0, reach))
    # Which keys does not matter, only how many.
    k_BxGxSxK = k_BxGxTxK[:, :, block.keys]
    v_BxGxSxK = v_BxGxTxK[:, :, block.keys]
    return _weighted_values(q_BxHxTxK, k_BxGxSxK, v_BxGxSxK, AttentionMask(), None, block)


def chunked(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """Processes QUERIES_PER_CHUNK queries at a time, with the keys that one of them sees."""
    time, dtype = q_BxHxTxK.shape[2], q_BxHxTxK.dtype
    # Slices may be taken of float32 arrays (see `sliceable`); the products are in `dtype` again.
    q_BxHxTxK, k_BxGxTxK, v_BxGxTxK = map(bfloat16.sliceable, (q_BxHxTxK, k_BxGxTxK, v_BxGxTxK))
    outputs = []
    for start in range(0, time, QUERIES_PER_CHUNK):
        end = min(start + QUERIES_PER_CHUNK, time)
        block = Block(slice(start, end), mask.keys(start, end, time))
        slices = (
            q_BxHxTxK[:, :, block.queries],
            k_BxGxTxK[:, :, block.keys],
            v_BxGxTxK[:, :, block.keys],
        )
        q, k, v = (x.astype(dtype) for x in slices)
        y_BxHxCxK = _weighted_values(q, k, v, mask, slopes_H, block)
        outputs.append(bfloat16.sliceable(y_BxHxCxK))
    return jnp.concatenate(outputs, axis=2).astype(dtype)


def _weighted_values(q_BxHxTxK, k_BxGxSxK, v_BxGxSxK, mask: AttentionMask, slopes_H, block: Block):
    """Returns (B, H, T, K), normalized last, which saves a pass over the (T, S) weights."""
    batch, heads, time, _ = q_BxHxTxK.shape
    groups = k_BxGxSxK.shape[1]
    per_group = heads // groups
    # R: the queries of all heads that share keys, in one matrix
    q_BxGxRxK = q_BxHxTxK.reshape(batch, groups, per_group * time, -1)
    scores_BxGxRxS = _scores(q_BxGxRxK, k_BxGxSxK)
    if slopes_H is not None:
        # Each text is contiguous, so distances in the row equal distances in the text.
        distances_TxS = jnp.abs(block.distances())
        biases_HxTxS = slopes_H[:, None, None] * distances_TxS[None]
        scores_BxGxRxS -= biases_HxTxS.reshape(groups, per_group * time, -1)[None]
    allowed_BxRxS = mask.allowed(block)
    if per_group > 1:
        allowed_BxRxS = jnp.tile(allowed_BxRxS, (1, per_group, 1))
    # A finite number: a row of −inf only would make the softmax NaN.
    scores_BxGxRxS += jnp.where(allowed_BxRxS, 0.0, -1e30)[:, None]
    largest_BxGxRx1 = jax.lax.stop_gradient(jnp.max(scores_BxGxRxS, axis=-1, keepdims=True))
    weights_BxGxRxS = jnp.exp(scores_BxGxRxS - largest_BxGxRx1)
    y_BxGxRxK = _sums(weights_BxGxRxS, v_BxGxSxK)
    y_BxGxRxK = y_BxGxRxK / jnp.sum(weights_BxGxRxS, axis=-1, keepdims=True)
    return y_BxGxRxK.astype(v_BxGxSxK.dtype).reshape(batch, heads, time, -1)


def _scores(q_BxGxRxK, k_BxGxSxK):
    """Returns q·kᵀ in float32."""
    if bfloat16.applies(q_BxGxRxK.dtype):
        return bfloat16.product(q_BxGxRxK, jnp.swapaxes(k_BxGxSxK, 2, 3))
    return jnp.einsum("bhtk,bhsk->bhts", q_BxGxRxK, k_BxGxSxK, preferred_element_type=jnp.float32)


def _sums(weights_BxGxRxS, v_BxGxSxK):
    """Returns weights·v in float32."""
    if bfloat16.applies(v_BxGxSxK.dtype):
        return bfloat16.product(weights_BxGxRxS, v_BxGxSxK)
    return jnp.einsum(
        "bhts,bhsk->bhtk",
        weights_BxGxRxS.astype(v_BxGxSxK.dtype),
        v_BxGxSxK,
        preferred_element_type=jnp.float32,
    )
