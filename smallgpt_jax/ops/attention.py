"""Attention with several backends, and cached attention for decoding.

Backends, selected by `config.model.attention`:

- "xla" (`chunked`): plain JAX. It runs on every platform.
- "flash": this project's Pallas kernel for TPUs (`flash_attention.py`).
- "splash": JAX's Pallas kernel for TPUs, which also supports separate documents and any context length.
- "cudnn": NVIDIA's fused kernel.
- "auto": the backend depends on the platform for which the program is compiled.

The kernels do not materialize the (time, time) scores.

In the cases that a kernel does not support, `chunked` replaces it; see `select_backend`.

Heads may share keys and values (grouped-query attention, Ainslie et al., arXiv 2305.13245): with H heads and G
key–value heads, head h attends to the keys of key–value head h // (H / G).
"""

import math

import flax
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from smallgpt_jax.devices import sharding
from smallgpt_jax.devices.platform import platform
from smallgpt_jax.ops import bfloat16, flash_attention
from smallgpt_jax.ops.flash_attention import OUTPUT

BACKENDS = ("auto", "xla", "flash", "splash", "cudnn")  # values of config.model.attention
QUERIES = 128  # queries per chunk


@flax.struct.dataclass
class AttentionMask:
    """A causal attention mask. Its fields add a window, the borders between texts, or a bidirectional prefix.

    `select_backend` falls back to "xla" if a backend does not support a field.
    """

    # The length of the attention window in positions, including the query's own position; 0: unlimited.
    window: int = flax.struct.field(pytree_node=False, default=0)
    segment_ids_BxT: jax.Array | None = None  # positions with equal ids belong to one text; None: a row is one text
    prefix_lengths_B: jax.Array | None = None  # length of each row's bidirectional prefix (prefix LM)

    def allowed(self, start: int, time: int, keys: slice):
        """Returns the mask for `time` queries, whose first position is `start`, and the keys at positions `keys`.

        The mask is a (B or 1, time, number of keys) bool array. It is True where a query attends to a key.
        """
        queries_Tx1 = jnp.arange(start, start + time)[:, None]
        keys_1xS = jnp.arange(keys.start, keys.stop)[None]
        allowed_BxTxS = (keys_1xS <= queries_Tx1)[None]
        if self.window:
            allowed_BxTxS &= (keys_1xS > queries_Tx1 - self.window)[None]
        if self.prefix_lengths_B is not None:
            prefix_Bx1x1 = self.prefix_lengths_B[:, None, None]
            allowed_BxTxS |= (keys_1xS[None] < prefix_Bx1x1) & (queries_Tx1[None] < prefix_Bx1x1)
        if self.segment_ids_BxT is not None:
            ids_BxT = self.segment_ids_BxT
            allowed_BxTxS &= ids_BxT[:, start:start + time, None] == ids_BxT[:, None, keys]
        return allowed_BxTxS


def select_backend(backend: str, platform: str, *, time: int, head_width: int, dtype: str, mask: AttentionMask,
                   has_alibi: bool = False, per_group: int = 1) -> tuple[str, str]:
    """Returns the backend to use on a platform, and the reason for a fallback to "xla".

    The reason is "" if there is no fallback. `platform` is "tpu", "gpu" or "cpu". `per_group` is the number of heads
    per key–value head. "splash" replaces "flash", without a reason, in the cases that only "splash" supports.
    """
    if backend == "auto":
        backend = {"tpu": "flash", "gpu": "cudnn"}.get(platform, "xla")
    if backend == "flash" and (mask.segment_ids_BxT is not None
                               or not flash_attention.fits(per_group, head_width, time, dtype)):
        backend = "splash"
    if backend in ("flash", "splash"):
        if time % splash_attention_kernel.NUM_LANES:
            return "xla", f"{backend} attention needs a multiple of 128 positions"
        if platform == "gpu":
            return "xla", f"{backend} attention is for TPUs only"
        if has_alibi:
            return "xla", f"{backend} attention does not support ALiBi"
        if mask.prefix_lengths_B is not None:
            return "xla", f"{backend} attention does not support prefixes"
    if backend == "cudnn":
        if platform != "gpu":
            return "xla", "cuDNN is for NVIDIA GPUs only"
        if dtype != "bfloat16":
            return "xla", "cuDNN's attention needs bfloat16"
        if head_width % 8 or head_width > 128:
            return "xla", "cuDNN's attention needs a head width that is a multiple of 8, up to 128"
        # If both is_causal and a mask are passed to cuDNN's attention, tokens attend to tokens of other texts.
        if mask.segment_ids_BxT is not None:
            return "xla", "cuDNN's attention does not support separate documents in a row"
        if mask.prefix_lengths_B is not None:
            return "xla", "cuDNN's attention does not support prefixes"
        if has_alibi:  # cuDNN accepts a bias only as a (time, time) array per head
            return "xla", "cuDNN's attention does not support ALiBi"
    return backend, ""


