"""Loss, training step and evaluation step: pure functions of arrays, which `program.py` compiles."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax

from smallgpt_jax.devices import sharding
from smallgpt_jax.devices.platform import exchange_dtype
from smallgpt_jax.models import LanguageModel, init_variables
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.router import move_biases
from smallgpt_jax.ops.cross_entropy import cross_entropy
from smallgpt_jax.run.state import TrainState

# Variable collections that modules sow values into during training.
SOWN = ("losses", "metrics", "layer_metrics", "loads")
FEATURES = "features"  # the collection that blocks sow their outputs into; collected only for a teacher


def init_state(model: LanguageModel, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Returns the state before the first update."""
    variables = init_variables(model, seed)
    params = variables["params"]
    return TrainState(jnp.int32(0), params, optimizer.init(params), variables.get("state", {}))


def weighted_loss(params, model_state, model: LanguageModel, batch, weights_BxT, loss_chunks: int, *,
                  z_loss: float = 0.0, dropout_key=None, sown=SOWN):
    """Returns a batch's weighted sum of losses, in nats, and the variable collections that modules wrote to.

    `batch` is a `data.packing.Batch` of arrays. With a `dropout_key`, the model is applied in training mode, and the
    collections are "state" and those in `sown`.
    """
    inputs_BxT = batch.tokens_BxT1[:, :-1]
    targets_BxT = batch.tokens_BxT1[:, 1:] if batch.targets_BxT is None else batch.targets_BxT
    trains = dropout_key is not None
    context = Context(train=trains, segment_ids_BxT=batch.segment_ids_BxT, loss_mask_BxT=batch.loss_mask_BxT)

    def loss(model):
        return cross_entropy(
            model.hidden(inputs_BxT, context), model.head_weight(), targets_BxT, weights_BxT, loss_chunks, z_loss)

    return model.apply({"params": params, "state": model_state}, method=loss,
                       rngs={"dropout": dropout_key} if trains else {},
                       mutable=["state", *sown] if trains else [])


def target_weights(batch, total):
    """Returns the weight of each target, (B, T) float32: 1/total if the target is in the loss mask, otherwise 0."""
    shape = batch.tokens_BxT1[:, 1:].shape
    loss_mask_BxT = jnp.ones(shape) if batch.loss_mask_BxT is None else batch.loss_mask_BxT
    return loss_mask_BxT.astype(jnp.float32) / total


def feature_distance(features, teacher: LanguageModel, teacher_variables, batch, weights_BxT):
    """Returns the weighted mean-square distance between a model's features and those of its teacher.

    The features are the outputs of all blocks; `features` contains those of the model. As in PELA (Guo et al., arXiv
    2310.10700), squared differences are averaged over the width. They are then multiplied by `weights_BxT`, summed over
    the positions, and averaged over the blocks. The teacher is applied without dropout.
    """
    _, collections = teacher.apply(
        teacher_variables, batch.tokens_BxT1[:, :-1], Context(segment_ids_BxT=batch.segment_ids_BxT), method="hidden",
        mutable=[FEATURES])

    def distances(x, y):
        """Returns the distance of each block, (L,); x and y are (…, B, T, D). Stacked blocks have leading axes."""
        squares_LxBxT = jnp.mean(jnp.square(x.astype(jnp.float32) - y.astype(jnp.float32)), axis=-1).reshape(
            -1, *weights_BxT.shape)
        return jnp.sum(squares_LxBxT * weights_BxT[None], axis=(1, 2))

    return jnp.mean(jnp.concatenate(jax.tree.leaves(jax.tree.map(distances, features, collections[FEATURES]))))


