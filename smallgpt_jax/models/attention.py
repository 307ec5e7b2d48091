"""Self-attention and its key–value cache.

Shapes: B batch, T time, D model width, H heads, G key–value heads, K head width, S cache length.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context, cache_variable
from smallgpt_jax.models.initializers import INIT_STD, deepnorm_gain, residual_std, zeros
from smallgpt_jax.models.layers import Dense, project, rms_norm
from smallgpt_jax.models.positions import alibi_slopes, apply_rope
from smallgpt_jax.ops import bfloat16
from smallgpt_jax.ops.attention import attention
from smallgpt_jax.ops.attention_mask import AttentionMask
from smallgpt_jax.ops.key_value_cache import (
    CachedKeys,
    cached_attention,
    rolling_positions,
    update_cache,
    update_rolling_cache,
)
from smallgpt_jax.ops.matmul import merging_heads_is_faster, one_product_is_faster
from smallgpt_jax.ops.xla_attention import QUERIES_PER_CHUNK


class QKVProjection(Dense):
    """Projects to queries (B, H, T, K), keys and values (B, G, T, K), with a kernel (D, G, J, K).

    Each group has J = H/G + 2 heads: those of queries, one of keys, one of values. A mesh can
    shard G.
    """

    value_gain: float = 1.0

    def kernel_init(self, std: float, axes: tuple[str, ...]):
        initializer = super().kernel_init(std, axes)
        if self.value_gain == 1:
            return initializer

        def scale_values(kernel_DxGxJxK):
            return kernel_DxGxJxK.at[:, :, -1].multiply(self.value_gain)

        # An initializer returns a box of flax around the array.
        return lambda *arguments: jax.tree.map(scale_values, initializer(*arguments))

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        if one_product_is_faster(context.decode):
            y_BxTxGxJxK = bfloat16.sliceable(super().__call__(x_BxTxD, context))
            return tuple(heads.astype(self.dtype) for heads in _split_heads(y_BxTxGxJxK))
        # I is D, or the rank of two factors.
        *first_factor, kernel_IxGxJxK = self.kernels(x_BxTxD.shape[2:])
        x_BxTxI = x_BxTxD.astype(self.dtype)
        for factor_DxI in first_factor:
            x_BxTxI = project(x_BxTxI, factor_DxI, context)
        if self.use_bias:
            bias_GxJxK = self.param("bias", zeros(*self.axes[1:]), self.features).astype(self.dtype)
        queries_keys_values = []
        # Of the J columns of a group, all but the last two are queries, then one key, one value.
        for part in (slice(-2), slice(-2, -1), slice(-1, None)):
            kernel_IxHxK = _merge_axes(kernel_IxGxJxK[:, :, part], 1)
            y_BxHxTxK = jnp.einsum("bti,ihk->bhtk", x_BxTxI, kernel_IxHxK)
            if self.use_bias:
                y_BxHxTxK += _merge_axes(bias_GxJxK[:, part], 0)[None, :, None]
            queries_keys_values.append(y_BxHxTxK)
        return tuple(queries_keys_values)


def _merge_axes(x, axis: int):
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _split_heads(y_BxTxGxJxK):
    """Returns queries, (B, H, T, K), keys and values, (B, G, T, K)."""
    batch, time, groups, heads_per_group, head_width = y_BxTxGxJxK.shape
    if heads_per_group == 3:  # one of each: a single transposition
        return tuple(jnp.moveaxis(y_BxTxGxJxK, (3, 2), (0, 2)))
    q_BxTxGxRxK = y_BxTxGxJxK[:, :, :, :-2]
    k_BxTxGxK, v_BxTxGxK = y_BxTxGxJxK[:, :, :, -2], y_BxTxGxJxK[:, :, :, -1]
    q_BxTxHxK = q_BxTxGxRxK.reshape(batch, time, groups * (heads_per_group - 2), head_width)
    return tuple(jnp.swapaxes(x, 1, 2) for x in (q_BxTxHxK, k_BxTxGxK, v_BxTxGxK))


class OutputProjection(Dense):
    """Projects the heads' outputs to the model width; the kernel is (H, K, D)."""

    @nn.compact
    def __call__(self, x_BxHxTxK, context: Context):
        if merging_heads_is_faster(context.decode, self.dtype):
            return super().__call__(jnp.swapaxes(x_BxHxTxK, 1, 2), context)
        _, heads, _, head_width = x_BxHxTxK.shape
        # O is D, or the rank of two factors.
        kernel_HxKxO, *second_factor = self.kernels((heads, head_width))
        y_BxTxO = jnp.einsum("bhtk,hko->bto", x_BxHxTxK.astype(self.dtype), kernel_HxKxO)
        for factor_OxD in second_factor:
            y_BxTxO = project(y_BxTxO, factor_OxD, context)
        return self.with_bias(y_BxTxO)


