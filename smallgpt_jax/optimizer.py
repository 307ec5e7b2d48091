"""The optimizer and its learning-rate schedule."""

import difflib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import linen as nn

from smallgpt_jax.errors import UserError

STACKED = ("layers", "path", "expert")  # logical axes along which the weights of layers, paths and experts are stacked


def learning_rate_schedule(
    *, learning_rate: float, warmup_steps: int, decay_steps: int, final_learning_rate: float,
) -> optax.Schedule:
    """Returns a schedule of linear warmup from 0 over `warmup_steps` and cosine decay until step `decay_steps`.

    After `decay_steps`, the learning rate stays at `final_learning_rate`. Raises UserError for invalid values.
    """
    for name, value in (("learning_rate", learning_rate), ("final_learning_rate", final_learning_rate),
                        ("warmup_steps", warmup_steps)):
        if not 0 <= value < math.inf:
            raise UserError(f"config.optimizer.{name}={value}: must be a finite number, at least 0")
    if decay_steps <= warmup_steps:
        raise UserError(f"config.optimizer.decay_steps={decay_steps}: must be more than "
                        f"config.optimizer.warmup_steps={warmup_steps}")
    return optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup_steps, decay_steps, final_learning_rate)


def make_optimizer(
    boxed_params, *, name: str, weight_decay: float, beta1: float, beta2: float, clip_norm: float,
    **schedule,
) -> optax.GradientTransformation:
    """Returns the optax transformation for the fields of the config's `optimizer` group.

    `boxed_params` are the parameters, or their shapes, with axis names. Weight decay applies only to the parameters
    that `is_matrix` selects.
    Raises UserError for invalid values.
    """
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        raise UserError(f"config.optimizer.name={name!r}: must be one of {', '.join(OPTIMIZERS)}"
                        + (f"; did you mean {near[0]!r}?" if near else ""))
    for field, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= value < 1:
            raise UserError(f"config.optimizer.{field}={value}: must be at least 0 and below 1")
    for field, value in (("weight_decay", weight_decay), ("clip_norm", clip_norm)):
        if not 0 <= value < math.inf:
            raise UserError(f"config.optimizer.{field}={value}: must be a finite number, at least 0")
    decayed = map_names(is_matrix, boxed_params)
    return optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        # This chain has the same state as optax.adamw and optax.lion, which older versions used.
        optax.chain(OPTIMIZERS[name](boxed_params, beta1, beta2), optax.add_decayed_weights(weight_decay, decayed),
                    optax.scale_by_learning_rate(learning_rate_schedule(**schedule))))


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


def muon(boxed_params, beta1: float, beta2: float) -> optax.GradientTransformation:
    """Returns Muon for the parameters that `uses_muon` selects, and Adam for the others."""
    names = {path: box.names for path, box in jax.tree_util.tree_leaves_with_path(
        boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))}
    labels = map_names(lambda path, names: "muon" if uses_muon(path, names) else "adam", boxed_params)
    return optax.partition({"muon": scale_by_muon(names), "adam": optax.scale_by_adam(beta1, beta2)}, labels)


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


# {name: function (parameters with axis names, beta1, beta2) → transformation of gradients into updates}
OPTIMIZERS = {
    "adamw": lambda _, beta1, beta2: optax.scale_by_adam(beta1, beta2),
    "lion": lambda _, beta1, beta2: optax.scale_by_lion(beta1, beta2),
    "muon": muon,
}
