"""Causal attention over whole rows: one call, several ways to compute it.

`xla` is plain JAX and runs anywhere. `splash` is JAX's Pallas kernel for TPUs, `cudnn` NVIDIA's
fused kernel: neither ever holds the (time, time) scores. `auto` takes what suits the machine that
the program is compiled for. What a kernel cannot take is computed by `xla`; `choose` says why.
Decoding with a cache has an attention of its own, in `layers.py`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from smallgpt_jax import sharding

BACKENDS = ("auto", "xla", "splash", "cudnn")  # of config.model.attention; "whole" is for counting FLOPs
QUERIES = 128  # positions that attend at one time, where no kernel does
OUTPUT = "attention_output"  # what the splash kernel has found; rematerialisation may keep it


def choose(backend: str, platform: str, *, time: int, head_width: int, dtype: str,
           has_segments: bool = False, has_alibi: bool = False) -> tuple[str, str]:
    """Which backend computes such an attention on a "tpu", "gpu" or "cpu": its name, and why it is
    not the one that was asked for ("" if it is)."""
    if backend == "auto":
        backend = {"tpu": "splash", "gpu": "cudnn"}.get(platform, "xla")
    if backend == "splash":
        if time % splash_attention_kernel.NUM_LANES:
            return "xla", "splash attention takes multiples of 128 positions"
        if platform == "gpu":
            return "xla", "splash attention is for TPUs"
        if has_alibi:
            return "xla", "splash attention has no ALiBi"
    if backend == "cudnn":
        if platform != "gpu":
            return "xla", "cuDNN is for NVIDIA GPUs"
        if dtype != "bfloat16":
            return "xla", "cuDNN's attention takes bfloat16"
        if head_width % 8 or head_width > 128:
            return "xla", "cuDNN's attention takes head widths that are multiples of 8, up to 128"
        if has_segments:  # handed a mask beside is_causal, it has let texts see each other
            return "xla", "cuDNN's attention does not keep the documents of a row apart"
        if has_alibi:  # it could be handed the biases, but written out, (time, time) for each head
            return "xla", "cuDNN's attention has no ALiBi"
    return backend, ""


def causal_attention(q_BxHxTxK, k_BxHxTxK, v_BxHxTxK, segments_BxT=None, slopes_H=None, *,
                     backend: str = "auto"):
    """softmax(q·kᵀ/√K)·v over the positions up to each one's own, (B, H, T, K).

    With `segments_BxT`, integers that number the documents of a row, only over those of the same
    document. With `slopes_H` the scores of each head lose its slope times the distance (ALiBi). Scores
    and softmax are float32 (Vaswani et al., arXiv 1706.03762, equation 1).
    """
    _, _, time, head_width = q_BxHxTxK.shape
    name, _ = choose(backend, sharding.platform(), time=time, head_width=head_width,
                     dtype=str(q_BxHxTxK.dtype), has_segments=segments_BxT is not None,
                     has_alibi=slopes_H is not None)
    q_BxHxTxK /= math.sqrt(head_width)
    return {"xla": xla, "whole": whole, "splash": splash, "cudnn": cudnn}[name](
        q_BxHxTxK, k_BxHxTxK, v_BxHxTxK, segments_BxT, slopes_H)


def xla(q_BxHxTxK, k_BxHxTxK, v_BxHxTxK, segments_BxT, slopes_H):
    """In parts of QUERIES positions, which look at no later keys."""
    time = q_BxHxTxK.shape[2]
    return jnp.concatenate([
        whole(q_BxHxTxK[:, :, start:start + QUERIES], k_BxHxTxK[:, :, :start + QUERIES],
              v_BxHxTxK[:, :, :start + QUERIES], segments_BxT, slopes_H)
        for start in range(0, time, QUERIES)], axis=2)


def whole(q_BxHxTxK, k_BxHxSxK, v_BxHxSxK, segments_BxS, slopes_H):
    """Of the last T of S positions, no score left out (of which FLOPs are counted).

    Weights are divided by their sums after the product with the values: neither it nor its gradient then
    passes over (T, S) once more.
    """
    time, keys = q_BxHxTxK.shape[2], k_BxHxSxK.shape[2]
    scores_BxHxTxS = jnp.einsum(
        "bhtk,bhsk->bhts", q_BxHxTxK, k_BxHxSxK, preferred_element_type=jnp.float32)
    may_see_BxTxS = jnp.tril(jnp.ones((time, keys), bool), keys - time)[None]
    if segments_BxS is not None:
        may_see_BxTxS &= segments_BxS[:, keys - time:keys, None] == segments_BxS[:, None, :keys]
    if slopes_H is not None:  # the places in the row will do: distances in a document are the same
        distances_TxS = jnp.arange(keys - time, keys)[:, None] - jnp.arange(keys)[None]
        scores_BxHxTxS -= (slopes_H[:, None, None] * distances_TxS[None])[None]
    scores_BxHxTxS += jnp.where(may_see_BxTxS, 0.0, -1e30)[:, None]
    largest_BxHxTx1 = jax.lax.stop_gradient(jnp.max(scores_BxHxTxS, axis=-1, keepdims=True))
    weights_BxHxTxS = jnp.exp(scores_BxHxTxS - largest_BxHxTx1)
    y_BxHxTxK = jnp.einsum("bhts,bhsk->bhtk", weights_BxHxTxS.astype(v_BxHxSxK.dtype), v_BxHxSxK,
                           preferred_element_type=jnp.float32)
    return (y_BxHxTxK / jnp.sum(weights_BxHxTxS, axis=-1, keepdims=True)).astype(v_BxHxSxK.dtype)


def splash(q_BxHxTxK, k_BxHxTxK, v_BxHxTxK, segments_BxT, slopes_H):
    """Each device runs the kernel on its own rows and heads; off a TPU it is interpreted, slowly."""
    assert slopes_H is None, "see choose"
    arguments = (q_BxHxTxK, k_BxHxTxK, v_BxHxTxK)
    names = (("batch", "heads", "time", "head_width"),) * 3
    if segments_BxT is not None:
        arguments, names = (*arguments, segments_BxT), (*names, ("batch", "time"))
    interpret = sharding.platform() != "tpu"

    def on_one_device(q_BxHxTxK, k_BxHxTxK, v_BxHxTxK, segments_BxT=None):
        _, heads, time, head_width = q_BxHxTxK.shape
        kernel = splash_kernel(heads, time, head_width, interpret)
        if segments_BxT is None:
            return jax.vmap(kernel)(q_BxHxTxK, k_BxHxTxK, v_BxHxTxK)
        segments = splash_attention_kernel.SegmentIds(segments_BxT, segments_BxT)
        return jax.vmap(kernel)(q_BxHxTxK, k_BxHxTxK, v_BxHxTxK, segments)

    return sharding.per_device(on_one_device, names)(*arguments)


def splash_kernel(heads: int, time: int, head_width: int, interpret: bool):
    """The kernel for (heads, time, head width) arrays; its causal mask is never written out."""
    lanes = splash_attention_kernel.NUM_LANES
    layouts = splash_attention_kernel.QKVLayout
    # Memory is filled up to `lanes` along an array's last axis: narrow heads would waste most of it.
    layout = layouts.SEQ_MINOR if head_width < lanes else layouts.HEAD_DIM_MINOR
    block = math.gcd(time, 4 * lanes)
    mask = splash_attention_mask.CausalMask((time, time))
    return splash_attention_kernel.make_splash_mha_single_device(
        mask=splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
            block_q_dq=block, block_kv_dq=block,
            q_layout=layout, k_layout=layout, v_layout=layout),
        residual_checkpoint_name=OUTPUT, interpret=interpret)


def cudnn(q_BxHxTxK, k_BxHxTxK, v_BxHxTxK, segments_BxT, slopes_H):
    assert segments_BxT is None and slopes_H is None, "see choose"
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn", scale=1.0)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BxHxTxK, k_BxHxTxK, v_BxHxTxK))
    names = (("batch", "time", "heads", "head_width"),) * 3
    return jnp.swapaxes(sharding.per_device(attention, names)(q, k, v), 1, 2)
