"""Matrix products with weights."""

import jax
import jax.numpy as jnp

from smallgpt_jax.ops.platform import platform


def matmul(x_BxTxI, w_IxO, decode: bool):
    """Returns x·w, (B, T, O).

    On CPUs, the product is computed on matrices, because XLA's CPU compiler turns three-dimensional products into
    loops, which are slower. On TPUs, a reshape would keep XLA from fusing the product with the activation function that
    follows it.

    On CPUs, a tall `w` is transposed before the product. The gradient of `w` is then a product with a wide result,
    which XLA computes faster than one with a tall result (see the table in `ops/__init__.py`). The optimization barrier
    keeps XLA from removing the transposition. Decoding computes no gradient.
    """
    if platform() != "cpu":
        return jnp.dot(x_BxTxI, w_IxO)
    inputs, outputs = w_IxO.shape
    x_RxI = x_BxTxI.reshape(-1, inputs)
    if inputs > outputs and not decode:
        contract_last = (((1,), (1,)), ((), ()))
        y_RxO = jax.lax.dot_general(x_RxI, jax.lax.optimization_barrier(w_IxO.T), contract_last)
    else:
        y_RxO = jnp.dot(x_RxI, w_IxO)
    return y_RxO.reshape(*x_BxTxI.shape[:2], outputs)


def one_product_is_faster(decode: bool) -> bool:
    """Returns whether one fused product for queries, keys and values is faster than separate products.

    Attention reads the layout that separate products produce. The fused result must first be split and transposed,
    which costs copies on TPUs. The fused product is faster on CPUs. It is also faster in decoding, where there are few
    rows.
    """
    return decode or platform() == "cpu"
