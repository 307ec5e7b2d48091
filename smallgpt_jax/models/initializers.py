"""Initializers of weights, and the standard deviations of initial weights.

The axes of weights have logical names, which `devices/sharding.py` maps to mesh axes.
"""

import math

import flax.linen as nn

from smallgpt_jax.models.config import ModelConfig

INIT_STD = 0.02  # initial std of weights, as in GPT-2; projections into the residual stream use `residual_std`


def normal(std: float, *axes: str):
    """Returns a normal(0, std) initializer for a weight whose axes have the logical names `axes`."""
    return nn.with_logical_partitioning(nn.initializers.normal(std), axes)


def zeros(*axes: str):
    """Returns a zero initializer for a bias whose axes have the logical names `axes`."""
    return nn.with_logical_partitioning(nn.initializers.zeros, axes)


def deepnorm_gain(config: ModelConfig) -> float:
    """Returns the factor by which DeepNorm multiplies some initial weights; 1 if the model does not use DeepNorm.

    The factor is (8N)^−¼, where N is the number of blocks in sequence (Wang et al., arXiv 2203.00555, decoder-only
    models). It applies to the weights of MLPs, and to the value and output projections of attention.
    """
    return (8 * config.depth) ** -0.25 if config.norm_position == "deepnorm" else 1.0


def residual_std(config: ModelConfig) -> float:
    """Returns the initial std of projections into the residual stream.

    In a pre-norm model of N blocks, it is 0.02/√(2N). The sum of the 2N projections then has the same variance as one
    projection with std 0.02 (GPT-2 report, section 2.3).

    In other models, a norm follows each sum, and the std is 0.02 · `deepnorm_gain(config)`.
    """
    if config.norm_position == "pre":
        return INIT_STD / math.sqrt(2 * config.num_layers)
    return INIT_STD * deepnorm_gain(config)
