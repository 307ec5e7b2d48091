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
NOT_ADAPTED = {None, "vocab", "position", "router", "conv_time", *STACKS} - {*MODULE_STACKS}


def is_adapted(p: Parameter, pattern: str = "") -> bool:
    is_named = bool(pattern) and p.path == HEAD
    return (
        p.is_matrix
        and (is_named or not NOT_ADAPTED & set(p.axes))
        and bool(re.search(pattern, "/".join(p.path)))
    )


def init(params, rank: int, pattern: str, key):
    """Returns the pairs for the parameters whose path matches `pattern`, with axis names; the
    products are 0.
    """
    pairs = {
        p.path: init_pair(p, rank, jax.random.fold_in(key, number))
        for number, p in enumerate(jax.tree.leaves(params))
        if is_adapted(p, pattern)
    }
    return flax.traverse_util.unflatten_dict(pairs)


def init_pair(p: Parameter, rank: int, key):
    inputs, outputs = p.matrix_axes
    stack, stack_axes = p.shape[: p.module_stacks], p.axes[: p.module_stacks]
    input_shape, output_shape = ([p.shape[i] for i in axes] for axes in (inputs, outputs))
    input_axes, output_axes = ([p.axes[i] for i in axes] for axes in (inputs, outputs))
    # not "rank", which the factors of a low-rank model have already
    initialize_a = normal(
        1 / math.sqrt(math.prod(input_shape)), *stack_axes, *input_axes, "lora_rank"
    )
    initialize_b = zeros(*stack_axes, "lora_rank", *output_axes)
    return {
        "a": initialize_a(key, (*stack, *input_shape, rank)),
        "b": initialize_b(key, (*stack, rank, *output_shape)),
    }


def abstract_pairs(params, rank: int, pattern: str):
    return jax.eval_shape(lambda: nn.unbox(init(params, rank, pattern, jax.random.key(0))))


def merge(abstract, params, pairs, scale: float):
    """Returns `params` with W + scale·A·B, in float32, for each W with a pair. `abstract` is a tree
    of `Parameter`.
    """
    weights, factors = (flax.traverse_util.flatten_dict(tree) for tree in (params, pairs))
    for p in jax.tree.leaves(abstract):
        if (*p.path, "a") in factors:
            weights[p.path] += scale * product(p, factors[*p.path, "a"], factors[*p.path, "b"])
    return flax.traverse_util.unflatten_dict(weights)


def product(p: Parameter, a, b):
    """Returns A·B in the shape of `p`."""
    stack, rank = p.shape[: p.module_stacks], a.shape[-1]
    return jnp.matmul(
        a.reshape(*stack, -1, rank),
        b.reshape(*stack, rank, -1),
        precision=jax.lax.Precision.HIGHEST,
    ).reshape(p.shape)
