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

_FROZEN = -0.0  # the update of a frozen parameter; x + 0.0 would change −0.0


def init_adapters(params, config: OptimizerConfig, key):
    """Returns the pairs of LoRA for the model's `params`, a tree of `Parameter`."""
    pairs = lora.init(params, config.lora_rank, config.train_only, key)
    if not pairs:
        adapted = ["/".join(p.path) for p in jax.tree.leaves(params) if lora.is_adapted(p)]
        raise _no_match(adapted, config, "a matrix of attention, MLP or dense layer")
    return pairs


def make_masks(params, heads, config: OptimizerConfig):
    """Returns a tree of masks, or None if all is trained. Raises UserError if nothing is."""
    trained_heads = jax.tree.map(lambda p: _whole_mask(p, True), heads)
    if config.lora_rank:
        return {**jax.tree.map(lambda p: _whole_mask(p, False), params), **trained_heads}
    if not config.train_only:
        return None
    masks = jax.tree.map(lambda p: _mask_of_matches(p, config.train_only), params)
    if not any(mask.any() for mask in jax.tree.leaves(masks)):
        named = [_name(p, (0,) * p.module_stacks) for p in jax.tree.leaves(params)]
        raise _no_match(named, config, "a parameter")
    return {**masks, **trained_heads}


def _whole_mask(p: Parameter, value: bool) -> np.ndarray:
    return np.full((1,) * len(p.shape), value)


def _mask_of_matches(p: Parameter, pattern: str) -> np.ndarray:
    stacks = p.shape[: p.module_stacks]
    matches = []
    for index in itertools.product(*map(range, stacks)):  # of each module in the stack
        matches.append(bool(re.search(pattern, _name(p, index))))
    further_axes = (1,) * (len(p.shape) - len(stacks))
    return np.array(matches).reshape((*stacks, *further_axes))  # () for a number


def _name(p: Parameter, index: tuple[int, ...]) -> str:
    """Returns the path and the indices in stacks: "trunk/paths/dense/kernel path=1"."""
    indices = [f"{axis}={i}" for axis, i in zip(p.axes, index)]
    return " ".join(["/".join(p.path), *indices])


def _no_match(named: list[str], config: OptimizerConfig, what: str) -> UserError:
    return UserError(
        f"config.optimizer.train_only={config.train_only!r}: matches no path of {what}; paths are "
        "such as " + ", ".join(map(repr, named[-6:]))
    )


def shardings(mesh: jax.sharding.Mesh, params, masks):
    """Frozen weights have no optimizer state: dividing them would only cost exchanges."""
    stored, whole = sharding.stored_shardings(mesh, params), sharding.param_shardings(mesh, params)
    if masks is None:
        return stored
    return jax.tree.map(
        lambda m, divided, gathered: divided if m.any() else gathered,
        {name: masks[name] for name in params},
        stored,
        whole,
    )


def weights_to_apply(trained, masks, params, config: OptimizerConfig):
    """Returns the weights to apply the model with: frozen ones without gradient, LoRA merged."""
    # `trained` has the model's weights, those of `params`, and further ones, which `params` lacks:
    # the heads of an objective, or LoRA's pairs.
    if masks is None:
        return trained
    weights = jax.tree.map(_freeze, trained, {name: masks[name] for name in trained})
    if not config.lora_rank:
        return weights
    model_weights = {name: weights[name] for name in params}
    return lora.merge(params, model_weights, weights[lora.NAME], config.lora_scale)


def _freeze(x, mask: np.ndarray):
    """Returns `x`, without gradient where the mask is False."""
    if mask.all():
        return x
    if not mask.any():
        return jax.lax.stop_gradient(x)
    return jnp.where(mask, x, jax.lax.stop_gradient(x))


def only(make: Callable, params, masks, multipliers) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer `make(params, multipliers)` for the selected parameters."""
    if masks is None:
        return make(params, multipliers)
    selected = _prune(params, masks)
    if multipliers is not None:
        multipliers = _prune(multipliers, masks)
    optimizer = optax.with_extra_args_support(make(selected, multipliers))

    def init(trained):
        return optimizer.init(_prune(trained, masks))

    def update(gradients, state, trained=None, **further):
        # `weights_to_apply` has made the gradients of frozen slices 0.
        updates, state = optimizer.update(
            _prune(gradients, masks), state, _prune(trained, masks), **further
        )
        return _fill(updates, masks, trained), state

    return optax.GradientTransformationExtraArgs(init, update)


def _prune(tree, masks):
    """Returns the tree without the parameters that are frozen as a whole."""
    if not isinstance(masks, Mapping):
        return tree
    return {
        name: _prune(tree[name], masks_below)
        for name, masks_below in masks.items()
        if _has_trained(masks_below)
    }


def _has_trained(masks) -> bool:
    return any(mask.any() for mask in jax.tree.leaves(masks))


def _fill(updates, masks, trained):
    """Returns updates of all parameters: _FROZEN where frozen, which `updates` may lack."""
    if isinstance(masks, Mapping):
        updates = updates or {}
        return {
            name: _fill(updates.get(name), masks_below, trained[name])
            for name, masks_below in masks.items()
        }
    if updates is None:
        return jnp.full_like(trained, _FROZEN)
    return jnp.where(masks, updates, _FROZEN)