def split_microbatches(batch, microbatches: int):
    """Returns (B, …) arrays split into (microbatches, B / microbatches, …).

    Each microbatch contains rows of every device, so that no row moves to another device.
    """
    return jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(len(x) // microbatches, microbatches, *x.shape[1:]), 0, 1), batch)


def train_step(
    state: TrainState, batch, teacher_variables=None, *, model: LanguageModel, optimizer, schedule, microbatches: int,
    loss_chunks: int, z_loss: float = 0.0, seed: int, teacher: LanguageModel | None = None, feature_weight: float = 0.0,
):
    """Returns the next state and the metrics of one update on a batch (`data.packing.Batch` of arrays).

    The batch is split into `microbatches` parts, whose gradients are summed in float32. If the rows of a batch are
    independent, each shard of the mesh axis `data` first sums its own gradients. Only these sums are exchanged.

    If loss or gradient is not finite, the update is skipped: parameters, optimizer state and model state do not change.

    With a `teacher`, `feature_weight` · `feature_distance` is added to the loss.

    Metrics:

    - loss: mean over the targets in the loss mask, in nats, plus the values that modules sowed into "losses"
    - feature_distance: only with a teacher
    - grad_norm: norm of the gradient before clipping
    - learning_rate
    - is_finite: whether loss, gradient and updated parameters are finite. If only the updated parameters are not, the
      update is kept, because undoing it would take a second pass over parameters and optimizer state.
    - skipped: number of updates skipped so far
    - values that modules sowed into "metrics" and "layer_metrics", averaged over the microbatches
    """
    step_key = jax.random.fold_in(jax.random.key(seed), state.step)
    total = batch.tokens_BxT1[:, 1:].size if batch.loss_mask_BxT is None else jnp.sum(batch.loss_mask_BxT)

    def microbatch_loss(params, model_state, index, microbatch):
        weights_BxT = target_weights(microbatch, total)
        loss, collections = weighted_loss(
            params, model_state, model, microbatch, weights_BxT, loss_chunks, z_loss=z_loss,
            dropout_key=jax.random.fold_in(step_key, index), sown=(*SOWN, FEATURES) if teacher else SOWN)
        # A sown loss is a mean over one microbatch. It is divided by the number of microbatches, so that the sum over
        # the microbatches is the mean over the batch.
        for sown in jax.tree.leaves(collections.get("losses")):
            loss += jnp.sum(sown) / microbatches
        metrics = sown_metrics(collections)
        if teacher:
            distance = feature_distance(collections[FEATURES], teacher, teacher_variables, microbatch, weights_BxT)
            loss += feature_weight * distance
            metrics["feature_distance"] = microbatches * distance  # metrics are averaged over the microbatches
        return loss, (collections.get("state", model_state), metrics, collections.get("loads", {}))

    def sum_microbatches(params, model_state, batch):
        def add_microbatch(carry, indexed_microbatch):
            sums, model_state = carry
            (loss, (model_state, *sown)), gradients = jax.value_and_grad(microbatch_loss, has_aux=True)(
                params, model_state, *indexed_microbatch)
            return (jax.tree.map(jnp.add, sums, (loss, gradients)), model_state), sown

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        indexed_microbatches = (jnp.arange(microbatches), split_microbatches(batch, microbatches))
        return jax.lax.scan(add_microbatch, (zero, model_state), indexed_microbatches)

    if microbatches > 1 and sharding.has_data_shards() and rows_are_independent(model, state, batch):
        sum_microbatches = sharding.sum_over_data_shards(sum_microbatches, exchange_dtype(model.config.dtype))
    ((loss, gradients), model_state), (sown, loads) = sum_microbatches(state.params, state.model_state, batch)
    model_state = move_biases(model_state, loads, model.config.expert_bias_rate)

    grad_norm = optax.tree.norm(gradients)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    updated = (optax.apply_updates(state.params, updates), opt_state, model_state)
    is_applied = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    params, opt_state, model_state = jax.tree.map(
        lambda new, old: jnp.where(is_applied, new, old), updated, (state.params, state.opt_state, state.model_state))
    # The number of updates applied so far; skipped updates do not advance the schedule.
    count = optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")[0][1]
    metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": schedule(count),
               "is_finite": is_applied & all_finite(params), "skipped": state.step + 1 - count - is_applied}
    if taken := metrics.keys() & sown.keys():
        raise ValueError(f"the model sows a metric with a name that is in use: {', '.join(taken)}; rename it")
    metrics |= jax.tree.map(lambda x: jnp.mean(x, axis=0), sown)
    return TrainState(state.step + 1, params, opt_state, model_state), metrics


def rows_are_independent(model: LanguageModel, state: TrainState, batch) -> bool:
    """Returns whether the loss of a batch is a sum over its rows.

    This is so if the model has no dropout and no state, and sows nothing. Dropout masks are drawn for the whole batch,
    so that they do not depend on the mesh. State and sown values can depend on several rows together, for example the
    balance of a router.
    """
    def collections(params):
        return model.apply({"params": params, "state": state.model_state}, batch.tokens_BxT1[:, :-1],
                           Context(train=True), method="hidden", mutable=["state", *SOWN])[1]

    try:
        return not jax.tree.leaves(jax.eval_shape(collections, state.params))
    except flax.errors.InvalidRngError:  # the model draws random numbers
        return False


def all_finite(tree) -> jax.Array:
    """Returns whether every element of every array is finite.

    The result is computed from Σ 0 · x, which is NaN if any x is not finite. The TPU compiler fuses this sum with the
    weight update; jnp.isfinite would take another pass over the weights.
    """
    return sum(jnp.sum(0 * x) for x in jax.tree.leaves(tree)) == 0


def sown_metrics(collections) -> dict[str, Any]:
    """Returns the values that modules sowed into "metrics" and "layer_metrics", by metric name.

    Values of "metrics" are averaged over layers and paths. Values of "layer_metrics" are {path of the module: array}.
    Like the module's parameters, these arrays have leading axes for stacked layers and paths.
    """
    values: dict[str, list] = {}
    for _, name, value in named_values(collections.get("metrics", {})):
        values.setdefault(name, []).append(jnp.mean(value))
    metrics = {name: jnp.mean(jnp.stack(layer_values)) for name, layer_values in values.items()}
    for module, name, value in named_values(collections.get("layer_metrics", {})):
        metrics.setdefault(name, {})[module] = value
    return metrics


def named_values(collection) -> list[tuple[str, str, jax.Array]]:
    """Returns (path of the module, name, value) of each sown value.

    If a module is applied several times in a forward pass, its values are averaged.
    """
    passes: dict[tuple, list] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(collection):
        keys = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        passes.setdefault(keys, []).append(value)
    return [("/".join(keys[:-1]), keys[-1], jnp.mean(jnp.stack(values), axis=0)) for keys, values in passes.items()]


def eval_step(params, model_state, batch, *, model: LanguageModel, microbatches: int, loss_chunks: int):
    """Returns the summed loss, in nats, over the targets in the loss mask, and the number of these targets.

    The batch is split into `microbatches`, as in training, to limit the memory of activations.
    """
    def add_microbatch(sums, microbatch):
        loss, _ = weighted_loss(params, model_state, model, microbatch, target_weights(microbatch, 1), loss_chunks)
        return (sums[0] + loss, sums[1] + jnp.sum(microbatch.loss_mask_BxT)), None

    return jax.lax.scan(add_microbatch, (jnp.float32(0), jnp.int32(0)), split_microbatches(batch, microbatches))[0]
