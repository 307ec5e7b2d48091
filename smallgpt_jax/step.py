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
    # Not jnp.minimum: on CPUs it makes a number of what is none.
    ratios_RxV = jnp.exp(jnp.where(differences_RxV > MAX_DIFFERENCE, MAX_DIFFERENCE, differences_RxV))
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
    # On a CPU it is transposed until then: XLA has a faster product for a wide result than for a tall one.
    axes, names = ("pwv", ("batch", None, "vocab")) if sharding.platform() == "cpu" else (
        "pvw", ("batch", "vocab", None))

    def add_chunk(carry, chunk):
        total, d_head = carry
        x_BxCxW = chunk[0]
        loss, d_logits = _chunk_loss_and_gradient(chunk, head_VxW)
        d_head += jnp.einsum(
            f"prv,prw->{axes}", d_logits.reshape(parts, -1, len(head_VxW)),
            x_BxCxW.reshape(parts, -1, x_BxCxW.shape[2]), preferred_element_type=jnp.float32)
        d_x = jnp.dot(d_logits, head_VxW).reshape(x_BxCxW.shape)
        return (total + loss, nn.with_logical_constraint(d_head, names)), d_x

    chunks = _in_chunks(x_BxTxW, len(targets_NxBxC)), targets_NxBxC, weights_NxBxC
    vocabulary, width = head_VxW.shape
    shape = (parts, vocabulary, width) if axes == "pvw" else (parts, width, vocabulary)
    (total, d_head), d_x_NxBxCxW = jax.lax.scan(
        add_chunk, (jnp.float32(0), jnp.zeros(shape, jnp.float32)), chunks)
    d_x = jnp.moveaxis(d_x_NxBxCxW, 0, 1).reshape(x_BxTxW.shape)
    d_head_VxW = jnp.einsum(f"{axes}->vw", d_head)
    return total, (d_x, d_head_VxW.astype(head_VxW.dtype))


def _cross_entropy_backward(gradients, cotangent):
    d_x, d_head = gradients
    return *(cotangent.astype(d.dtype) * d for d in (d_x, d_head)), None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def weighted_loss(params, model: LanguageModel, batch, weights_BxT, loss_chunks: int, dropout_key=None):
    """Σ weight · loss, in nats, over the targets of a batch (`data.packing.Rows` of arrays); with
    dropout if there is a key for it."""
    inputs_BxT = batch.tokens_BxT1[:, :-1]
    targets_BxT = batch.tokens_BxT1[:, 1:] if batch.targets_BxT is None else batch.targets_BxT
    mode = Mode(train=dropout_key is not None, segments_BxT=batch.segments_BxT)

    def loss(model):
        return cross_entropy(
            model.hidden(inputs_BxT, mode), model.head_weight(), targets_BxT, weights_BxT, loss_chunks)

    rngs = {"dropout": dropout_key} if mode.train else {}
    return model.apply({"params": params}, rngs=rngs, method=loss)


def target_weights(batch, total):
    """1/total for each target that counts, (B, T) float32."""
    shape = batch.tokens_BxT1[:, 1:].shape
    counts_BxT = jnp.ones(shape) if batch.counts_BxT is None else batch.counts_BxT
    return counts_BxT.astype(jnp.float32) / total


def in_microbatches(batch, microbatches: int):
    """(B, …) arrays → (microbatches, B / microbatches, …), each part with rows of every device: none has to move."""
    return jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(len(x) // microbatches, microbatches, *x.shape[1:]), 0, 1), batch)


def train_step(
    state: TrainState, batch, *, model: LanguageModel, optimizer, schedule, microbatches: int,
    loss_chunks: int, seed: int,
):
    """One update on a batch (`data.packing.Rows` of arrays). Returns the next state and its metrics:
    loss (the mean over the targets that count, in nats), grad_norm, learning_rate, is_finite, and skipped:
    the number of updates so far that were not made.

    If loss or gradient is not finite, weights and optimiser stay as they are. `is_finite` is false then, and also
    if the updated weights are not finite: to keep the old ones for that case would cost a second pass over the
    optimiser. The batch is computed in `microbatches` parts, whose gradients are summed in float32.
    """
    step_key = jax.random.fold_in(jax.random.key(seed), state.step)
    total = batch.tokens_BxT1[:, 1:].size if batch.counts_BxT is None else jnp.sum(batch.counts_BxT)

    def part_loss(params, index, part):
        return weighted_loss(params, model, part, target_weights(part, total), loss_chunks,
                             jax.random.fold_in(step_key, index))

    def add_part(sums, indexed_part):
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(part_loss)(state.params, *indexed_part)), None

    zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params))
    parts = (jnp.arange(microbatches), in_microbatches(batch, microbatches))
    (loss, gradients), _ = jax.lax.scan(add_part, zero, parts)

    grad_norm = optax.tree.norm(gradients)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    updated = (optax.apply_updates(state.params, updates), opt_state)
    is_made = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    params, opt_state = jax.tree.map(lambda new, old: jnp.where(is_made, new, old), updated,
                                     (state.params, state.opt_state))
    # Updates made so far; what is skipped takes no place in the schedule either.
    count = optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")[0][1]
    metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": schedule(count),
               "is_finite": is_made & all_finite(params), "skipped": state.step + 1 - count - is_made}
    return TrainState(state.step + 1, params, opt_state), metrics


def all_finite(tree) -> jax.Array:
    """Whether every number of every array is finite: only then is 0 · x nowhere NaN.

    The TPU compiler sums this up while it writes the weights; jnp.isfinite made it pass over them again.
    """
    return sum(jnp.sum(0 * x) for x in jax.tree.leaves(tree)) == 0


def eval_step(params, batch, *, model: LanguageModel, microbatches: int, loss_chunks: int):
    """Summed loss in nats, and number of targets, of those that count.

    The batch is computed in `microbatches` parts, as in training: what can be trained can be evaluated.
    """
    def add_part(sums, part):
        loss = weighted_loss(params, model, part, target_weights(part, 1), loss_chunks)
        return (sums[0] + loss, sums[1] + jnp.sum(part.counts_BxT)), None

    return jax.lax.scan(add_part, (jnp.float32(0), jnp.int32(0)), in_microbatches(batch, microbatches))[0]
