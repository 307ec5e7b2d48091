"""Which parameters are trained: those that config.optimizer.train_only selects, or the pairs of
LoRA.

A mask of a parameter has the length of its stacked axes (layers, paths), and 1 elsewhere. Frozen
parameters have no gradient and no update, and none of them decays. Those that are frozen as a whole
have no optimizer state.
"""

import itertools
import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import Parameter
from smallgpt_jax.optim import lora
from smallgpt_jax.optim.config import OptimizerConfig

FROZEN = -0.0  # an update; x + 0.0 would change −0.0


def init_adapters(params, config: OptimizerConfig, key):
    """Returns the pairs of LoRA for the model's `params`, a tree of `Parameter`; see
    `optim.lora`.
    """
    pairs = lora.init(params, config.lora_rank, config.train_only, key)
    if not pairs:
        adapted = ["/".join(p.path) for p in jax.tree.leaves(params) if lora.is_adapted(p)]
        raise no_match(adapted, config, "a matrix of attention, MLP or dense layer")
    return pairs


def make_masks(params, heads, config: OptimizerConfig):
    """Returns a tree of masks, or None if everything is trained. Raises UserError if nothing would
    be trained.
    """
    if config.lora_rank:
        return jax.tree.map(lambda p: np.zeros((1,) * len(p.shape), bool), params) | jax.tree.map(
            lambda p: np.ones((1,) * len(p.shape), bool), heads
        )
    if not config.train_only:
        return None
    masks = jax.tree.map(lambda p: mask(p, config.train_only), params)
    if not any(mask.any() for mask in jax.tree.leaves(masks)):
        named = [name(p, (0,) * p.module_stacks) for p in jax.tree.leaves(params)]
        raise no_match(named, config, "a parameter")
    return {**masks, **jax.tree.map(lambda p: np.ones((1,) * len(p.shape), bool), heads)}


def mask(p: Parameter, pattern: str) -> np.ndarray:
    stacks = p.shape[: p.module_stacks]
    matches = [
        bool(re.search(pattern, name(p, index))) for index in itertools.product(*map(range, stacks))
    ]
    shape = (*stacks, *(1,) * (len(p.shape) - len(stacks)))  # () for a number
    return np.array(matches).reshape(shape)


def name(p: Parameter, index: tuple[int, ...]) -> str:
    """Returns the path of a parameter, and its indices in stacks: "trunk/paths/dense/kernel
    path=1".
    """
    return " ".join(["/".join(p.path), *(f"{axis}={i}" for axis, i in zip(p.axes, index))])


def no_match(named: list[str], config: OptimizerConfig, what: str) -> UserError:
    return UserError(
        f"config.optimizer.train_only={config.train_only!r}: matches no path of {what}; paths are "
        "such as " + ", ".join(map(repr, named[-6:]))
    )


def shardings(mesh: jax.sharding.Mesh, params, masks):
    """Frozen weights have no optimizer state, so dividing them would save little and exchange them
    in every step.
    """
    stored, whole = sharding.stored_shardings(mesh, params), sharding.param_shardings(mesh, params)
    if masks is None:
        return stored
    return jax.tree.map(
        lambda m, divided, gathered: divided if m.any() else gathered,
        {name: masks[name] for name in params},
        stored,
        whole,
    )


def weights_of(masks, params, config: OptimizerConfig) -> Callable:
    """Returns the function trained parameters → the model's: frozen ones without gradient, LoRA's
    pairs merged.
    """

    def weights(trained):
        if masks is None:
            return trained
        frozen = jax.tree.map(
            lambda x, m: (
                x
                if m.all()
                else jnp.where(m, x, jax.lax.stop_gradient(x))
                if m.any()
                else jax.lax.stop_gradient(x)
            ),
            trained,
            {name: masks[name] for name in trained},
        )
        if not config.lora_rank:
            return frozen
        return lora.merge(
            params, {name: frozen[name] for name in params}, frozen[lora.NAME], config.lora_scale
        )

    return weights


def only(make: Callable, params, masks, multipliers) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer `make(params, multipliers)` for the selected parameters."""
    if masks is None:
        return make(params, multipliers)
    optimizer = optax.with_extra_args_support(
        make(prune(params, masks), multipliers and prune(multipliers, masks))
    )

    def update(gradients, state, trained=None, **further):
        # `weights_of` has made the gradients of frozen slices 0
        updates, state = optimizer.update(
            prune(gradients, masks), state, prune(trained, masks), **further
        )
        return fill(updates, masks, trained), state

    return optax.GradientTransformationExtraArgs(
        lambda trained: optimizer.init(prune(trained, masks)), update
    )


def prune(tree, masks):
    """Returns the tree without the parameters that are frozen as a whole."""
    if not isinstance(masks, Mapping):
        return tree
    return {
        name: prune(tree[name], below)
        for name, below in masks.items()
        if any(mask.any() for mask in jax.tree.leaves(below))
    }


def fill(updates, masks, trained):
    """Returns updates of all parameters."""
    if isinstance(masks, Mapping):
        return {
            name: fill((updates or {}).get(name), below, trained[name])
            for name, below in masks.items()
        }
    return jnp.full_like(trained, FROZEN) if updates is None else jnp.where(masks, updates, FROZEN)
