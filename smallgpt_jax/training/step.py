"""The training step: a pure function of arrays, which `program.py` compiles."""

import functools
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import optax

from smallgpt_jax.devices import sharding
from smallgpt_jax.devices.platform import exchange_dtype
from smallgpt_jax.models import LanguageModel, abstract_params, init_variables
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.router import load_metrics, move_biases
from smallgpt_jax.objectives.examples import Examples, row_keys
from smallgpt_jax.objectives.objective import Objective, forward
from smallgpt_jax.optim.transfer import scale_initial
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.training.sown import SOWN, sown_metrics

# Folded into the key of a step for its examples; microbatches have the numbers from 0.
EXAMPLES = 2**32 - 1


class Hyperparameters(NamedTuple):
    """Inputs of an update, so that runs with other values share the compiled step."""

    seed: jax.Array  # uint32
    learning_rate: jax.Array  # at this update
    weight_decay: jax.Array


def init_state(
    model: LanguageModel,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    seed,
    multipliers=None,
    ema: float = 0.0,
) -> TrainState:
    variables = init_variables(model, seed)
    params = scale_initial(variables["params"], multipliers)
    heads = scale_initial(objective.init_heads(seed), multipliers)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=optimizer.init({**params, **heads}),
        model_state=variables.get("state", {}),
        heads=heads,
        ema=jax.tree.map(jnp.copy, params) if ema else {},
    )


