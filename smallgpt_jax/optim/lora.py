"""LoRA (Hu et al., arXiv 2106.09685): W + (alpha / rank)·A·B in place of W. Only A and B are
trained.

Each matrix of attention, MLPs and dense layers has a pair A (*stack, *inputs, rank), B (*stack,
rank, *outputs), where `stack` are the axes along which layers and paths are stacked. So has the
output head, if a pattern names it. The pairs are a tree beside the model's parameters, which is
merged into them before the model is applied, so that layers do not know of it.
"""

import math
import re

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.models.initializers import normal, zeros
from smallgpt_jax.models.parameters import MODULE_STACKS, STACKS, Parameter

NAME = "lora"  # of the tree, among the heads of a train state
HEAD = ("head",)  # exists if it is not the embedding
# Axes of what is no matrix of attention, MLP or dense layer; modules may be stacked.
_NOT_ADAPTED = {None, "vocab", "position", "router", "conv_time", *STACKS} - {*MODULE_STACKS}


def is_adapted(p: Parameter, pattern: str = "") -> bool:
    if not p.is_matrix or not re.search(pattern, "/".join(p.path)):
        return False
    is_named_head = bool(pattern) and p.path == HEAD
    return is_named_head or not _NOT_ADAPTED & set(p.axes)


def init(params, rank: int, pattern: str, key):
    """Returns the pairs for the parameters that match `pattern`, with axis names."""
    pairs = {}
    for number, p in enumerate(jax.tree.leaves(params)):
        if is_adapted(p, pattern):
            pairs[p.path] = _init_pair(p, rank, jax.random.fold_in(key, number))
    return flax.traverse_util.unflatten_dict(pairs)


def _init_pair(p: Parameter, rank: int, key):
    inputs, outputs = p.matrix_axes
    stack, stack_axes = p.shape[: p.module_stacks], p.axes[: p.module_stacks]
    input_shape, input_axes = [p.shape[i] for i in inputs], [p.axes[i] for i in inputs]
    output_shape, output_axes = [p.shape[i] for i in outputs], [p.axes[i] for i in outputs]
    std = 1 / math.sqrt(math.prod(input_shape))
    # The axis is not "rank", which the factors of a low-rank model have already.
    initialize_a = normal(std, *stack_axes, *input_axes, "lora_rank")
    initialize_b = zeros(*stack_axes, "lora_rank", *output_axes)
    return {
        "a": initialize_a(key, (*stack, *input_shape, rank)),
        "b": initialize_b(key, (*stack, rank, *output_shape)),
    }


def abstract_pairs(params, rank: int, pattern: str):
    return jax.eval_shape(lambda: nn.unbox(init(params, rank, pattern, jax.random.key(0))))


def merge(params, weights, pairs, scale: float):
    """Returns `weights`, `params` with values, with W + scale·A·B for each W with a pair."""
    weights = flax.traverse_util.flatten_dict(weights)
    factors = flax.traverse_util.flatten_dict(pairs)
    for p in jax.tree.leaves(params):
        if (*p.path, "a") in factors:
            weights[p.path] += scale * _product(p, factors[*p.path, "a"], factors[*p.path, "b"])
    return flax.traverse_util.unflatten_dict(weights)


def _product(p: Parameter, a, b):
    """Returns A·B in the shape of `p`."""
    stack, rank = p.shape[: p.module_stacks], a.shape[-1]
    a_matrices = a.reshape(*stack, -1, rank)
    b_matrices = b.reshape(*stack, rank, -1)
    y = jnp.matmul(a_matrices, b_matrices, precision=jax.lax.Precision.HIGHEST)
    return y.reshape(p.shape)
