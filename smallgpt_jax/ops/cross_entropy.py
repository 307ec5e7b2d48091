"""Cross-entropy over the vocabulary, whose loss and gradient are computed chunk by chunk."""

import functools
from typing import NamedTuple

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
_MAX_DIFFERENCE = 70.0


class LossOptions(NamedTuple):
    """The coefficient of the z-loss, and the cap of the logits; 0: none."""

    z_loss: float = 0.0
    softcap: float = 0.0


_NO_OPTIONS = LossOptions()


def cross_entropy(
    x_BxTxW, head_VxW, targets_BxT, weights_BxT, chunks: int, options: LossOptions = _NO_OPTIONS
):
    """Returns Σ weight · −log softmax(logits)[target], a float32 scalar. `chunks` must divide T.
    The logits are x·headᵀ, capped if `softcap` is not 0.

    (batch, time, vocabulary) logits are never materialized. The forward pass also computes the
    gradients, with three matmuls per chunk; the backward pass would need a fourth for the logits.
    `z_loss` · log(Σ exp(logits))² is added to each loss (Chowdhery et al., arXiv 2204.02311,
    section 5).
    """
    targets_NxBxC = _in_chunks(targets_BxT, chunks)
    weights_NxBxC = _in_chunks(weights_BxT, chunks)
    return _cross_entropy(x_BxTxW, head_VxW, targets_NxBxC, weights_NxBxC, options)


def row_cross_entropy(
    x_BxTxW, head_VxW, targets_BxT, weights_BxT, chunks: int, options: LossOptions
):
    """Returns the sums of `cross_entropy` of each row, (B,), for evaluation."""

    def add_chunk(totals_B, chunk):
        losses_R = _chunk_losses(chunk, head_VxW, options)
        _, _, weights_BxC = chunk
        return totals_B + jnp.sum(weights_BxC * losses_R.reshape(weights_BxC.shape), axis=1), None

    in_chunks = tuple(_in_chunks(array, chunks) for array in (x_BxTxW, targets_BxT, weights_BxT))
    return jax.lax.scan(add_chunk, jnp.zeros(len(x_BxTxW)), in_chunks)[0]


def cap(logits, softcap: float):
    """Returns c·tanh(z/c) of logits z (Gemma 2, arXiv 2408.00118), or z if c is 0."""
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def most_probable(x_BxTxW, head_VxW, chunks: int):
    """Returns the token with the largest logit, capped or not, at each position, (B, T) int32."""

    def of_chunk(x_BxCxW):
        tokens_R = jnp.argmax(_logits(_rows(x_BxCxW), head_VxW), axis=1)
        return tokens_R.reshape(x_BxCxW.shape[:2])

    tokens_NxBxC = jax.lax.map(of_chunk, _in_chunks(x_BxTxW, chunks))
    return jnp.moveaxis(tokens_NxBxC, 0, 1).reshape(x_BxTxW.shape[:2])


