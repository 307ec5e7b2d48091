"""Activation functions of MLPs; `config.model.activation` is a key of ACTIVATIONS."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp


@jax.custom_vjp
def gelu(x):
    """Returns x·Φ(x) (Hendrycks & Gimpel, arXiv 1606.08415). In bfloat16, 1 + erf would lose the
    negative tail of Φ. The derivative is saved instead of x: both have the same dtype, and erf and
    exp are slow on CPUs.
    """
    return _gelu_forward(x)[0]


# GELU, and its derivative for the backward pass.
def _gelu_forward(x):
    dtype = x.dtype
    x = x.astype(jnp.float32)
    # Φ and φ, the distribution function and the density of a standard normal number
    cdf = 0.5 * (1 + jax.lax.erf(x * math.sqrt(0.5)))
    density = jnp.exp(-0.5 * jnp.square(x)) * (1 / math.sqrt(2 * math.pi))
    y = x * cdf
    derivative = cdf + x * density
    return y.astype(dtype), derivative.astype(dtype)


gelu.defvjp(_gelu_forward, lambda derivative, cotangent: (cotangent * derivative,))


def relu2(x):
    """Returns max(x, 0)² (So et al., arXiv 2109.08668)."""
    return jnp.square(nn.relu(x))


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
    "silu": nn.silu,
    "relu2": relu2,
}
