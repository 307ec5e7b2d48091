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


def select_backend(
    backend: str,
    platform: str,
    *,
    time: int,
    head_width: int,
    dtype: str,
    mask: AttentionMask,
    has_alibi: bool = False,
    per_group: int = 1,
) -> tuple[str, str]:
    """Returns the backend for "tpu", "gpu" or "cpu", and the reason for a fallback to "xla", or
    "".
    """
    if backend == "auto":
        backend = {"tpu": "flash", "gpu": "cudnn"}.get(platform, "xla")
    if backend == "flash" and (
        mask.segment_ids_BxT is not None
        or not mask.is_causal
        or not flash_attention.fits(per_group, head_width, time, dtype)
    ):
        backend = "splash"
    if backend in ("flash", "splash"):
        if time % splash_attention_kernel.NUM_LANES:
            return "xla", f"{backend} attention needs a multiple of 128 positions"
        if platform == "gpu":
            return "xla", f"{backend} attention is for TPUs only"
        if has_alibi:
            return "xla", f"{backend} attention does not support ALiBi"
        if mask.prefix_BxT is not None:
            return "xla", f"{backend} attention does not support prefixes"
    if backend == "cudnn":
        if platform != "gpu":
            return "xla", "cuDNN is for NVIDIA GPUs only"
        if dtype != "bfloat16":
            return "xla", "cuDNN's attention needs bfloat16"
        if head_width % 8 or head_width > 128:
            return "xla", "cuDNN's attention needs a head width that is a multiple of 8, up to 128"
        # If both is_causal and a mask are passed to cuDNN's attention, tokens attend to tokens of
        # other texts.
        if mask.segment_ids_BxT is not None:
            return "xla", "cuDNN's attention does not support separate documents in a row"
        if mask.prefix_BxT is not None:
            return "xla", "cuDNN's attention does not support prefixes"
        if mask.window and not mask.is_causal:
            return "xla", "cuDNN's attention does not support bidirectional windows"
        if has_alibi:  # cuDNN accepts a bias only as a (time, time) array per head
            return "xla", "cuDNN's attention does not support ALiBi"
    return backend, ""


def attention(
    q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H=None, *, backend: str = "auto"
):
    """Returns softmax(q·kᵀ/√K)·v where `mask` allows it, (B, H, T, K) (Vaswani et al., arXiv
    1706.03762, equation 1). Scores and softmax are float32. ALiBi subtracts a head's slope times
    the distance in positions from its scores.
    """
    _, heads, time, head_width = q_BxHxTxK.shape
    if mask.window >= time:
        mask = mask.replace(window=0)
    name, _ = select_backend(
        backend,
        platform(),
        time=time,
        head_width=head_width,
        dtype=str(q_BxHxTxK.dtype),
        mask=mask,
        has_alibi=slopes_H is not None,
        per_group=heads // k_BxGxTxK.shape[1],
    )
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


def flash(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    assert slopes_H is None and mask == AttentionMask(mask.window), "see select_backend"
    batch, heads, time, head_width = q_BxHxTxK.shape
    groups, interpret = k_BxGxTxK.shape[1], platform() != "tpu"
    q_BxGxRxKxT = jnp.swapaxes(q_BxHxTxK, 2, 3).reshape(
        batch, groups, heads // groups, head_width, time
    )
    keys_and_values = (jnp.swapaxes(x, 2, 3) for x in (k_BxGxTxK, v_BxGxTxK))
    names = (
        ("batch", "heads", "per_group", "head_width", "time"),
        *(("batch", "heads", "head_width", "time"),) * 2,
    )

    def on_one_device(q_BxGxRxKxT, k_BxGxKxT, v_BxGxKxT):
        q_BxHxKxT = q_BxGxRxKxT.reshape(len(q_BxGxRxKxT), -1, head_width, time)
        y_BxHxKxT = flash_attention.flash_attention(
            q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, mask.window, interpret
        )
        return y_BxHxKxT.reshape(q_BxGxRxKxT.shape)

    y_BxGxRxKxT = sharding.per_device(on_one_device, names)(q_BxGxRxKxT, *keys_and_values)
    return jnp.swapaxes(y_BxGxRxKxT.reshape(batch, heads, head_width, time), 2, 3)


def splash(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    assert slopes_H is None and mask.prefix_BxT is None, "see select_backend"
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
        segments = (
            ()
            if segment_ids_BxT is None
            else (splash_attention_kernel.SegmentIds(segment_ids_BxT, segment_ids_BxT),)
        )
        q_BxHxTxK = queries.reshape(len(queries), -1, time, head_width)
        kernel = splash_kernel(q_BxHxTxK.shape[1], time, head_width, mask, interpret)
        return jax.vmap(kernel)(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, *segments).reshape(queries.shape)

    return sharding.per_device(on_one_device, tuple(names))(*arguments).reshape(q_BxHxTxK.shape)


def splash_kernel(heads: int, time: int, head_width: int, mask: AttentionMask, interpret: bool):
    """Returns the splash kernel for (heads, time, head width) queries, without the documents of
    `mask`. The kernel never materializes the mask.
    """
    lanes = splash_attention_kernel.NUM_LANES
    layouts = splash_attention_kernel.QKVLayout
    # TPUs pad the last axis to a multiple of `lanes`. With narrow heads on the last axis, most
    # memory would be padding.
    layout = layouts.SEQ_MINOR if head_width < lanes else layouts.HEAD_DIM_MINOR
    block = math.gcd(time, 4 * lanes)
    if mask.window:
        reach = mask.window - 1
        kind = splash_attention_mask.LocalMask(
            (time, time), (reach, 0 if mask.is_causal else reach), 0
        )
    else:
        masks = (
            splash_attention_mask.CausalMask if mask.is_causal else splash_attention_mask.FullMask
        )
        kind = masks((time, time))
    return splash_attention_kernel.make_splash_mha_single_device(
        mask=splash_attention_mask.MultiHeadMask([kind] * heads),
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


def cudnn(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask, slopes_H):
    assert mask.segment_ids_BxT is None and mask.prefix_BxT is None and slopes_H is None, (
        "see select_backend"
    )
    batch, heads, time, head_width = q_BxHxTxK.shape
    groups = k_BxGxTxK.shape[1]
    window = {"local_window_size": (mask.window - 1, 0)} if mask.window else {}
    q_BxTxGxRxK = jnp.moveaxis(
        q_BxHxTxK.reshape(batch, groups, heads // groups, time, head_width), 3, 1
    )
    k_BxTxGxK, v_BxTxGxK = (jnp.swapaxes(x, 1, 2) for x in (k_BxGxTxK, v_BxGxTxK))
    names = (
        ("batch", "time", "heads", "per_group", "head_width"),
        *(("batch", "time", "heads", "head_width"),) * 2,
    )

    def on_one_device(q_BxTxGxRxK, k_BxTxGxK, v_BxTxGxK):
        q_BxTxHxK = q_BxTxGxRxK.reshape(*q_BxTxGxRxK.shape[:2], -1, head_width)
        y_BxTxHxK = jax.nn.dot_product_attention(
            q_BxTxHxK,
            k_BxTxGxK,
            v_BxTxGxK,
            is_causal=mask.is_causal,
            implementation="cudnn",
            scale=1.0,
            **window,
        )
        return y_BxTxHxK.reshape(q_BxTxGxRxK.shape)

    y_BxTxGxRxK = sharding.per_device(on_one_device, names)(q_BxTxGxRxK, k_BxTxGxK, v_BxTxGxK)
    return jnp.moveaxis(y_BxTxGxRxK, 1, 3).reshape(q_BxHxTxK.shape)