class Attention(nn.Module):
    """(Grouped-query) self-attention. Its cache has 2·B·S·G·K elements; S is at most the window."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        q_BxHxTxK, k_BxGxTxK, v_BxGxTxK = self.heads(x_BxTxD, context)
        y_BxHxTxK = self.attend(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, context)
        return self.output(y_BxHxTxK, context)

    def heads(self, x_BxTxD, context: Context):
        """Returns queries, keys and values, without positions."""
        c = self.config
        features = (c.kv_heads, c.num_heads // c.kv_heads + 2, c.head_width)
        axes, options = ("embed", "heads", "qkv", "head_width"), (c.use_bias, c.dtype, c.rank_ratio)
        project_heads = QKVProjection(
            features, axes, INIT_STD, *options, value_gain=deepnorm_gain(c), name="qkv"
        )
        q_BxHxTxK, k_BxGxTxK, v_BxGxTxK = project_heads(x_BxTxD, context)
        if c.qk_norm:
            q_BxHxTxK = rms_norm(c, "q_norm")(q_BxHxTxK)
            k_BxGxTxK = rms_norm(c, "k_norm")(k_BxGxTxK)
        return q_BxHxTxK, k_BxGxTxK, v_BxGxTxK

    def attend(self, q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, context: Context):
        """Returns the weighted sums of the values, (B, H, T, K)."""
        c = self.config
        if c.position == "rope":
            positions_BxT = context.positions(q_BxHxTxK.shape[2])
            q_BxHxTxK = apply_rope(q_BxHxTxK, positions_BxT, c.rope_base)
            k_BxGxTxK = apply_rope(k_BxGxTxK, positions_BxT, c.rope_base)
        slopes_H = alibi_slopes(c.num_heads) if c.position == "alibi" else None
        # A prefix is an exception from a causal mask.
        mask = AttentionMask(
            c.window,
            context.segment_ids_BxT,
            context.prefix_BxT,
            is_causal=c.attention_mask != "bidirectional",
        )
        if context.decode:
            return self.attend_with_cache(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask, slopes_H, context)
        return attention(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask, slopes_H, backend=c.attention)

    def output(self, y_BxHxTxK, context: Context):
        c = self.config
        axes, options = ("heads", "head_width", "embed"), (c.use_bias, c.dtype, c.rank_ratio)
        project_out = OutputProjection((c.d_model,), axes, residual_std(c), *options, name="out")
        return project_out(y_BxHxTxK, context)

    def attend_with_cache(self, q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask, slopes_H, context: Context):
        """Appends the new keys and values to the cache. Returns the attention, (B, H, T, K)."""
        # The padding of shorter rows is stored too, and overwritten before it is read; a rolling
        # cache drops it.
        batch, groups, time, head_width = k_BxGxTxK.shape
        heads = q_BxHxTxK.shape[1]
        # Keys outside the window are never read again: new ones take their slots.
        slots = min(context.cache_length, mask.window or context.cache_length)
        is_rolling = slots < context.cache_length
        shape = (batch * groups, slots, head_width)
        keys, is_new = cache_variable(self, "keys", shape, k_BxGxTxK.dtype)
        values, _ = cache_variable(self, "values", shape, v_BxGxTxK.dtype)
        # From here on, G is batch × groups, and R the queries per key–value head. With two axes,
        # XLA's CPU compiler would copy the whole cache for every token.
        q = q_BxHxTxK.reshape(batch * groups, heads // groups, time, head_width)
        k = k_BxGxTxK.reshape(batch * groups, time, head_width)
        v = v_BxGxTxK.reshape(batch * groups, time, head_width)
        slopes = None if slopes_H is None else np.tile(slopes_H, batch).reshape(batch * groups, -1)
        starts, counts, positions = (
            jnp.repeat(x, groups, axis=0)
            for x in (context.start_B, context.length_B, context.positions(time))
        )

        def write(cache, x):
            if is_rolling:
                return update_rolling_cache(cache.value, x, starts, counts)
            return update_cache(cache.value, x, starts)

        if is_new:  # these are the first tokens
            if mask.prefix_BxT is None:
                y = _attend_in_chunks(q, CachedKeys(k, v), mask, slopes)
            else:  # tokens of a prefix see later ones, which `cached_attention` does not support
                y = attention(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask, slopes_H, backend="xla")
            if is_rolling:
                keys.value, values.value = write(keys, k), write(values, v)
            else:
                room = ((0, 0), (0, slots - time), (0, 0))
                keys.value, values.value = jnp.pad(k, room), jnp.pad(v, room)
        elif is_rolling and time > 1:
            # Writing to the cache overwrites the oldest positions. Attention is computed first,
            # because the first new tokens attend to these positions.
            key_positions = jnp.concatenate([rolling_positions(starts, slots), positions], axis=1)
            old_and_new = CachedKeys(
                jnp.concatenate([keys.value, k], axis=1),
                jnp.concatenate([values.value, v], axis=1),
                key_positions,
            )
            y = cached_attention(q, old_and_new, positions, mask, slopes)
            keys.value, values.value = write(keys, k), write(values, v)
        else:
            keys.value, values.value = write(keys, k), write(values, v)
            # A rolling cache has just got one token per row; several are the case above.
            key_positions = rolling_positions(starts + 1, slots) if is_rolling else None
            cache = CachedKeys(keys.value, values.value, key_positions)
            y = cached_attention(q, cache, positions, mask, slopes)
        return y.reshape(batch, heads, time, head_width)


def _attend_in_chunks(q_GxRxTxK, prompt: CachedKeys, mask: AttentionMask, slopes_GxR):
    """Returns the attention of a prompt to itself, (G, R, T, K), in chunks of queries."""
    time = q_GxRxTxK.shape[2]
    outputs = []
    for start in range(0, time, QUERIES_PER_CHUNK):
        end = min(start + QUERIES_PER_CHUNK, time)
        seen = mask.keys(start, end, time)  # by any of these queries
        positions_1xS = jnp.arange(seen.start, seen.stop)[None]
        keys_and_values = prompt.keys_GxSxK[:, seen], prompt.values_GxSxK[:, seen]
        keys = CachedKeys(*keys_and_values, positions_1xS)
        queries_1xC = jnp.arange(start, end)[None]
        q_GxRxCxK = q_GxRxTxK[:, :, start:end]
        outputs.append(cached_attention(q_GxRxCxK, keys, queries_1xC, mask, slopes_GxR))
    return jnp.concatenate(outputs, axis=2)
