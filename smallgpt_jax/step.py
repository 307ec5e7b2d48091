"""Loss, train step and evaluation step: pure functions of arrays, compiled by `train.py`."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from smallgpt_jax.models import LanguageModel
from smallgpt_jax.models.context import Context
from smallgpt_jax.ops.cross_entropy import cross_entropy

SOWN = ("losses", "metrics")  # collections that modules sow into while training


class TrainState(NamedTuple):
    """All that a run needs to continue: `step` updates have been made."""

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    model_state: Any = {}  # noqa: RUF012 — what modules carry from step to step; {} for most models


def init_state(model: LanguageModel, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Returns the state before the first update."""
    tokens = jnp.zeros((1, model.config.context_length), jnp.int32)
    variables = nn.unbox(model.init(jax.random.key(seed), tokens))
    params = variables["params"]
    return TrainState(jnp.int32(0), params, optimizer.init(params), variables.get("state", {}))


def weighted_loss(params, model_state, model: LanguageModel, batch, weights_BxT, loss_chunks: int, *,
                  dropout_key=None, begins_update=True):
    """Returns Σ weight · loss, in nats, over the targets of a batch (`data.packing.Rows` of arrays), and the
    collections that modules wrote to.

    With a `dropout_key` the model is applied as in training.
    """
    inputs_BxT = batch.tokens_BxT1[:, :-1]
    targets_BxT = batch.tokens_BxT1[:, 1:] if batch.targets_BxT is None else batch.targets_BxT
    trains = dropout_key is not None
    context = Context(train=trains, segment_ids_BxT=batch.segments_BxT, begins_update=begins_update)

    def loss(model):
        return cross_entropy(
            model.hidden(inputs_BxT, context), model.head_weight(), targets_BxT, weights_BxT, loss_chunks)

    return model.apply({"params": params, "state": model_state}, method=loss,
                       rngs={"dropout": dropout_key} if trains else {},
                       mutable=["state", *SOWN] if trains else [])


def target_weights(batch, total):
    """1/total for each target that counts, (B, T) float32."""
    shape = batch.tokens_BxT1[:, 1:].shape
    counts_BxT = jnp.ones(shape) if batch.counts_BxT is None else batch.counts_BxT
    return counts_BxT.astype(jnp.float32) / total


def in_microbatches(batch, microbatches: int):
    """Returns (B, …) arrays as (microbatches, B / microbatches, …), each part with rows of every device: none moves."""
    return jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(len(x) // microbatches, microbatches, *x.shape[1:]), 0, 1), batch)


def train_step(
    state: TrainState, batch, *, model: LanguageModel, optimizer, schedule, microbatches: int,
    loss_chunks: int, seed: int,
):
    """Returns the next state and the metrics of one update on a batch (`data.packing.Rows` of arrays).

    The metrics: loss (the mean over the targets that count, in nats, and what modules sowed into "losses"), grad_norm,
    learning_rate, is_finite, skipped (the number of updates so far that were not made), and what modules sowed into
    "metrics". If loss or gradient is not finite, parameters, optimizer and model state stay as they are. `is_finite` is
    false then, and also if the updated parameters are not finite: to keep the old ones for that case would cost a
    second pass over the optimizer. The batch is computed in `microbatches` parts, whose gradients are summed in
    float32.
    """
    step_key = jax.random.fold_in(jax.random.key(seed), state.step)
    total = batch.tokens_BxT1[:, 1:].size if batch.counts_BxT is None else jnp.sum(batch.counts_BxT)

    def part_loss(params, model_state, index, part):
        loss, collections = weighted_loss(
            params, model_state, model, part, target_weights(part, total), loss_chunks,
            dropout_key=jax.random.fold_in(step_key, index), begins_update=index == 0)
        # Each sown loss is a mean over its microbatch.
        for sown in jax.tree.leaves(collections.get("losses")):
            loss += jnp.sum(sown) / microbatches
        return loss, (collections.get("state", model_state), sown_metrics(collections.get("metrics", {})))

    def add_part(carry, indexed_part):
        sums, model_state = carry
        (loss, (model_state, metrics)), gradients = jax.value_and_grad(part_loss, has_aux=True)(
            state.params, model_state, *indexed_part)
        return (jax.tree.map(jnp.add, sums, (loss, gradients)), model_state), metrics

    zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params))
    parts = (jnp.arange(microbatches), in_microbatches(batch, microbatches))
    ((loss, gradients), model_state), sown = jax.lax.scan(add_part, (zero, state.model_state), parts)

    grad_norm = optax.tree.norm(gradients)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    updated = (optax.apply_updates(state.params, updates), opt_state, model_state)
    is_made = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    params, opt_state, model_state = jax.tree.map(
        lambda new, old: jnp.where(is_made, new, old), updated, (state.params, state.opt_state, state.model_state))
    # Updates made so far; what is skipped takes no place in the schedule either.
    count = optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")[0][1]
    metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": schedule(count),
               "is_finite": is_made & all_finite(params), "skipped": state.step + 1 - count - is_made,
               **jax.tree.map(jnp.mean, sown)}
    return TrainState(state.step + 1, params, opt_state, model_state), metrics


def all_finite(tree) -> jax.Array:
    """Returns whether every number of every array is finite: only then is 0 · x nowhere NaN.

    The TPU compiler sums this up while it writes the weights; jnp.isfinite made it pass over them again.
    """
    return sum(jnp.sum(0 * x) for x in jax.tree.leaves(tree)) == 0


def sown_metrics(collection) -> dict[str, jax.Array]:
    """Returns what modules sowed into "metrics", by name: its mean over the modules of all layers and paths."""
    values: dict[str, list] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(collection):
        name = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][-1]
        values.setdefault(name, []).append(jnp.mean(value))
    return {name: jnp.mean(jnp.stack(each)) for name, each in values.items()}


def eval_step(params, model_state, batch, *, model: LanguageModel, microbatches: int, loss_chunks: int):
    """Returns the summed loss in nats, and the number of targets, of those that count.

    The batch is computed in `microbatches` parts, as in training: what can be trained can be evaluated.
    """
    def add_part(sums, part):
        loss, _ = weighted_loss(params, model_state, model, part, target_weights(part, 1), loss_chunks)
        return (sums[0] + loss, sums[1] + jnp.sum(part.counts_BxT)), None

    return jax.lax.scan(add_part, (jnp.float32(0), jnp.int32(0)), in_microbatches(batch, microbatches))[0]