def _in_chunks(x_BxT, chunks: int):
    """(B, T, …) → (chunks, B, T / chunks, …)"""
    batch, time, *rest = x_BxT.shape
    return jnp.moveaxis(x_BxT.reshape(batch, chunks, time // chunks, *rest), 1, 0)


def _rows(x_BxCxW):
    return x_BxCxW.reshape(-1, x_BxCxW.shape[-1])


def _chunk_losses(chunk, head_VxW, options: LossOptions):
    """Returns the loss at each position, without weights, (R,)."""
    x_BxCxW, _, _ = chunk
    logits_RxV = cap(_logits(_rows(x_BxCxW), head_VxW), options.softcap)
    log_sums_R = jax.nn.logsumexp(logits_RxV, axis=1)
    target_logits_R = cap(_target_logits(chunk, head_VxW), options.softcap)
    losses_R = log_sums_R - target_logits_R
    if options.z_loss:
        losses_R += options.z_loss * jnp.square(log_sums_R)
    return losses_R


def _logits(x_RxW, head_VxW):
    if bfloat16.applies(x_RxW.dtype):
        return bfloat16.dot(x_RxW, head_VxW.T)
    return jnp.dot(x_RxW, head_VxW.T, preferred_element_type=jnp.float32)


def _target_logits(chunk, head_VxW):
    x_BxCxW, targets_BxC, _ = chunk
    x_RxW = _rows(x_BxCxW)
    target_weights_RxW = jnp.take(head_VxW, targets_BxC.reshape(-1), axis=0)
    return jnp.einsum("rw,rw->r", x_RxW, target_weights_RxW, preferred_element_type=jnp.float32)


def _chunk_loss_and_gradient(chunk, head_VxW, options: LossOptions):
    """Returns the sum and its gradient by the logits before the cap. The loss is log Σⱼ exp(lⱼ −
    l), where l is the target's logit: to subtract l, not the maximum, saves a pass over the logits,
    but needs clipping, which a z-loss does not allow.
    """
    x_BxCxW, targets_BxC, weights_BxC = chunk
    z_loss, softcap = options
    targets_R, weights_R = targets_BxC.reshape(-1), weights_BxC.reshape(-1)
    logits_RxV = cap(_logits(_rows(x_BxCxW), head_VxW), softcap)
    target_logits_R = cap(_target_logits(chunk, head_VxW), softcap)
    shifts_R = jnp.max(logits_RxV, axis=1) if z_loss else target_logits_R
    differences_RxV = logits_RxV - shifts_R[:, None]
    # jnp.where instead of jnp.minimum, because jnp.minimum drops NaN on CPUs.
    clipped_RxV = jnp.where(differences_RxV > _MAX_DIFFERENCE, _MAX_DIFFERENCE, differences_RxV)
    ratios_RxV = jnp.exp(clipped_RxV)
    sums_R = jnp.sum(ratios_RxV, axis=1)
    losses_R = jnp.log(sums_R)
    factors_R = weights_R / sums_R  # times the ratios: weighted probabilities
    if z_loss:
        log_sums_R = jnp.log(sums_R) + shifts_R
        losses_R = log_sums_R - target_logits_R + z_loss * jnp.square(log_sums_R)
        factors_R *= 1 + 2 * z_loss * log_sums_R
    is_target_RxV = targets_R[:, None] == jnp.arange(len(head_VxW))[None]
    # Only the ratios are stored, not the float32 logits.
    ratios_RxV = ratios_RxV.astype(x_BxCxW.dtype)
    d_logits_RxV = factors_R[:, None] * ratios_RxV - weights_R[:, None] * is_target_RxV
    if softcap:  # d tanh(u) = 1 − tanh(u)²
        d_logits_RxV *= 1 - jnp.square(logits_RxV / softcap)
    return jnp.sum(weights_R * losses_R), d_logits_RxV.astype(x_BxCxW.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(x_BxTxW, head_VxW, targets_NxBxC, weights_NxBxC, options: LossOptions):
    def add_chunk(total, chunk):
        weights_R = chunk[2].reshape(-1)
        return total + jnp.sum(weights_R * _chunk_losses(chunk, head_VxW, options)), None

    chunks = _in_chunks(x_BxTxW, len(targets_NxBxC)), targets_NxBxC, weights_NxBxC
    return jax.lax.scan(add_chunk, jnp.float32(0), chunks)[0]


# The sum of the losses, and its gradients by `x_BxTxW` and `head_VxW`, which are all that is saved.
def _cross_entropy_forward(x_BxTxW, head_VxW, targets_NxBxC, weights_NxBxC, options: LossOptions):
    # Each of P devices accumulates the head's gradient from its own rows; those of all devices are
    # summed after the loop.
    shards = sharding.num_batch_shards()
    vocabulary, width = head_VxW.shape
    if platform() == "cpu":
        # Transposed: products with wide results are faster than with tall results.
        axes, names = "pwv", ("batch", None, "vocab")
        shape = (shards, width, vocabulary)
    else:
        axes, names = "pvw", ("batch", "vocab", None)
        shape = (shards, vocabulary, width)

    def add_chunk(carry, chunk):
        total, d_head = carry
        x_BxCxW = chunk[0]
        loss, d_logits_RxV = _chunk_loss_and_gradient(chunk, head_VxW, options)
        x_PxRxW = x_BxCxW.reshape(shards, -1, width)
        d_logits_PxRxV = d_logits_RxV.reshape(shards, -1, vocabulary)
        if bfloat16.applies(x_BxCxW.dtype):  # on CPUs, so `axes` is "pwv"
            d_head += bfloat16.transposed_dot(x_PxRxW, d_logits_PxRxV)
            d_x = bfloat16.dot(d_logits_RxV, head_VxW).astype(x_BxCxW.dtype)
        else:
            d_head += jnp.einsum(
                f"prv,prw->{axes}", d_logits_PxRxV, x_PxRxW, preferred_element_type=jnp.float32
            )
            d_x = jnp.dot(d_logits_RxV, head_VxW)
        total += loss
        d_head = nn.with_logical_constraint(d_head, names)
        return (total, d_head), d_x.reshape(x_BxCxW.shape)

    chunks = _in_chunks(x_BxTxW, len(targets_NxBxC)), targets_NxBxC, weights_NxBxC
    zeros = jnp.float32(0), jnp.zeros(shape, jnp.float32)
    (total, d_head), d_x_NxBxCxW = jax.lax.scan(add_chunk, zeros, chunks)
    d_x = jnp.moveaxis(d_x_NxBxCxW, 0, 1).reshape(x_BxTxW.shape)
    if platform() == "gpu":
        # The devices exchange bfloat16, as for other weights; the TPU compiler chooses it itself.
        return total, (d_x, jax.lax.reduce_sum(d_head.astype(head_VxW.dtype), (0,)))
    d_head_VxW = jnp.einsum(f"{axes}->vw", d_head)
    return total, (d_x, d_head_VxW.astype(head_VxW.dtype))


def _cross_entropy_backward(options: LossOptions, gradients, cotangent):
    d_x, d_head = gradients
    d_x = cotangent.astype(d_x.dtype) * d_x
    d_head = cotangent.astype(d_head.dtype) * d_head
    return d_x, d_head, None, None  # targets and weights have no gradient


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
