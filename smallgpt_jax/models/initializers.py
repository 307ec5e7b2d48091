"""Initializers and initial stds of weights; `axes` are logical names."""

import math

import flax.linen as nn

from smallgpt_jax.models.config import ModelConfig

# initial std of weights, as in GPT-2; projections into the residual stream use `residual_std`
INIT_STD = 0.02


def normal(std: float, *axes: str):
    return nn.with_logical_partitioning(nn.initializers.normal(std), axes)


def zeros(*axes: str):
    return nn.with_logical_partitioning(nn.initializers.zeros, axes)


def ones(*axes: str):
    return nn.with_logical_partitioning(nn.initializers.ones, axes)


def deepnorm_gain(config: ModelConfig) -> float:
    """Returns (8N)^−¼ for N blocks in sequence (DeepNorm, arXiv 2203.00555), or 1."""
    if config.norm_position != "deepnorm":
        return 1.0
    return (8 * config.blocks_in_sequence) ** -0.25


def residual_std(config: ModelConfig) -> float:
    """Returns 0.02/√(2N) for N pre-norm blocks, whose 2N outputs are summed (GPT-2)."""
    if config.norm_position == "pre":
        return INIT_STD / math.sqrt(2 * config.loops * config.num_layers)
    return INIT_STD * deepnorm_gain(config)
