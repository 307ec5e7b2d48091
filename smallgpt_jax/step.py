"""Loss, train step and evaluation step: pure functions of arrays, compiled by `train.py`."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from smallgpt_jax import sharding
from smallgpt_jax.models import LanguageModel
from smallgpt_jax.models.layers import Mode

# In training, of a logit over its target's, in nats: the sum of a vocabulary's exponentials stays below the
# largest float32. The loss of a token less likely than exp(−70) is understated; in evaluation it is not.
MAX_DIFFERENCE = 70.0


class TrainState(NamedTuple):
    """All that a run needs to go on: `step` updates have been made."""

    step: jax.Array
    params: Any
    opt_state: optax.OptState


def init_state(model: LanguageModel, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first update."""
    tokens = jnp.zeros((1, model.config.context_length), jnp.int32)
    params = nn.unbox(model.init(jax.random.key(seed), tokens)["params"])
    return TrainState(jnp.int32(0), params, optimizer.init(params))


def cross_entropy(x_BxTxW, head_VxW, targets_BxT, weights_BxT, chunks: int):
    """Σ weight · −log softmax(x·headᵀ)[target], a float32 scalar.

    Computed in `chunks` parts of the sequence, so that (batch, time, vocabulary) never exists
    whole; `chunks` divides T. The gradients are computed with the value, part by part, since
    keeping or recomputing the logits would cost more: three products instead of four.
    Logits and softmax are float32, the products take the type of x and head.
    """
    return _cross_entropy(x_BxTxW, head_VxW, _in_chunks(targets_BxT, chunks),
                          _in_chunks(weights_BxT, chunks))


