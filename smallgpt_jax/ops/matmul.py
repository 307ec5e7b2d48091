"""Products with a weight matrix."""

import jax
import jax.numpy as jnp

from smallgpt_jax.ops.platform import platform


def matmul(x_RxI, w_IxO):
    """Returns x·w, (R, O).

    On CPUs a tall `w` is transposed first, so that its gradient is a product with a wide result, which XLA computes a
    fifth faster (jax 0.10.2, AMD EPYC with AVX-512, 2,048 rows, 1,024 × 256). The barrier keeps XLA from undoing it.
    """
    inputs, outputs = w_IxO.shape
    if platform() == "cpu" and inputs > outputs:
        contract_last = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x_RxI, jax.lax.optimization_barrier(w_IxO.T), contract_last)
    return jnp.dot(x_RxI, w_IxO)


def one_product_is_faster(decode: bool) -> bool:
    """Returns whether a projection to queries, keys and values is faster as one product whose result is split and
    transposed than as a product for each, in the layout that attention reads.

    So it is on CPUs, and in decoding, where there are few rows. On TPUs a product for each saves copies.
    """
    return decode or platform() == "cpu"
