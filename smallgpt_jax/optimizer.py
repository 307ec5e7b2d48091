"""The optimizer and its learning-rate schedule."""

import difflib
import math

import jax
import optax
from flax import linen as nn

from smallgpt_jax.errors import UserError

OPTIMIZERS = {"adamw": optax.adamw, "lion": optax.lion}
STACKED = ("layers", "path")  # logical axes along which the weights of layers and paths are stacked


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
    decayed = jax.tree_util.tree_map_with_path(
        lambda path, box: is_matrix(path, box.names), boxed_params,
        is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
    return optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        OPTIMIZERS[name](learning_rate_schedule(**schedule), b1=beta1, b2=beta2,
                         weight_decay=weight_decay, mask=decayed))


def is_matrix(path: tuple, names: tuple[str | None, ...]) -> bool:
    """Returns whether a parameter is a matrix. Weight decay applies only to matrices.

    A matrix is neither a bias nor a scale, and has two or more axes besides those in STACKED.
    """
    return path[-1].key not in ("bias", "scale") and sum(name not in STACKED for name in names) >= 2