def _in_chunks(x_BxT, chunks: int):
    """(B, T, …) → (chunks, B, T / chunks, …)."""
    batch, time, *rest = x_BxT.shape
    return jnp.moveaxis(x_BxT.reshape(batch, chunks, time // chunks, *rest), 1, 0)


def _rows(x_BxCxW):
    return x_BxCxW.reshape(-1, x_BxCxW.shape[-1])


def _chunk_loss(chunk, head_VxW):
    """The weighted loss of one part."""
    x_BxCxW, _, weights_BxC = chunk
    logits_RxV = jnp.dot(_rows(x_BxCxW), head_VxW.T, preferred_element_type=jnp.float32)
    log_probabilities = _target_logits(chunk, head_VxW) - jax.nn.logsumexp(logits_RxV, axis=1)
    return -jnp.sum(weights_BxC.reshape(-1) * log_probabilities)


def _target_logits(chunk, head_VxW):
    """The logit of each row's target, (B·C,) float32."""
    x_BxCxW, targets_BxC, _ = chunk
    return jnp.einsum("rw,rw->r", _rows(x_BxCxW), jnp.take(head_VxW, targets_BxC.reshape(-1), axis=0),
                      preferred_element_type=jnp.float32)


def _chunk_loss_and_gradient(chunk, head_VxW):
    """The weighted loss of one part, and its gradient by the logits, (B·C, V) in the type of x.

    The loss of a row is log Σⱼ exp(lⱼ − l) with l the logit of its target, which is had beforehand: no
    pass over the logits looks for the largest. Differences are cut at MAX_DIFFERENCE.
    """
    x_BxCxW, targets_BxC, weights_BxC = chunk
    targets, weights = targets_BxC.reshape(-1), weights_BxC.reshape(-1)
    logits_RxV = jnp.dot(_rows(x_BxCxW), head_VxW.T, preferred_element_type=jnp.float32)
    differences_RxV = logits_RxV - _target_logits(chunk, head_VxW)[:, None]
    ratios_RxV = jnp.exp(jnp.minimum(differences_RxV, MAX_DIFFERENCE))
    sums = jnp.sum(ratios_RxV, axis=1)
    loss = jnp.sum(weights * jnp.log(sums))
    is_target_RxV = targets[:, None] == jnp.arange(len(head_VxW))[None]
    ratios_RxV = ratios_RxV.astype(x_BxCxW.dtype)  # what is kept of the logits
    d_logits_RxV = (weights / sums)[:, None] * ratios_RxV - weights[:, None] * is_target_RxV
    return loss, d_logits_RxV.astype(x_BxCxW.dtype)


@jax.custom_vjp
def _cross_entropy(x_BxTxW, head_VxW, targets_NxBxC, weights_NxBxC):
    def add_chunk(total, chunk):
        return total + _chunk_loss(chunk, head_VxW), None

    chunks = _in_chunks(x_BxTxW, len(targets_NxBxC)), targets_NxBxC, weights_NxBxC
    return jax.lax.scan(add_chunk, jnp.float32(0), chunks)[0]


def _cross_entropy_forward(x_BxTxW, head_VxW, targets_NxBxC, weights_NxBxC):
    # Each device adds up its own part of the head's gradient; they are summed once, after the loop.
    parts = sharding.batch_parts()

    def add_chunk(carry, chunk):
        total, d_head_PxVxW = carry
        x_BxCxW = chunk[0]
        loss, d_logits = _chunk_loss_and_gradient(chunk, head_VxW)
        d_head_PxVxW += jnp.einsum(
            "prv,prw->pvw", d_logits.reshape(parts, -1, len(head_VxW)),
            x_BxCxW.reshape(parts, -1, x_BxCxW.shape[2]), preferred_element_type=jnp.float32)
        d_x = jnp.dot(d_logits, head_VxW).reshape(x_BxCxW.shape)
        return (total + loss, nn.with_logical_constraint(d_head_PxVxW, ("batch", "vocab", None))), d_x

    chunks = _in_chunks(x_BxTxW, len(targets_NxBxC)), targets_NxBxC, weights_NxBxC
    zero = jnp.float32(0), jnp.zeros((parts, *head_VxW.shape), jnp.float32)
    (total, d_head_PxVxW), d_x_NxBxCxW = jax.lax.scan(add_chunk, zero, chunks)
    d_x = jnp.moveaxis(d_x_NxBxCxW, 0, 1).reshape(x_BxTxW.shape)
    return total, (d_x, d_head_PxVxW.sum(axis=0).astype(head_VxW.dtype))


def _cross_entropy_backward(gradients, cotangent):
    d_x, d_head = gradients
    return *(cotangent.astype(d.dtype) * d for d in (d_x, d_head)), None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def mean_loss(params, model: LanguageModel, tokens_BxT1, loss_chunks: int, dropout_key):
    """Mean loss in nats over the targets of (B, T + 1) tokens, dropout applied."""
    inputs, targets = tokens_BxT1[:, :-1], tokens_BxT1[:, 1:]

    def loss(model):
        x_BxTxW = model.hidden(inputs, Mode(train=True))
        weights = jnp.full(targets.shape, 1 / targets.size, jnp.float32)
        return cross_entropy(x_BxTxW, model.head_weight(), targets, weights, loss_chunks)

    return model.apply({"params": params}, rngs={"dropout": dropout_key}, method=loss)


def train_step(
    state: TrainState, tokens_BxT1, *, model: LanguageModel, optimizer, schedule, microbatches: int,
    loss_chunks: int, seed: int,
):
    """One update. Returns the next state and its metrics: loss, grad_norm, learning_rate.

    The batch is computed in `microbatches` parts, whose gradients are averaged in float32; each
    part takes rows from every device, so that none has to move.
    """
    batch, length = tokens_BxT1.shape
    parts = jnp.swapaxes(tokens_BxT1.reshape(batch // microbatches, microbatches, length), 0, 1)
    step_key = jax.random.fold_in(jax.random.key(seed), state.step)

    def add_part(total, part):
        index, tokens = part
        gradients = jax.value_and_grad(mean_loss)(
            state.params, model, tokens, loss_chunks, jax.random.fold_in(step_key, index))
        return jax.tree.map(jnp.add, total, gradients), None

    zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params))
    total, _ = jax.lax.scan(add_part, zero, (jnp.arange(microbatches), parts))
    loss, gradients = jax.tree.map(lambda x: x / microbatches, total)

    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    next_state = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradients),
               "learning_rate": schedule(state.step)}
    return next_state, metrics


def eval_step(params, tokens_BxT1, counts_B, *, model: LanguageModel, loss_chunks: int):
    """Summed loss in nats, and number of targets, of the rows that count."""
    inputs, targets = tokens_BxT1[:, :-1], tokens_BxT1[:, 1:]

    def loss(model):
        weights = jnp.broadcast_to(counts_B[:, None], targets.shape).astype(jnp.float32)
        return cross_entropy(
            model.hidden(inputs), model.head_weight(), targets, weights, loss_chunks)

    return model.apply({"params": params}, method=loss), jnp.sum(counts_B) * targets.shape[1]
