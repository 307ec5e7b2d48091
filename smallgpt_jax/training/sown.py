"""What modules sow in training: losses, metrics, and the loads of experts."""

from typing import Any

import jax
import jax.numpy as jnp

# Variable collections that modules sow values into during training.
SOWN = ("losses", "metrics", "layer_metrics", "loads")


def sown_metrics(collections) -> dict[str, Any]:
    """Averages "metrics" over layers and paths; returns "layer_metrics" as {path of the module:
    array}, with the leading axes of the module's parameters.
    """
    values: dict[str, list] = {}
    for _, name, value in _named_values(collections.get("metrics", {})):
        values.setdefault(name, []).append(jnp.mean(value))
    metrics = {name: jnp.mean(jnp.stack(layer_values)) for name, layer_values in values.items()}
    for module, name, value in _named_values(collections.get("layer_metrics", {})):
        metrics.setdefault(name, {})[module] = value
    return metrics


def _named_values(collection) -> list[tuple[str, str, jax.Array]]:
    """Returns (path of the module, name, value); the values of a module applied several times are
    averaged.
    """
    passes: dict[tuple, list] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(collection):
        keys = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        passes.setdefault(keys, []).append(value)
    return [
        ("/".join(keys[:-1]), keys[-1], jnp.mean(jnp.stack(values), axis=0))
        for keys, values in passes.items()
    ]
