"""Matrix products with weights."""

import jax
import jax.numpy as jnp

from smallgpt_jax.ops.platform import platform


def matmul(x_RxI, w_IxO):
    """Returns x·w, (R, O).

    On CPUs, a tall `w` is transposed before the product. The gradient of `w` is then a product with a wide result,
    which XLA computes faster than one with a tall result (see the table in `ops/__init__.py`). The optimization barrier
    keeps XLA from removing the transposition.
    """
    inputs, outputs = w_IxO.shape
    if platform() == "cpu" and inputs > outputs:
        contract_last = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x_RxI, jax.lax.optimization_barrier(w_IxO.T), contract_last)
    return jnp.dot(x_RxI, w_IxO)


def one_product_is_faster(decode: bool) -> bool:
    """Returns whether one fused product for queries, keys and values is faster than separate products.

    Attention reads the layout that separate products produce. The fused result must first be split and transposed,
    which costs copies on TPUs. The fused product is faster on CPUs. It is also faster in decoding, where there are few
    rows.
    """
    return decode or platform() == "cpu"
