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
    full = {path: x for path, x in arrays.items() if path[-1] not in ("kernel_in", "kernel_out")}
    for module, stacked in _factored_modules(model).items():
        full[*module, "kernel"] = _multiply(
            arrays[*module, "kernel_in"], arrays[*module, "kernel_out"], stacked
        )
    shapes = flatten_dict(models.abstract_params(converted))
    for module, stacked in _factored_modules(converted).items():
        shape_in, shape_out = (
            shapes[*module, "kernel_in"].shape,
            shapes[*module, "kernel_out"].shape,
        )
        matrix = full.pop((*module, "kernel")).reshape(
            *shape_in[:stacked], np.prod(shape_in[stacked:-1]), np.prod(shape_out[stacked + 1 :])
        )
        left, right = factor(matrix, rank=shape_in[-1])
        full[*module, "kernel_in"], full[*module, "kernel_out"] = (
            left.reshape(shape_in),
            right.reshape(shape_out),
        )
    return converted, unflatten_dict({path: full[path] for path in shapes})


def factor(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns U√S, (…, m, rank), and √S·Vᵀ, (…, rank, n), of a matrix (…, m, n); rank ≤ min(m,
    n).
    """
    u, s, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    root = np.sqrt(s[..., None, :rank])
    return (
        np.float32(u[..., :rank] * root),
        np.float32(np.swapaxes(root, -1, -2) * v[..., :rank, :]),
    )


def _multiply(kernel_in: np.ndarray, kernel_out: np.ndarray, stacked: int) -> np.ndarray:
    """Returns the kernel (*stack, *inputs, *features), where `stacked` is the number of stack axes
    (layers, paths).
    """
    stack, rank = kernel_in.shape[:stacked], kernel_in.shape[-1]
    product = kernel_in.reshape(*stack, -1, rank).astype(np.float64) @ kernel_out.reshape(
        *stack, rank, -1
    ).astype(np.float64)
    return np.float32(product).reshape(*kernel_in.shape[:-1], *kernel_out.shape[stacked + 1 :])


def _factored_modules(model: models.LanguageModel) -> dict[tuple[str, ...], int]:
    """Returns {path of a module with two factors: number of stack axes}."""
    return {
        p.path[:-1]: p.module_stacks
        for p in jax.tree.leaves(models.abstract_params(model))
        if p.name == "kernel_in"
    }
