"""The training step: a pure function of arrays.

`program` is the `Program` that compiles it: model, objective, optimizer and config.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from smallgpt_jax.devices import sharding
from smallgpt_jax.devices.platform import exchange_dtype
from smallgpt_jax.models import abstract_params
from smallgpt_jax.models.router import load_metrics, move_biases
from smallgpt_jax.objectives.examples import Examples, row_keys
from smallgpt_jax.objectives.objective import forward
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.training.sown import SOWN, rows_are_independent, sown_metrics

# Folded into the key of a step for its examples; microbatches have the numbers from 0.
_EXAMPLES = 2**32 - 1


class Hyperparameters(NamedTuple):
    """Inputs of an update, so that runs with other values share the compiled step."""

    seed: jax.Array  # uint32
    learning_rate: jax.Array  # at this update
    weight_decay: jax.Array


def train_step(program, state: TrainState, batch, hyperparameters: Hyperparameters, constants=None):
    """Returns the next state and the metrics of one update. If loss or gradient is not finite,
    parameters, optimizer state and model state do not change. Metrics:

    - loss: mean over the targets in the loss mask, in nats, plus the objective's terms and values
      sown into "losses"
    - the objective's terms, by name
    - values sown into "metrics" and "layer_metrics", averaged over the microbatches; for experts,
      also `load_metrics`
    - grad_norm (before clipping), learning_rate, skipped (number of updates skipped so far)
    - is_finite: loss, gradient and updated parameters
    """
    key = jax.random.fold_in(jax.random.key(hyperparameters.seed), state.step)
    sums, model_state = _sum_batch(program, state, batch, key, constants)
    loss, gradients, (sown, loads) = sums
    model_state = move_biases(model_state, loads, program.model.config.expert_bias_rate)

    grad_norm = optax.tree.norm(gradients)
    updates, opt_state = program.optimizer.update(
        gradients,
        state.opt_state,
        state.trained,
        learning_rate=hyperparameters.learning_rate,
        weight_decay=hyperparameters.weight_decay,
    )
    trained = optax.apply_updates(state.trained, updates)
    average = _moved_average(state, trained, program.config.train.ema)
    # Not if only the updated parameters are not finite: undoing the update then would take a second
    # pass over parameters and optimizer state.
    is_applied = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    trained, opt_state, model_state, average = jax.tree.map(
        lambda new, old: jnp.where(is_applied, new, old),
        (trained, opt_state, model_state, average),
        (state.trained, state.opt_state, state.model_state, state.ema),
    )
    metrics = {
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": hyperparameters.learning_rate,
        "is_finite": is_applied & _all_finite(trained),
        # of all updates up to this one, those that were not applied
        "skipped": state.step + 1 - _updates_applied(state.opt_state) - is_applied,
        **load_metrics(loads),
    }
    # A metric of the model would hide one of these.
    if taken := metrics.keys() & sown.keys():
        raise ValueError(
            f"the model sows a metric with a name that is in use: {', '.join(taken)}; rename it"
        )
    metrics |= jax.tree.map(lambda x: jnp.mean(x, axis=0), sown)
    next_state = TrainState(
        step=state.step + 1,
        params={name: trained[name] for name in state.params},
        opt_state=opt_state,
        model_state=model_state,
        heads={name: trained[name] for name in state.heads},
        ema=average,
    )
    return next_state, metrics


def _sum_batch(program, state: TrainState, batch, key, constants):
    """Returns (loss, gradients, [metrics, loads] of each microbatch), and the next model state."""
    examples = program.objective.examples(
        batch, row_keys(jax.random.fold_in(key, _EXAMPLES), batch)
    )
    # Of all microbatches together: each target has the same weight, in whichever it is.
    loss_function = microbatch_loss(program, key, examples.num_targets, constants)
    microbatches = program.config.train.microbatches
    sum_microbatches = functools.partial(_sum_microbatches, loss_function, microbatches)
    abstract = _abstract_trained(program)
    # If rows are independent, each shard of the mesh axis `data` sums the gradients of all its
    # microbatches, and only these sums are exchanged, once per step.
    has_shards = microbatches > 1 and sharding.has_data_shards()
    if has_shards and rows_are_independent(program.model, state, batch):
        sum_microbatches = sharding.sum_over_data_shards(
            sum_microbatches, abstract, exchange_dtype(program.model.config.dtype)
        )
    gathered = gather_weights(program, state.trained)
    sums, model_state = sum_microbatches(gathered, state.model_state, examples)
    loss, gradients, per_microbatch = sums
    return (loss, sharding.scatter_gradients(gradients, abstract), per_microbatch), model_state


def microbatch_loss(program, step_key, total, constants=None) -> Callable:
    """Returns (trained, model state, index, examples) → loss, (model state, metrics, loads).
    `total` is the number of targets of all microbatches.
    """
    model, objective = program.model, program.objective
    microbatches = program.config.train.microbatches

    def loss_function(trained, model_state, index, examples: Examples):
        weights_BxT = examples.weights(total)
        dropout_key = jax.random.fold_in(step_key, index)
        collections = (*SOWN, *objective.sown)
        outputs = forward(
            model, objective.weights(trained), model_state, examples, dropout_key, collections
        )
        loss = objective.cross_entropy(outputs, examples, weights_BxT, objective.z_loss)
        # A sown loss is a mean over one microbatch; the sum over all of them must be the mean over
        # the batch.
        for sown in jax.tree.leaves(outputs.collections.get("losses")):
            loss += jnp.sum(sown) / microbatches
        metrics = sown_metrics(outputs.collections)
        variables = {**trained, **(constants or {})}  # of terms, among others
        for name, term in objective.terms.items():
            value = term(outputs, variables.get(name), examples, weights_BxT)
            loss += term.weight * value
            metrics[name] = microbatches * value  # metrics are averaged over the microbatches
        model_state = outputs.collections.get("state", model_state)
        return loss, (model_state, metrics, outputs.collections.get("loads", {}))

    return loss_function


def _sum_microbatches(loss_function, microbatches: int, gathered, model_state, examples: Examples):
    """Returns (loss, gradients, [metrics, loads] of each microbatch), and the next model state."""

    def add_microbatch(carry, indexed_microbatch):
        sums, model_state = carry
        # Gradients have the dtype of the weights. The compiler removes this cast and that of the
        # model.
        trained = jax.tree.map(lambda x: x.astype(jnp.float32), gathered)
        loss_and_gradients = jax.value_and_grad(loss_function, has_aux=True)
        (loss, (model_state, *per_microbatch)), gradients = loss_and_gradients(
            trained, model_state, *indexed_microbatch
        )
        return (jax.tree.map(jnp.add, sums, (loss, gradients)), model_state), per_microbatch

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), gathered)
    carry = ((jnp.float32(0), zeros), model_state)
    indexed_microbatches = (jnp.arange(microbatches), split_microbatches(examples, microbatches))
    (sums, model_state), per_microbatch = jax.lax.scan(add_microbatch, carry, indexed_microbatches)
    return (*sums, per_microbatch), model_state


def split_microbatches(examples: Examples, microbatches: int) -> Examples:
    """(B, …) → (microbatches, B / microbatches, …)"""

    def split(x):
        # Of 6 rows, 2 microbatches have the rows 0, 2, 4 and 1, 3, 5. Each has rows of every
        # device, so that no row moves.
        return jnp.swapaxes(x.reshape(len(x) // microbatches, microbatches, *x.shape[1:]), 0, 1)

    return jax.tree.map(split, examples)


def _abstract_trained(program):
    """Returns trees of `models.Parameter`, as `TrainState.trained`."""
    return {**abstract_params(program.model), **program.objective.abstract_heads()}


def gather_weights(program, trained):
    """Returns the trained parameters, {name: tree}, unsharded for all microbatches of a step."""
    if program.config.train.microbatches == 1:
        return trained  # modules gather weights where they use them, which is faster
    abstract = _abstract_trained(program)
    return sharding.gather_stored(
        trained,
        {name: abstract[name] for name in trained},
        program.objective.weights_dtype(program.model.config),
    )


def _moved_average(state: TrainState, trained, ema: float):
    """Returns d·average + (1 − d)·parameters with d = min(ema, (1 + t)/(10 + t))."""
    if not ema:
        return {}
    # d grows from 0.1 on, so that early weights fade soon.
    rest = 1 - jnp.minimum(ema, (1 + state.step) / (10 + state.step))
    return {
        name: jax.tree.map(lambda average, x: average + rest * (x - average), tree, trained[name])
        for name, tree in state.ema.items()
    }


def _updates_applied(opt_state) -> jax.Array:
    """Returns the number of updates so far, without those skipped."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]


def _all_finite(tree) -> jax.Array:
    # Σ 0 · x, which the TPU compiler fuses with the update; jnp.isfinite takes another pass.
    return sum(jnp.sum(0 * x) for x in jax.tree.leaves(tree)) == 0
