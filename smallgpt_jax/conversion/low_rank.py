"""Replaces the matrices of a trained model by products of two factors, W ≈ A·B, and the reverse.

This is the first step of PELA (Guo et al., arXiv 2310.10700). In the second step, an ordinary run
trains the model further. A·B is the truncated singular value decomposition, the closest matrix of
its rank in the Frobenius norm. The QKV projection is one matrix, as in PELA's released code. The
output projection has all heads in one axis.
"""

import dataclasses

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from smallgpt_jax import models


def with_rank_ratio(model: models.LanguageModel, params, rank_ratio: float):
    """With a `rank_ratio` of 0, all matrices are full. Existing factors are multiplied first."""
    converted = models.build(**{**dataclasses.asdict(model.config), "rank_ratio": rank_ratio})
    models.require_factors(converted)
    arrays = flatten_dict(jax.device_get(params))
    # First, a tree in which every kernel is one matrix.
    full = {path: x for path, x in arrays.items() if path[-1] not in ("kernel_in", "kernel_out")}
    for module, num_stacks in _factored_modules(model).items():
        full[*module, "kernel"] = _multiply(
            arrays[*module, "kernel_in"], arrays[*module, "kernel_out"], num_stacks
        )
    # Then, the factors of the kernels that have some in the converted model.
    shapes = flatten_dict(models.abstract_params(converted))
    for module, num_stacks in _factored_modules(converted).items():
        shape_in = shapes[*module, "kernel_in"].shape  # (*stacks, *inputs, rank)
        shape_out = shapes[*module, "kernel_out"].shape  # (*stacks, rank, *features)
        num_inputs = np.prod(shape_in[num_stacks:-1])
        num_features = np.prod(shape_out[num_stacks + 1 :])
        kernel = full.pop((*module, "kernel"))
        matrix = kernel.reshape(*shape_in[:num_stacks], num_inputs, num_features)
        left, right = factor(matrix, rank=shape_in[-1])
        full[*module, "kernel_in"] = left.reshape(shape_in)
        full[*module, "kernel_out"] = right.reshape(shape_out)
    return converted, unflatten_dict({path: full[path] for path in shapes})


def factor(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns U√S, (…, m, rank), and √S·Vᵀ, (…, rank, n), of a matrix (…, m, n)."""
    u, s, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    # √S on each side, so that both factors have the same scale
    root = np.sqrt(s[..., None, :rank])
    left = u[..., :rank] * root
    right = np.swapaxes(root, -1, -2) * v[..., :rank, :]
    return np.float32(left), np.float32(right)


def _multiply(kernel_in: np.ndarray, kernel_out: np.ndarray, num_stacks: int) -> np.ndarray:
    """Returns the kernel (*stacks, *inputs, *features); stacks are layers and paths."""
    stacks, rank = kernel_in.shape[:num_stacks], kernel_in.shape[-1]
    # one matrix each per stack: (*stacks, inputs, rank) and (*stacks, rank, features)
    left = kernel_in.reshape(*stacks, -1, rank).astype(np.float64)
    right = kernel_out.reshape(*stacks, rank, -1).astype(np.float64)
    shape = (*kernel_in.shape[:-1], *kernel_out.shape[num_stacks + 1 :])
    return np.float32(left @ right).reshape(shape)


def _factored_modules(model: models.LanguageModel) -> dict[tuple[str, ...], int]:
    """Returns {path of a module with two factors: number of stack axes}."""
    return {
        p.path[:-1]: p.module_stacks
        for p in jax.tree.leaves(models.abstract_params(model))
        if p.name == "kernel_in"
    }
