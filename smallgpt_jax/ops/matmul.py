"""Matrix products with weights."""

import jax
import jax.numpy as jnp

from smallgpt_jax.devices.platform import platform
from smallgpt_jax.ops import bfloat16


# `decode`: the product of a decoding step, with few rows and without a gradient.
def matmul(x_BxTxI, w_IxO, decode: bool):
    if platform() != "cpu":
        return jnp.dot(x_BxTxI, w_IxO)
    inputs, outputs = w_IxO.shape
    # XLA's CPU backend turns three-dimensional products into slow loops. On TPUs, a matrix would
    # keep XLA from fusing the product with the activation.
    x_RxI = x_BxTxI.reshape(-1, inputs)
    if bfloat16.applies(w_IxO.dtype) and not decode:
        y_RxO = bfloat16.product(x_RxI, w_IxO).astype(jnp.bfloat16)
    elif inputs > outputs and not decode:
        # The gradient of a tall `w` is then a wide matrix, which is faster (docs/speed.md). The
        # barrier keeps XLA from removing the transposition.
        contract_last = (((1,), (1,)), ((), ()))
        y_RxO = jax.lax.dot_general(x_RxI, jax.lax.optimization_barrier(w_IxO.T), contract_last)
    else:
        y_RxO = jnp.dot(x_RxI, w_IxO)
    return y_RxO.reshape(*x_BxTxI.shape[:2], outputs)


def one_product_is_faster(decode: bool) -> bool:
    """On TPUs, splitting one result for q, k and v costs copies, but few in decoding."""
    return decode or platform() == "cpu"


def merging_heads_is_faster(decode: bool, dtype) -> bool:
    """Merging is a transposition, cheap in decoding, after which `matmul` applies."""
    return decode or bfloat16.applies(dtype)