def split_microbatches(batch, microbatches: int):
    """(B, …) → (microbatches, B / microbatches, …), with rows of every device, so that no row
    moves.
    """

    def split(x):
        return jnp.swapaxes(x.reshape(len(x) // microbatches, microbatches, *x.shape[1:]), 0, 1)

    return jax.tree.map(split, batch)


def train_step(
    state: TrainState,
    batch,
    hyperparameters: Hyperparameters,
    constants=None,
    *,
    model: LanguageModel,
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    microbatches: int,
    ema: float = 0.0,
):
    """Returns the next state and the metrics of one update.

    The batch is split into `microbatches` parts, whose gradients are summed in float32. If the rows
    of a batch are independent, each shard of the mesh axis `data` first sums its own gradients.
    Only these sums are exchanged. Each device then updates the weights that it stores.

    If loss or gradient is not finite, parameters, optimizer state and model state do not change.
    Metrics:

    - loss: mean over the targets in the loss mask, in nats, plus the objective's terms and values
      sown into "losses"
    - the objective's terms, by name
    - values sown into "metrics" and "layer_metrics", averaged over the microbatches; for experts,
      also `load_metrics`
    - grad_norm (before clipping), learning_rate, skipped (number of updates skipped so far)
    - is_finite: loss, gradient and updated parameters. If only the updated parameters are not
      finite, the update is kept, because undoing it would take a second pass over parameters and
      optimizer state.
    """
    key = jax.random.fold_in(jax.random.key(hyperparameters.seed), state.step)
    examples = objective.examples(batch, row_keys(jax.random.fold_in(key, EXAMPLES), batch))
    loss_function = functools.partial(
        microbatch_loss,
        model=model,
        objective=objective,
        constants=constants,
        step_key=key,
        total=examples.num_targets,
        microbatches=microbatches,
    )
    sums = functools.partial(_sum_microbatches, loss_function, microbatches)
    abstract = {**abstract_params(model), **objective.abstract_heads()}
    has_shards = microbatches > 1 and sharding.has_data_shards()
    if has_shards and _rows_are_independent(model, state, batch):
        sums = sharding.sum_over_data_shards(sums, abstract, exchange_dtype(model.config.dtype))
    weights = gather_weights(state.trained, abstract, model, objective, microbatches)
    (loss, gradients, (sown, loads)), model_state = sums(weights, state.model_state, examples)
    gradients = sharding.scatter_gradients(gradients, abstract)
    model_state = move_biases(model_state, loads, model.config.expert_bias_rate)

    grad_norm = optax.tree.norm(gradients)
    updates, opt_state = optimizer.update(
        gradients,
        state.opt_state,
        state.trained,
        learning_rate=hyperparameters.learning_rate,
        weight_decay=hyperparameters.weight_decay,
    )
    trained = optax.apply_updates(state.trained, updates)
    average = _moved_average(state, trained, ema)
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
        "skipped": state.step + 1 - _updates_applied(state.opt_state) - is_applied,
        **load_metrics(loads),
    }
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


def gather_weights(
    trained, abstract, model: LanguageModel, objective: Objective, microbatches: int
):
    """With one microbatch, nothing is gathered here: modules gather weights where they use them,
    which is faster.
    """
    if microbatches == 1:
        return trained
    return sharding.gather_stored(trained, abstract, objective.weights_dtype(model.config))


def _moved_average(state: TrainState, trained, ema: float):
    """Returns d·average + (1 − d)·parameters with d = min(ema, (1 + t)/(10 + t)), so that early
    weights fade soon.
    """
    if not ema:
        return {}
    rest = 1 - jnp.minimum(ema, (1 + state.step) / (10 + state.step))
    return {
        name: jax.tree.map(lambda average, x: average + rest * (x - average), tree, trained[name])
        for name, tree in state.ema.items()
    }


def _updates_applied(opt_state) -> jax.Array:
    """Returns the number of updates so far, without those skipped."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]


def _sum_microbatches(loss_function, microbatches: int, trained, model_state, examples: Examples):
    """Returns (loss, gradients, [metrics, loads] of each microbatch), and the next model state."""

    def add_microbatch(carry, indexed_microbatch):
        sums, model_state = carry
        # Gradients have the dtype of the weights. The compiler removes this cast and that of the
        # model.
        (loss, (model_state, *sown)), gradients = jax.value_and_grad(loss_function, has_aux=True)(
            jax.tree.map(lambda x: x.astype(jnp.float32), trained), model_state, *indexed_microbatch
        )
        return (jax.tree.map(jnp.add, sums, (loss, gradients)), model_state), sown

    zero = (jnp.float32(0), jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained))
    indexed_microbatches = (jnp.arange(microbatches), split_microbatches(examples, microbatches))
    (sums, model_state), sown = jax.lax.scan(
        add_microbatch, (zero, model_state), indexed_microbatches
    )
    return (*sums, sown), model_state


def microbatch_loss(
    trained,
    model_state,
    index,
    examples: Examples,
    *,
    model: LanguageModel,
    objective: Objective,
    constants,
    step_key,
    total,
    microbatches: int,
):
    """Returns loss and (model state, metrics, loads); `total` is the number of targets of all
    microbatches.
    """
    weights_BxT = examples.weights(total)
    outputs = forward(
        model,
        objective.weights(trained),
        model_state,
        examples,
        jax.random.fold_in(step_key, index),
        (*SOWN, *objective.sown),
    )
    collections = outputs.collections
    loss = objective.cross_entropy(outputs, examples, weights_BxT, objective.z_loss)
    # A sown loss is a mean over one microbatch; the sum over all of them must be the mean over the
    # batch.
    for sown in jax.tree.leaves(collections.get("losses")):
        loss += jnp.sum(sown) / microbatches
    metrics = sown_metrics(collections)
    variables = {**trained, **(constants or {})}  # of terms, among others
    for name, term in objective.terms.items():
        value = term(outputs, variables.get(name), examples, weights_BxT)
        loss += term.weight * value
        metrics[name] = microbatches * value  # metrics are averaged over the microbatches
    return loss, (collections.get("state", model_state), metrics, collections.get("loads", {}))


def _rows_are_independent(model: LanguageModel, state: TrainState, batch) -> bool:
    """Returns whether the loss is a sum over rows: the model has no dropout, no state but the
    biases of routers, which it only reads, and sows nothing but loads of experts, which are sums
    over rows.

    Dropout masks are drawn for the whole batch, so that they do not depend on the mesh. Other state
    and sown values can depend on several rows together, for example the balance of a router.
    """

    def collections(params):
        return model.apply(
            {"params": params, "state": state.model_state},
            batch.tokens_BxT1[:, :-1],
            Context(train=True),
            method="hidden",
            mutable=["state", *SOWN],
        )[1]

    try:
        sown = jax.eval_shape(collections, state.params)
    except flax.errors.InvalidRngError:  # the model draws random numbers
        return False
    loads = flax.traverse_util.flatten_dict(sown.pop("loads", {}))
    states = flax.traverse_util.flatten_dict(sown.pop("state", {}))
    biases = {(*path[:-1], "bias") for path in loads}
    return not jax.tree.leaves(sown) and states.keys() <= biases


def _all_finite(tree) -> jax.Array:
    """Tests Σ 0 · x, which the TPU compiler fuses with the weight update; jnp.isfinite takes
    another pass.
    """
    return sum(jnp.sum(0 * x) for x in jax.tree.leaves(tree)) == 0
