"""What modules sow in training: losses, metrics, and the loads of experts."""

from typing import Any

import flax
import jax
import jax.numpy as jnp

from smallgpt_jax.models import LanguageModel
from smallgpt_jax.models.context import Context
from smallgpt_jax.run.state import TrainState

# Variable collections that modules sow values into during training.
SOWN = ("losses", "metrics", "layer_metrics", "loads")


def sown_metrics(collections) -> dict[str, Any]:
    """Averages "metrics" over layers and paths; returns "layer_metrics" as {path of the module:
    array}, with the leading axes of the module's parameters.
    """
    values: dict[str, list] = {}
    # The value of a module in a stack has an axis of layers or paths.
    for _, name, value in _named_values(collections.get("metrics", {})):
        values.setdefault(name, []).append(jnp.mean(value))
    metrics = {name: jnp.mean(jnp.stack(layer_values)) for name, layer_values in values.items()}
    for module, name, value in _named_values(collections.get("layer_metrics", {})):
        metrics.setdefault(name, {})[module] = value
    return metrics


def _named_values(collection) -> list[tuple[str, str, jax.Array]]:
    """Returns (path of the module, name, value): the mean, if the module is applied repeatedly."""
    # flax sows a tuple with a value per call: its positions are in the path, and no DictKey.
    passes: dict[tuple, list] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(collection):
        keys = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        passes.setdefault(keys, []).append(value)
    return [
        ("/".join(keys[:-1]), keys[-1], jnp.mean(jnp.stack(values), axis=0))
        for keys, values in passes.items()
    ]


def rows_are_independent(model: LanguageModel, state: TrainState, batch) -> bool:
    """Returns whether the loss is a sum over rows, whichever rows are computed together."""

    # Dropout masks are drawn for the whole batch, so that they do not depend on the mesh. State and
    # sown values can depend on several rows together, such as the balance of a router. But biases of
    # routers are only read here, and loads of experts are sums over rows.
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
