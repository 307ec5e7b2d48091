"""Products of bfloat16 matrices on CPUs with AVX512-BF16 or AMX, which are faster than in float32
(docs/speed.md).

XLA's CPU compiler (jax 0.10.2) uses these instructions only for a·b and a·bᵀ of bfloat16 arrays
with a float32 result.
"""

import jax
import jax.numpy as jnp

from smallgpt_jax.devices.platform import has_bfloat16_instructions, platform


def applies(dtype) -> bool:
    return jnp.dtype(dtype) == jnp.bfloat16 and platform() == "cpu" and has_bfloat16_instructions()


def sliceable(x):
    """Returns `x`, in float32 where gradients of bfloat16 slices are slow on CPUs."""
    return x.astype(jnp.float32) if applies(x.dtype) else x


@jax.custom_vjp
def product(a, b):
    """Returns a·b in float32, of operands (also of the gradients) rounded to bfloat16."""
    return dot(a, b)


def dot(a, b):
    """Returns a·b like `product`, but without gradients."""
    y = jnp.matmul(_barrier(a), _barrier(b), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y)


def _barrier(x):
    # XLA's bfloat16 products need row-major operands; the reshape makes `x` row-major even if it is
    # a transposed array. Without the barrier, XLA folds transpositions into the product later, and
    # the program fails ("Unsupported element type for DotThunk"). It is on the bits, because XLA
    # computes a bfloat16 barrier and what reads it in float32.
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    bits = jax.lax.optimization_barrier(bits[..., None]).reshape(x.shape)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def transposed_dot(a, b):
    """Returns aᵀ·b like `dot`; a tall one as (bᵀ·a)ᵀ, because wide results are faster."""
    if a.shape[-1] > b.shape[-1]:
        return jnp.swapaxes(transposed_dot(b, a), -1, -2)
    return dot(jnp.swapaxes(a, -1, -2), b)


def _backward(saved, cotangent):
    a, b = saved
    d_a = dot(cotangent, jnp.swapaxes(b, -1, -2))  # dy·bᵀ
    d_b = transposed_dot(a, cotangent)  # aᵀ·dy
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


product.defvjp(lambda a, b: (product(a, b), (a, b)), _backward)
