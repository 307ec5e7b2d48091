"""Matrix products with weights."""

import jax
import jax.numpy as jnp

from smallgpt_jax.devices.platform import platform
from smallgpt_jax.ops import bfloat16


def matmul(x_BxTxI, w_IxO, decode: bool):
    """Returns x·w, (B, T, O).

    On CPUs, x is reshaped to a matrix, because XLA's CPU compiler turns three-dimensional products into slow loops. On
    TPUs, the reshape would keep XLA from fusing the product with the activation function that follows it.

    On CPUs, a tall `w` is transposed before the product, except in decoding. Its gradient is then computed as a wide
    matrix, which is faster than a tall one (docs/speed.md). The optimization barrier keeps XLA
    from removing the transposition. Matrices of bfloat16 are multiplied by `bfloat16.product`, if `bfloat16.applies`.
    """
    if platform() != "cpu":
        return jnp.dot(x_BxTxI, w_IxO)
    inputs, outputs = w_IxO.shape
    x_RxI = x_BxTxI.reshape(-1, inputs)
    if bfloat16.applies(w_IxO.dtype) and not decode:
        y_RxO = bfloat16.product(x_RxI, w_IxO).astype(jnp.bfloat16)
    elif inputs > outputs and not decode:
        contract_last = (((1,), (1,)), ((), ()))
        y_RxO = jax.lax.dot_general(x_RxI, jax.lax.optimization_barrier(w_IxO.T), contract_last)
    else:
        y_RxO = jnp.dot(x_RxI, w_IxO)
    return y_RxO.reshape(*x_BxTxI.shape[:2], outputs)


def one_product_is_faster(decode: bool) -> bool:
    """Returns whether one fused product for queries, keys and values is faster than separate products.

    Separate products have the layout that attention reads. The result of a fused product must be split and transposed,
    which costs copies on TPUs. The fused product is faster on CPUs, and in decoding, where there are few rows.
    """
    return decode or platform() == "cpu"


def merging_heads_is_faster(decode: bool, dtype) -> bool:
    """Returns whether the output projection is faster as one product of the merged heads than as a sum over heads.

    Merging the heads is a transposition, which is cheap in decoding. `matmul` then computes the product.
    """
    return decode or bfloat16.applies(dtype)
