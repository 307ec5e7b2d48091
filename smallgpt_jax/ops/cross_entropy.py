"""Cross-entropy over the vocabulary. The loss of each chunk of positions is computed together with
its gradient.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.devices import sharding
from smallgpt_jax.devices.platform import platform
from smallgpt_jax.ops import bfloat16

# Maximum difference between a logit and the target's logit in training, in nats. Larger differences
# are clipped, so that the sum of exponentials stays finite in float32. The loss of targets with a
# probability below about exp(−70) is therefore too low. Evaluation does not clip, and neither does
# training with a z-loss, which needs the exact sum.
MAX_DIFFERENCE = 70.0


def cross_entropy(
    x_BxTxW,
    head_VxW,
    targets_BxT,
    weights_BxT,
    chunks: int,
    z_loss: float = 0.0,
    softcap: float = 0.0,
):
    """Returns Σ weight · −log softmax(logits)[target], a float32 scalar. `chunks` must divide T.
    The logits are x·headᵀ, capped if `softcap` is not 0.

    (batch, time, vocabulary) logits are never materialized. The forward pass also computes the
    gradients, with three matmuls per chunk; the backward pass would need a fourth for the logits.
    `z_loss` · log(Σ exp(logits))² is added to each loss (Chowdhery et al., arXiv 2204.02311,
    section 5).
    """
    return _cross_entropy(
        x_BxTxW,
        head_VxW,
        _in_chunks(targets_BxT, chunks),
        _in_chunks(weights_BxT, chunks),
        z_loss,
        softcap,
    )


def cap(logits, softcap: float):
    """Returns c·tanh(z/c) of logits z (Gemma 2, arXiv 2408.00118, section 2), or the logits if c =
    `softcap` is 0.
    """
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def most_probable(x_BxTxW, head_VxW, chunks: int):
    """Returns the token with the largest logit at each position, (B, T) int32. `chunks` must divide
    T.
    """

    def find(x_BxCxW):
        return jnp.argmax(_logits(_rows(x_BxCxW), head_VxW), axis=1).reshape(x_BxCxW.shape[:2])

    found_NxBxC = jax.lax.map(find, _in_chunks(x_BxTxW, chunks))
    return jnp.moveaxis(found_NxBxC, 0, 1).reshape(x_BxTxW.shape[:2])


def _in_chunks(x_BxT, chunks: int):
    """(B, T, …) → (chunks, B, T / chunks, …)"""
    batch, time, *rest = x_BxT.shape
    return jnp.moveaxis(x_BxT.reshape(batch, chunks, time // chunks, *rest), 1, 0)


def _rows(x_BxCxW):
    return x_BxCxW.reshape(-1, x_BxCxW.shape[-1])


def _chunk_loss(chunk, head_VxW, z_loss: float, softcap: float):
    x_BxCxW, _, weights_BxC = chunk
    logits_RxV = cap(_logits(_rows(x_BxCxW), head_VxW), softcap)
    log_sums_R = jax.nn.logsumexp(logits_RxV, axis=1)
    losses_R = log_sums_R - cap(_target_logits(chunk, head_VxW), softcap)
    if z_loss:
        losses_R += z_loss * jnp.square(log_sums_R)
    return jnp.sum(weights_BxC.reshape(-1) * losses_R)


def _logits(x_RxW, head_VxW):
    if bfloat16.applies(x_RxW.dtype):
        return bfloat16.dot(x_RxW, head_VxW.T)
    return jnp.dot(x_RxW, head_VxW.T, preferred_element_type=jnp.float32)


def _target_logits(chunk, head_VxW):
    x_BxCxW, targets_BxC, _ = chunk
    return jnp.einsum(
        "rw,rw->r",
        _rows(x_BxCxW),
        jnp.take(head_VxW, targets_BxC.reshape(-1), axis=0),
        preferred_element_type=jnp.float32,
    )


def _chunk_loss_and_gradient(chunk, head_VxW, z_loss: float, softcap: float):
    """Returns the sum and its gradient by the logits before the cap. The loss is log Σⱼ exp(lⱼ −
    l), where l is the target's logit: to subtract l, not the maximum, saves a pass over the logits,
    but needs clipping, which a z-loss does not allow.
    """
    x_BxCxW, targets_BxC, weights_BxC = chunk
    targets, weights = targets_BxC.reshape(-1), weights_BxC.reshape(-1)
    logits_RxV = cap(_logits(_rows(x_BxCxW), head_VxW), softcap)
    target_logits_R = cap(_target_logits(chunk, head_VxW), softcap)
    shifts_R = jnp.max(logits_RxV, axis=1) if z_loss else target_logits_R
    differences_RxV = logits_RxV - shifts_R[:, None]
    # jnp.where instead of jnp.minimum, because jnp.minimum drops NaN on CPUs.
    ratios_RxV = jnp.exp(
        jnp.where(differences_RxV > MAX_DIFFERENCE, MAX_DIFFERENCE, differences_RxV)
    )
    sums = jnp.sum(ratios_RxV, axis=1)
    losses_R, factors_R = jnp.log(sums), weights / sums
    if z_loss:
        log_sums_R = jnp.log(sums) + shifts_R
        losses_R = log_sums_R - target_logits_R + z_loss * jnp.square(log_sums_R)
        factors_R *= 1 + 2 * z_loss * log_sums_R
    is_target_RxV = targets[:, None] == jnp.arange(len(head_VxW))[None]
    ratios_RxV = ratios_RxV.astype(
        x_BxCxW.dtype
    )  # only the ratios are stored, not the float32 logits
    d_logits_RxV = factors_R[:, None] * ratios_RxV - weights[:, None] * is_target_RxV
    if softcap:  # d tanh(u) = 1 − tanh(u)²
        d_logits_RxV *= 1 - jnp.square(logits_RxV / softcap)
    return jnp.sum(weights * losses_R), d_logits_RxV.astype(x_BxCxW.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _cross_entropy(x_BxTxW, head_VxW, targets_NxBxC, weights_NxBxC, z_loss: float, softcap: float):
    def add_chunk(total, chunk):
        return total + _chunk_loss(chunk, head_VxW, z_loss, softcap), None

    chunks = _in_chunks(x_BxTxW, len(targets_NxBxC)), targets_NxBxC, weights_NxBxC
    return jax.lax.scan(add_chunk, jnp.float32(0), chunks)[0]


def _cross_entropy_forward(
    x_BxTxW, head_VxW, targets_NxBxC, weights_NxBxC, z_loss: float, softcap: float
):
    # Each device accumulates the head's gradient from its own rows; those of all devices are summed
    # after the loop.
    shards = sharding.num_batch_shards()
    # On CPUs, the gradient is accumulated transposed: products with wide results are faster than
    # with tall results.
    axes, names = (
        ("pwv", ("batch", None, "vocab"))
        if platform() == "cpu"
        else ("pvw", ("batch", "vocab", None))
    )

    def add_chunk(carry, chunk):
        total, d_head = carry
        x_BxCxW = chunk[0]
        loss, d_logits = _chunk_loss_and_gradient(chunk, head_VxW, z_loss, softcap)
        x_PxRxW, d_logits_PxRxV = (
            rows.reshape(shards, -1, rows.shape[-1]) for rows in (x_BxCxW, d_logits)
        )
        if bfloat16.applies(x_BxCxW.dtype):
            d_head += bfloat16.transposed_dot(
                x_PxRxW, d_logits_PxRxV
            )  # (P, W, V), as `axes` on CPUs
            d_x = bfloat16.dot(d_logits, head_VxW).astype(x_BxCxW.dtype)
        else:
            d_head += jnp.einsum(
                f"prv,prw->{axes}", d_logits_PxRxV, x_PxRxW, preferred_element_type=jnp.float32
            )
            d_x = jnp.dot(d_logits, head_VxW)
        return (total + loss, nn.with_logical_constraint(d_head, names)), d_x.reshape(x_BxCxW.shape)

    chunks = _in_chunks(x_BxTxW, len(targets_NxBxC)), targets_NxBxC, weights_NxBxC
    vocabulary, width = head_VxW.shape
    shape = (shards, vocabulary, width) if axes == "pvw" else (shards, width, vocabulary)
    (total, d_head), d_x_NxBxCxW = jax.lax.scan(
        add_chunk, (jnp.float32(0), jnp.zeros(shape, jnp.float32)), chunks
    )
    d_x = jnp.moveaxis(d_x_NxBxCxW, 0, 1).reshape(x_BxTxW.shape)
    if (
        platform() == "gpu"
    ):  # the devices exchange bfloat16, as for other weights; the TPU compiler chooses it itself
        return total, (d_x, jax.lax.reduce_sum(d_head.astype(head_VxW.dtype), (0,)))
    d_head_VxW = jnp.einsum(f"{axes}->vw", d_head)
    return total, (d_x, d_head_VxW.astype(head_VxW.dtype))


def _cross_entropy_backward(z_loss: float, softcap: float, gradients, cotangent):
    d_x, d_head = gradients
    return *(cotangent.astype(d.dtype) * d for d in (d_x, d_head)), None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