def attention(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H=None, *, backend: str = "auto"):
    """Returns softmax(q·kᵀ/√K)·v over the positions that `mask` allows, (B, H, T, K).

    See Vaswani et al., arXiv 1706.03762, equation 1. Scores and softmax are float32. `slopes_H` are ALiBi slopes: each
    head's slope times the distance between query and key is subtracted from the head's scores.
    """
    _, heads, time, head_width = q_BxHxTxK.shape
    if mask.window >= time:
        mask = mask.replace(window=0)
    name, _ = select_backend(backend, platform(), time=time, head_width=head_width, dtype=str(q_BxHxTxK.dtype),
                             mask=mask, has_alibi=slopes_H is not None, per_group=heads // k_BxGxTxK.shape[1])
    q_BxHxTxK /= math.sqrt(head_width)
    backends = {"xla": chunked, "reference": reference, "counted": counted, "flash": flash, "splash": splash,
                "cudnn": cudnn}
    return backends[name](q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask, slopes_H)


def reference(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """Returns the attention output. All scores, including masked ones, are computed at once.

    Tests and benchmarks compare the other backends with this one.
    """
    time = q_BxHxTxK.shape[2]
    return _weighted_values(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask, slopes_H, 0, slice(0, time))


def counted(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """Computes the matrix products that count as attention's FLOPs. The function is only traced, never run.

    Each query is multiplied with `mask.window` keys, or with all T keys if there is no window. The causal mask does not
    reduce the count. This is the convention of model FLOPs utilization (Chowdhery et al., arXiv 2204.02311,
    appendix B). The values of the result have no meaning.
    """
    keys = slice(0, mask.window or q_BxHxTxK.shape[2])
    return _weighted_values(q_BxHxTxK, k_BxGxTxK[:, :, keys], v_BxGxTxK[:, :, keys], AttentionMask(), None, 0, keys)


def chunked(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """Returns the attention output. The queries are processed in chunks of QUERIES.

    Each chunk of queries skips the keys after the chunk and the keys before the chunk's attention window.
    """
    time, dtype, parts = q_BxHxTxK.shape[2], q_BxHxTxK.dtype, []
    q_BxHxTxK, k_BxGxTxK, v_BxGxTxK = map(bfloat16.sliceable, (q_BxHxTxK, k_BxGxTxK, v_BxGxTxK))
    for start in range(0, time, QUERIES):
        keys = slice(max(0, start - mask.window + 1) if mask.window else 0, min(start + QUERIES, time))
        if mask.prefix_lengths_B is not None:
            keys = slice(0, time)
        q, k, v = (x.astype(dtype) for x in (
            q_BxHxTxK[:, :, start:start + QUERIES], k_BxGxTxK[:, :, keys], v_BxGxTxK[:, :, keys]))
        parts.append(bfloat16.sliceable(_weighted_values(q, k, v, mask, slopes_H, start, keys)))
    return jnp.concatenate(parts, axis=2).astype(dtype)


def _weighted_values(q_BxHxTxK, k_BxGxSxK, v_BxGxSxK, mask: AttentionMask, slopes_H, start: int, keys: slice):
    """Returns the attention output of T queries for the S keys at positions `keys`, (B, H, T, K).

    `start` is the position of the first query. The weights are normalized after the product with the values. This
    saves a pass over the (T, S) weights in both the forward and the backward pass.
    """
    batch, heads, time, head_width = q_BxHxTxK.shape
    groups = k_BxGxSxK.shape[1]
    per_group = heads // groups
    q_BxGxRxK = q_BxHxTxK.reshape(batch, groups, per_group * time, head_width)  # R: queries per key–value head
    is_bfloat16 = bfloat16.applies(q_BxHxTxK.dtype)
    scores_BxGxRxS = bfloat16.product(q_BxGxRxK, jnp.swapaxes(k_BxGxSxK, 2, 3)) if is_bfloat16 else jnp.einsum(
        "bhtk,bhsk->bhts", q_BxGxRxK, k_BxGxSxK, preferred_element_type=jnp.float32)
    if slopes_H is not None:  # each text is contiguous, so distances in the row equal distances in the text
        distances_TxS = jnp.abs(jnp.arange(start, start + time)[:, None] - jnp.arange(keys.start, keys.stop)[None])
        biases_HxTxS = slopes_H[:, None, None] * distances_TxS[None]
        scores_BxGxRxS -= biases_HxTxS.reshape(groups, per_group * time, -1)[None]
    allowed_BxTxS = mask.allowed(start, time, keys)
    allowed_BxRxS = jnp.tile(allowed_BxTxS, (1, per_group, 1)) if per_group > 1 else allowed_BxTxS
    scores_BxGxRxS += jnp.where(allowed_BxRxS, 0.0, -1e30)[:, None]
    largest_BxGxRx1 = jax.lax.stop_gradient(jnp.max(scores_BxGxRxS, axis=-1, keepdims=True))
    weights_BxGxRxS = jnp.exp(scores_BxGxRxS - largest_BxGxRx1)
    y_BxGxRxK = bfloat16.product(weights_BxGxRxS, v_BxGxSxK) if is_bfloat16 else jnp.einsum(
        "bhts,bhsk->bhtk", weights_BxGxRxS.astype(v_BxGxSxK.dtype), v_BxGxSxK, preferred_element_type=jnp.float32)
    y_BxGxRxK = (y_BxGxRxK / jnp.sum(weights_BxGxRxS, axis=-1, keepdims=True)).astype(v_BxGxSxK.dtype)
    return y_BxGxRxK.reshape(batch, heads, time, head_width)


def flash(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """Runs the flash attention kernel on each device's shard of rows and heads.

    If the platform is not a TPU, the kernel runs in the slow interpret mode.
    """
    assert slopes_H is None and mask == AttentionMask(mask.window), "see select_backend"
    batch, heads, time, head_width = q_BxHxTxK.shape
    groups, interpret = k_BxGxTxK.shape[1], platform() != "tpu"
    q_BxGxRxKxT = jnp.swapaxes(q_BxHxTxK, 2, 3).reshape(batch, groups, heads // groups, head_width, time)
    keys_and_values = (jnp.swapaxes(x, 2, 3) for x in (k_BxGxTxK, v_BxGxTxK))
    names = (("batch", "heads", "per_group", "head_width", "time"), *(("batch", "heads", "head_width", "time"),) * 2)

    def on_one_device(q_BxGxRxKxT, k_BxGxKxT, v_BxGxKxT):
        q_BxHxKxT = q_BxGxRxKxT.reshape(len(q_BxGxRxKxT), -1, head_width, time)
        y_BxHxKxT = flash_attention.flash_attention(q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, mask.window, interpret)
        return y_BxHxKxT.reshape(q_BxGxRxKxT.shape)

    y_BxGxRxKxT = sharding.per_device(on_one_device, names)(q_BxGxRxKxT, *keys_and_values)
    return jnp.swapaxes(y_BxGxRxKxT.reshape(batch, heads, head_width, time), 2, 3)


def splash(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """Runs the splash kernel on each device's shard of rows and heads.

    If the platform is not a TPU, the kernel runs in the slow interpret mode.
    """
    assert slopes_H is None and mask.prefix_lengths_B is None, "see select_backend"
    batch, heads, time, head_width = q_BxHxTxK.shape
    groups = k_BxGxTxK.shape[1]
    interpret = platform() != "tpu"
    queries, names = q_BxHxTxK, [("batch", "heads", "time", "head_width")] * 3
    if heads > groups:  # split the heads axis, so that queries are sharded like keys
        queries = q_BxHxTxK.reshape(batch, groups, heads // groups, time, head_width)
        names[0] = ("batch", "heads", "per_group", "time", "head_width")
    arguments = (queries, k_BxGxTxK, v_BxGxTxK)
    if mask.segment_ids_BxT is not None:
        arguments, names = (*arguments, mask.segment_ids_BxT), [*names, ("batch", "time")]

    def on_one_device(queries, k_BxGxTxK, v_BxGxTxK, segment_ids_BxT=None):
        segments = () if segment_ids_BxT is None else (
            splash_attention_kernel.SegmentIds(segment_ids_BxT, segment_ids_BxT),)
        q_BxHxTxK = queries.reshape(len(queries), -1, time, head_width)
        kernel = splash_kernel(q_BxHxTxK.shape[1], time, head_width, mask.window, interpret)
        return jax.vmap(kernel)(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, *segments).reshape(queries.shape)

    return sharding.per_device(on_one_device, tuple(names))(*arguments).reshape(q_BxHxTxK.shape)


def splash_kernel(heads: int, time: int, head_width: int, window: int, interpret: bool):
    """Returns the splash kernel for (heads, time, head width) queries. The kernel never materializes the mask.

    Keys and values may have fewer heads than the queries.
    """
    lanes = splash_attention_kernel.NUM_LANES
    layouts = splash_attention_kernel.QKVLayout
    # TPUs pad the last axis to a multiple of `lanes`. With narrow heads on the last axis, most memory would be padding.
    layout = layouts.SEQ_MINOR if head_width < lanes else layouts.HEAD_DIM_MINOR
    block = math.gcd(time, 4 * lanes)
    mask = (splash_attention_mask.LocalMask((time, time), (window - 1, 0), 0) if window else
            splash_attention_mask.CausalMask((time, time)))
    return splash_attention_kernel.make_splash_mha_single_device(
        mask=splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
            block_q_dq=block, block_kv_dq=block,
            q_layout=layout, k_layout=layout, v_layout=layout),
        residual_checkpoint_name=OUTPUT, interpret=interpret)


def cudnn(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    """Runs cuDNN's attention kernel on each device's shard of rows and heads."""
    assert mask.segment_ids_BxT is None and mask.prefix_lengths_B is None and slopes_H is None, "see select_backend"
    batch, heads, time, head_width = q_BxHxTxK.shape
    groups = k_BxGxTxK.shape[1]
    window = {"local_window_size": (mask.window - 1, 0)} if mask.window else {}
    q_BxTxGxRxK = jnp.moveaxis(q_BxHxTxK.reshape(batch, groups, heads // groups, time, head_width), 3, 1)
    k_BxTxGxK, v_BxTxGxK = (jnp.swapaxes(x, 1, 2) for x in (k_BxGxTxK, v_BxGxTxK))
    names = (("batch", "time", "heads", "per_group", "head_width"), *(("batch", "time", "heads", "head_width"),) * 2)

    def on_one_device(q_BxTxGxRxK, k_BxTxGxK, v_BxTxGxK):
        q_BxTxHxK = q_BxTxGxRxK.reshape(*q_BxTxGxRxK.shape[:2], -1, head_width)
        y_BxTxHxK = jax.nn.dot_product_attention(
            q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, is_causal=True, implementation="cudnn", scale=1.0, **window)
        return y_BxTxHxK.reshape(q_BxTxGxRxK.shape)

    y_BxTxGxRxK = sharding.per_device(on_one_device, names)(q_BxTxGxRxK, k_BxTxGxK, v_BxTxGxK)
    return jnp.moveaxis(y_BxTxGxRxK, 1, 3).reshape(q_BxHxTxK.shape)


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
    # The scores of a single query are a matrix–vector product. XLA's CPU compiler recognizes it only if the arrays have
    # no query axis.
    t = "" if per_group * time == 1 else "t"
    q_GxQxK = q_GxRxTxK.reshape(rows, per_group * time, head_width)
    q = (q_GxQxK if t else q_GxQxK[:, 0]) / math.sqrt(head_width)
    scores = jnp.einsum(f"h{t}k,hsk->h{t}s", q, keys_GxSxK, preferred_element_type=jnp.float32)
    if key_positions_GxS is None:
        key_positions_GxS = jnp.arange(keys_GxSxK.shape[1])[None]
    distances_GxTxS = positions_GxT[:, :, None] - key_positions_GxS[:, None]
    allowed_GxTxS = (distances_GxTxS >= 0) & (key_positions_GxS >= 0)[:, None]
    if mask.window:
        allowed_GxTxS &= distances_GxTxS < mask.window
    if slopes_GxR is not None:
        scores -= (slopes_GxR[:, :, None, None] * distances_GxTxS[:, None]).reshape(scores.shape)
    if per_group > 1:
        allowed_GxTxS = jnp.tile(allowed_GxTxS, (1, per_group, 1))
    weights = jax.nn.softmax(jnp.where(allowed_GxTxS.reshape(-1, *scores.shape[1:]), scores, -1e30))
    y = jnp.einsum(f"h{t}s,hsk->h{t}k", weights.astype(values_GxSxK.dtype), values_GxSxK)
    return y.reshape(q_GxRxTxK.shape)
