"""Products of bfloat16 matrices on CPUs.

CPUs with AVX512-BF16 or AMX multiply bfloat16 matrices faster than float32 matrices (docs/speed.md has figures). XLA's
CPU compiler (jax 0.10.2) uses these instructions only for products a·b and a·bᵀ of bfloat16 arrays with a float32
result. It computes all other products of bfloat16 arrays in float32.
"""

import jax
import jax.numpy as jnp

from smallgpt_jax.devices.platform import has_bfloat16_instructions, platform


def applies(dtype) -> bool:
    """Returns whether to use this module for arrays of `dtype`: for bfloat16 on CPUs with bfloat16 instructions."""
    return jnp.dtype(dtype) == jnp.bfloat16 and platform() == "cpu" and has_bfloat16_instructions()


def sliceable(x):
    """Returns `x`, in float32 if this module applies to it.

    XLA's CPU compiler is slow at computing the gradients of slices of bfloat16 arrays. Slice the result of this
    function, and convert the slices to the dtype of `x`.
    """
    return x.astype(jnp.float32) if applies(x.dtype) else x


@jax.custom_vjp
def product(a, b):
    """Returns a·b in float32, for matrices or stacks of matrices, which are rounded to bfloat16.

    `a` and `b` must have the same leading axes. The gradients, too, are computed by products of bfloat16 matrices. They
    have the dtypes of `a` and `b`.
    """
    return dot(a, b)


def dot(a, b):
    """Returns a·b like `product`, but without gradients."""
    return jax.lax.optimization_barrier(jnp.matmul(_barrier(a), _barrier(b), preferred_element_type=jnp.float32))


def _barrier(x):
    """Returns `x` in bfloat16, row-major and behind an optimization barrier.

    XLA decides early whether it computes a product with bfloat16 instructions, which support row-major operands only.
    The reshape makes `x` row-major, even if it is a transposed array. Without the barriers, XLA folds transpositions
    into the product later, and the compiled program fails ("Unsupported element type for DotThunk"). The barrier is on
    the bits of `x`, because XLA computes a barrier on bfloat16, and the products that read it, in float32.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    bits = jax.lax.optimization_barrier(bits[..., None]).reshape(x.shape)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def transposed_dot(a, b):
    """Returns aᵀ·b like `dot`.

    A tall result is computed as (bᵀ·a)ᵀ, because products with wide results are faster.
    """
    if a.shape[-1] > b.shape[-1]:
        return jnp.swapaxes(transposed_dot(b, a), -1, -2)
    return dot(jnp.swapaxes(a, -1, -2), b)


def _forward(a, b):
    return product(a, b), (a, b)


def _backward(saved, cotangent):
    a, b = saved
    d_a, d_b = dot(cotangent, jnp.swapaxes(b, -1, -2)), transposed_dot(a, cotangent)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


product.defvjp(_forward, _backward)
