"""The optimizer."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import linen as nn

from smallgpt_jax.run.config import OptimizerConfig
from smallgpt_jax.training.learning_rate import learning_rate_schedule

STACKED = ("layers", "path", "expert")  # logical axes along which the weights of layers, paths and experts are stacked


def make_optimizer(boxed_params, config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the optax transformation of the config.

    `boxed_params` are the parameters, or their shapes, with axis names. Weight decay applies only to the parameters
    that `is_matrix` selects. Raises UserError for invalid values.
    """
    config.validate_choice("name", OPTIMIZERS)
    decayed = map_names(is_matrix, boxed_params)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        OPTIMIZERS[config.name](boxed_params, config), optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(learning_rate_schedule(config)))


def map_names(function, boxed_params):
    """Returns the tree of function(path, axis names) of each parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, box: function(path, box.names), boxed_params,
        is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))


def is_matrix(path: tuple, names: tuple[str | None, ...]) -> bool:
    """Returns whether a parameter is a matrix. Weight decay applies only to matrices.

    A matrix is neither a bias nor a scale, and has two or more axes besides those in STACKED.
    """
    return path[-1].key not in ("bias", "scale") and sum(name not in STACKED for name in names) >= 2


# Muon

NOT_MUON = ("vocab", "position", "router")  # logical axes of embeddings, of the head, and of the routers of experts
MUON_BETA = 0.95  # decay rate of the momentum, as in github.com/KellerJordan/Muon
ADAMW_RMS = 0.2  # usual RMS of AdamW's updates before the learning rate (Liu et al., arXiv 2502.16982, section 2.2)


def muon(boxed_params, config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns Muon for the parameters that `uses_muon` selects, and Adam for the others."""
    names = {path: box.names for path, box in jax.tree_util.tree_leaves_with_path(
        boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))}
    labels = map_names(lambda path, names: "muon" if uses_muon(path, names) else "adam", boxed_params)
    return optax.partition(
        {"muon": scale_by_muon(names), "adam": optax.scale_by_adam(config.beta1, config.beta2)}, labels)


def uses_muon(path: tuple, names: tuple[str | None, ...]) -> bool:
    """Returns whether Muon updates a parameter: a matrix with axis names, none of which is in NOT_MUON."""
    return is_matrix(path, names) and not {None, *NOT_MUON} & set(names)


def scale_by_muon(names: dict[tuple, tuple[str, ...]]) -> optax.GradientTransformation:
    """Returns the transformation of gradients into Muon's updates, without decay and learning rate.

    1. Momentum of the gradients g: m ← β·m + (1 − β)·g.
    2. Nesterov's momentum: U = β·m + (1 − β)·g. Both terms are corrected for their bias.
    3. Five Newton–Schulz steps, starting from U/‖U‖, bring the singular values near 1 (Jordan et al.,
       github.com/KellerJordan/Muon).
    4. Multiplication by 0.2·√max(fan_in, fan_out) gives the updates the RMS of AdamW's updates. They can then use
       AdamW's learning rates and weight decay (Liu et al., arXiv 2502.16982, section 2.2).

    Layers, paths, experts, queries, keys and values are separate matrices. `names` maps the path of each parameter to
    its axis names.
    """
    def matrix_axes(updates):
        return jax.tree_util.tree_map_with_path(
            lambda path, x: jax.tree.map(lambda _: dimension_numbers(names[path]), x), updates, is_leaf=is_qkv)

    def scale(x, axes: optax.contrib.MuonDimensionNumbers):
        fans = (math.prod(x.shape[i] for i in group) for group in axes)
        return ADAMW_RMS * math.sqrt(max(fans)) * x

    def split(tree):  # optax.tree_map_params replaces the tree by one placeholder, whose path is not in `names`
        return jax.tree_util.tree_map_with_path(lambda path, x: split_qkv(x, names.get(path, ())), tree)

    def join(path, x):
        return jnp.concatenate(x, axis=names[path].index("qkv")) if is_qkv(x) else x

    directions = optax.chain(
        optax.contrib.scale_by_muon(beta=MUON_BETA, weight_dimension_numbers=matrix_axes),
        optax.stateless(lambda updates, _: jax.tree.map(scale, updates, matrix_axes(updates))))

    def update(updates, state, params=None):
        updates, state = directions.update(split(updates), state)
        return jax.tree_util.tree_map_with_path(join, updates, is_leaf=is_qkv), state

    return optax.GradientTransformation(lambda params: directions.init(split(params)), update)


def dimension_numbers(names: tuple[str, ...]) -> optax.contrib.MuonDimensionNumbers:
    """Returns which axes of a weight are the inputs and which are the outputs of its matrices.

    Axes in STACKED are neither. By default, the last axis is the output, and all others are inputs. If an axis "embed"
    or "rank" comes before the last axis, all axes after it are outputs.
    """
    axes = [i for i, name in enumerate(names) if name not in STACKED]
    inputs = next((n for n, i in enumerate(axes[:-1], start=1) if names[i] in ("embed", "rank")),
                  len(axes) - 1)
    return optax.contrib.MuonDimensionNumbers(tuple(axes[:inputs]), tuple(axes[inputs:]))


class QKV(NamedTuple):
    """The parts of a fused projection of shape (…, D, G, H/G + 2, K), see `models.attention.QKVProjection`."""

    queries: Any  # (…, D, G, H/G, K)
    keys: Any  # (…, D, G, 1, K)
    values: Any  # (…, D, G, 1, K)


def is_qkv(x) -> bool:
    return isinstance(x, QKV)


def split_qkv(x, names: tuple[str, ...]):
    """Returns the parts of a weight with an axis named "qkv", and other weights unchanged."""
    if "qkv" not in names:
        return x
    axis = names.index("qkv")
    return QKV(*jnp.split(x, (x.shape[axis] - 2, x.shape[axis] - 1), axis))


# {name: function (parameters with axis names, config) → transformation of gradients into updates}
OPTIMIZERS = {
    "adamw": lambda _, config: optax.scale_by_adam(config.beta1, config.beta2),
    "lion": lambda _, config: optax.scale_by_lion(config.beta1, config.beta2),
    "muon": muon,
}
