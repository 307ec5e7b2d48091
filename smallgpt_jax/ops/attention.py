"""Attention with several backends, selected by `config.model.attention`:

- "xla": plain JAX (`xla_attention.chunked`), on every platform and for what the kernels do not
  support
- "flash": this project's Pallas kernel for TPUs (`flash_attention.py`)
- "splash": JAX's Pallas kernel for TPUs, which also supports separate documents, bidirectional
  attention and any context length
- "cudnn": NVIDIA's fused kernel

Head h attends to the keys of key–value head h // (H / G) (grouped-query attention, Ainslie et al.,
arXiv 2305.13245).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from smallgpt_jax.devices import sharding
from smallgpt_jax.devices.platform import platform
from smallgpt_jax.ops import flash_attention
from smallgpt_jax.ops.attention_mask import AttentionMask
from smallgpt_jax.ops.flash_attention import OUTPUT
from smallgpt_jax.ops.xla_attention import chunked, counted, reference

BACKENDS = ("auto", "xla", "flash", "splash", "cudnn")  # values of config.model.attention


class AttentionShape(NamedTuple):
    """What the kernels ask of an attention call beside its mask."""

    time: int
    head_width: int
    dtype: str
    per_group: int = 1  # query heads per key–value head


def select_backend(
    backend: str, platform: str, shape: AttentionShape, mask: AttentionMask, has_alibi: bool
) -> tuple[str, str]:
    """Returns the backend on a platform, and the reason for a fallback to "xla", or ""."""
    if backend == "auto":
        backend = {"tpu": "flash", "gpu": "cudnn"}.get(platform, "xla")
    if backend == "flash" and not _flash_supports(shape, mask):
        backend = "splash"  # slower, but for more masks, lengths and head widths
    reasons: dict[str, bool] = {}
    if backend in ("flash", "splash"):
        reasons = _reasons_against_pallas(backend, platform, shape, mask, has_alibi)
    elif backend == "cudnn":
        reasons = _reasons_against_cudnn(platform, shape, mask, has_alibi)
    reason = next((reason for reason, applies in reasons.items() if applies), "")
    return ("xla", reason) if reason else (backend, "")


def _flash_supports(shape: AttentionShape, mask: AttentionMask) -> bool:
    if mask.segment_ids_BxT is not None or not mask.is_causal:
        return False
    return flash_attention.fits(shape.per_group, shape.head_width, shape.time, shape.dtype)


# {why a kernel cannot compute an attention: whether it is so}
def _reasons_against_pallas(
    backend: str, platform: str, shape: AttentionShape, mask: AttentionMask, has_alibi: bool
) -> dict[str, bool]:
    lanes = splash_attention_kernel.NUM_LANES
    return {
        f"{backend} attention needs a multiple of 128 positions": shape.time % lanes > 0,
        f"{backend} attention is for TPUs only": platform == "gpu",  # on CPUs, it is interpreted
        f"{backend} attention does not support ALiBi": has_alibi,
        f"{backend} attention does not support prefixes": mask.prefix_BxT is not None,
    }


def _reasons_against_cudnn(
    platform: str, shape: AttentionShape, mask: AttentionMask, has_alibi: bool
) -> dict[str, bool]:
    has_wrong_width = shape.head_width % 8 > 0 or shape.head_width > 128
    has_two_sided_window = mask.window > 0 and not mask.is_causal
    lacks = "cuDNN's attention does not support"
    return {
        "cuDNN is for NVIDIA GPUs only": platform != "gpu",
        "cuDNN's attention needs bfloat16": shape.dtype != "bfloat16",
        "cuDNN's attention needs a head width that is a multiple of 8, up to 128": has_wrong_width,
        # with is_causal and a mask, tokens would attend to tokens of other texts
        f"{lacks} separate documents in a row": mask.segment_ids_BxT is not None,
        f"{lacks} prefixes": mask.prefix_BxT is not None,
        f"{lacks} bidirectional windows": has_two_sided_window,
        f"{lacks} ALiBi": has_alibi,  # only a bias that is a (time, time) array per head
    }


def attention(
    q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H=None, *, backend: str = "auto"
):
    """Returns softmax(q·kᵀ/√K)·v where `mask` allows it, (B, H, T, K) (Vaswani et al., arXiv
    1706.03762, equation 1). Scores and softmax are float32. ALiBi subtracts a head's slope times
    the distance in positions from its scores.
    """
    _, heads, time, head_width = q_BxHxTxK.shape
    if mask.window >= time:  # no limit; the kernels are faster without one
        mask = mask.replace(window=0)
    shape = AttentionShape(time, head_width, str(q_BxHxTxK.dtype), heads // k_BxGxTxK.shape[1])
    name, _ = select_backend(backend, platform(), shape, mask, has_alibi=slopes_H is not None)
    q_BxHxTxK /= math.sqrt(head_width)
    backends = {
        "xla": chunked,
        "reference": reference,
        "counted": counted,
        "flash": flash,
        "splash": splash,
        "cudnn": cudnn,
    }
    return backends[name](q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask, slopes_H)


# The backends get queries that are divided by √K.
def flash(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    assert slopes_H is None and mask == AttentionMask(mask.window), "see select_backend"
    batch, heads, time, head_width = q_BxHxTxK.shape
    groups = k_BxGxTxK.shape[1]
    interpret = platform() != "tpu"  # tests run the kernel on CPUs
    # The heads axis is split, so that queries are sharded like the keys that they share.
    q_BxHxKxT = jnp.swapaxes(q_BxHxTxK, 2, 3)
    q_BxGxRxKxT = q_BxHxKxT.reshape(batch, groups, heads // groups, head_width, time)
    k_BxGxKxT = jnp.swapaxes(k_BxGxTxK, 2, 3)
    v_BxGxKxT = jnp.swapaxes(v_BxGxTxK, 2, 3)
    query_axes = ("batch", "heads", "per_group", "head_width", "time")
    key_axes = ("batch", "heads", "head_width", "time")
    axes = (query_axes, key_axes, key_axes)

    def on_one_device(q_BxGxRxKxT, k_BxGxKxT, v_BxGxKxT):
        q_BxHxKxT = q_BxGxRxKxT.reshape(len(q_BxGxRxKxT), -1, head_width, time)
        y_BxHxKxT = flash_attention.flash_attention(
            q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, mask.window, interpret
        )
        return y_BxHxKxT.reshape(q_BxGxRxKxT.shape)

    y_BxGxRxKxT = sharding.per_device(on_one_device, axes)(q_BxGxRxKxT, k_BxGxKxT, v_BxGxKxT)
    return jnp.swapaxes(y_BxGxRxKxT.reshape(batch, heads, head_width, time), 2, 3)


def splash(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    assert slopes_H is None and mask.prefix_BxT is None, "see select_backend"
    batch, heads, time, head_width = q_BxHxTxK.shape
    groups = k_BxGxTxK.shape[1]
    interpret = platform() != "tpu"
    queries = q_BxHxTxK
    key_axes = ("batch", "heads", "time", "head_width")
    query_axes = key_axes
    if heads > groups:  # split the heads axis, so that queries are sharded like keys
        queries = q_BxHxTxK.reshape(batch, groups, heads // groups, time, head_width)
        query_axes = ("batch", "heads", "per_group", "time", "head_width")
    arguments = [queries, k_BxGxTxK, v_BxGxTxK]
    axes = [query_axes, key_axes, key_axes]
    if mask.segment_ids_BxT is not None:
        arguments.append(mask.segment_ids_BxT)
        axes.append(("batch", "time"))

    def on_one_device(queries, k_BxGxTxK, v_BxGxTxK, segment_ids_BxT=None):
        q_BxHxTxK = queries.reshape(len(queries), -1, time, head_width)
        kernel = splash_kernel(q_BxHxTxK.shape[1], time, head_width, mask, interpret)
        inputs = [q_BxHxTxK, k_BxGxTxK, v_BxGxTxK]
        if segment_ids_BxT is not None:
            inputs.append(splash_attention_kernel.SegmentIds(segment_ids_BxT, segment_ids_BxT))
        return jax.vmap(kernel)(*inputs).reshape(queries.shape)

    return sharding.per_device(on_one_device, tuple(axes))(*arguments).reshape(q_BxHxTxK.shape)


def splash_kernel(heads: int, time: int, head_width: int, mask: AttentionMask, interpret: bool):
    """Returns the splash kernel for (heads, time, head width) queries, for one text."""
    lanes = splash_attention_kernel.NUM_LANES
    layouts = splash_attention_kernel.QKVLayout
    # TPUs pad the last axis to a multiple of `lanes`. With narrow heads on the last axis, most
    # memory would be padding.
    layout = layouts.SEQ_MINOR if head_width < lanes else layouts.HEAD_DIM_MINOR
    block = math.gcd(time, 4 * lanes)
    return splash_attention_kernel.make_splash_mha_single_device(
        mask=splash_attention_mask.MultiHeadMask([_splash_mask(time, mask)] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
            q_layout=layout,
            k_layout=layout,
            v_layout=layout,
        ),
        residual_checkpoint_name=OUTPUT,
        interpret=interpret,
    )


def _splash_mask(time: int, mask: AttentionMask):
    if mask.window:
        reach = mask.window - 1  # positions on each side, without the query's own
        left_and_right = (reach, 0 if mask.is_causal else reach)
        return splash_attention_mask.LocalMask((time, time), left_and_right, 0)
    if mask.is_causal:
        return splash_attention_mask.CausalMask((time, time))
    return splash_attention_mask.FullMask((time, time))


def cudnn(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    is_supported = mask.segment_ids_BxT is None and mask.prefix_BxT is None and slopes_H is None
    assert is_supported, "see select_backend"
    batch, heads, time, head_width = q_BxHxTxK.shape
    groups = k_BxGxTxK.shape[1]
    window = {"local_window_size": (mask.window - 1, 0)} if mask.window else {}
    # cuDNN wants time before heads. The heads axis is split, so that queries are sharded like keys.
    q_BxGxRxTxK = q_BxHxTxK.reshape(batch, groups, heads // groups, time, head_width)
    q_BxTxGxRxK = jnp.moveaxis(q_BxGxRxTxK, 3, 1)
    k_BxTxGxK = jnp.swapaxes(k_BxGxTxK, 1, 2)
    v_BxTxGxK = jnp.swapaxes(v_BxGxTxK, 1, 2)
    query_axes = ("batch", "time", "heads", "per_group", "head_width")
    key_axes = ("batch", "time", "heads", "head_width")
    axes = (query_axes, key_axes, key_axes)

    def on_one_device(q_BxTxGxRxK, k_BxTxGxK, v_BxTxGxK):
        q_BxTxHxK = q_BxTxGxRxK.reshape(*q_BxTxGxRxK.shape[:2], -1, head_width)
        y_BxTxHxK = jax.nn.dot_product_attention(
            q_BxTxHxK,
            k_BxTxGxK,
            v_BxTxGxK,
            is_causal=mask.is_causal,
            implementation="cudnn",
            scale=1.0,  # the queries are scaled already
            **window,
        )
        return y_BxTxHxK.reshape(q_BxTxGxRxK.shape)

    y_BxTxGxRxK = sharding.per_device(on_one_device, axes)(q_BxTxGxRxK, k_BxTxGxK, v_BxTxGxK)
    return jnp.moveaxis(y_BxTxGxRxK, 1, 3).reshape(q_BxHxTxK.shape)
