"""Muon: the momentum of a weight matrix, made nearly orthogonal, is its update."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from smallgpt_jax.models import Parameter
from smallgpt_jax.optim.config import OptimizerConfig

# Logical axes of embeddings, of the head, and of the routers of experts
_NOT_MUON = ("vocab", "position", "router")
_MUON_BETA = 0.95  # decay rate of the momentum, as in github.com/KellerJordan/Muon
# usual RMS of AdamW's updates before the learning rate (Liu et al., arXiv 2502.16982, section 2.2)
_ADAMW_RMS = 0.2


def muon(params, config: OptimizerConfig) -> optax.GradientTransformation:
    """Uses Adam for the parameters that `uses_muon` does not select."""
    labels = jax.tree.map(lambda p: "muon" if uses_muon(p) else "adam", params)
    return optax.partition(
        {"muon": _scale_by_muon(params), "adam": optax.scale_by_adam(config.beta1, config.beta2)},
        labels,
    )


def uses_muon(p: Parameter) -> bool:
    return p.is_matrix and not {None, *_NOT_MUON} & set(p.axes)


def _scale_by_muon(params) -> optax.GradientTransformation:
    """Returns the transformation of gradients g into Muon's updates, without decay and learning
    rate. Layers, paths, experts, queries, keys and values are separate matrices.
    """

    def matrix_axes(updates):
        def of_parameter(p, x):  # one array, or QKV
            return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(*p.matrix_axes), x)

        return jax.tree.map(of_parameter, params, updates)

    # so that AdamW's learning rates and weight decay fit
    def scale(x, axes: optax.contrib.MuonDimensionNumbers):
        fan_in = math.prod(x.shape[i] for i in axes.reduction_axis)
        fan_out = math.prod(x.shape[i] for i in axes.output_axis)
        return _ADAMW_RMS * math.sqrt(max(fan_in, fan_out)) * x

    def split(tree):
        def of_parameter(p, x):  # one array, or optax.MaskedNode for a parameter of Adam
            return jax.tree.map(lambda x: _split_qkv(x, p.axes), x)

        return jax.tree.map(of_parameter, params, tree)

    def join(p, x):
        return jnp.concatenate(x, axis=p.axes.index("qkv")) if isinstance(x, QKV) else x

    # Momentum m ← β·m + (1 − β)·g; Nesterov's U = β·m + (1 − β)·g, both terms corrected for bias;
    # five Newton–Schulz steps from U/‖U‖ (Jordan et al., github.com/KellerJordan/Muon).
    directions = optax.chain(
        optax.contrib.scale_by_muon(beta=_MUON_BETA, weight_dimension_numbers=matrix_axes),
        optax.stateless(lambda updates, _: jax.tree.map(scale, updates, matrix_axes(updates))),
    )

    def update(updates, state, _=None):
        updates, state = directions.update(split(updates), state)
        return jax.tree.map(join, params, updates), state

    return optax.GradientTransformation(lambda weights: directions.init(split(weights)), update)


class QKV(NamedTuple):
    """The parts of a fused projection, (…, D, G, H/G + 2, K); see `QKVProjection`."""

    queries: Any  # (…, D, G, H/G, K)
    keys: Any  # (…, D, G, 1, K)
    values: Any  # (…, D, G, 1, K)


def _split_qkv(x, names: tuple[str, ...]):
    if "qkv" not in names:
        return x
    axis = names.index("qkv")
    return QKV(*jnp.split(x, (x.shape[axis] - 2, x.shape[axis] - 1), axis))
