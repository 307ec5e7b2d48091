"""The state space recurrence of Mamba-2 (Dao & Gu, arXiv 2405.21060), in chunks, in float32.

Each head has a state, (N, P), which decays and to which a token adds the product of its key and its
value:

    h_t = a_t·h_(t−1) + b_t·v_tᵀ        y_t = h_tᵀ·c_t

(equation 2, with a scalar a_t, and v_t = Δ_t·x_t). Inside a chunk, y is a product with a matrix of
decays (section 6, "SSD"); the states between chunks are computed one after another.

Shapes: B batch, T time, H heads, G = 1 or H heads of keys and queries, K state size, V value width;
N chunks of C positions.
"""

import jax.numpy as jnp

from smallgpt_jax.devices.platform import platform
from smallgpt_jax.ops import recurrence_kernel
from smallgpt_jax.ops.chunks import (
    chunk_length,
    decays_in_chunk,
    in_chunks,
    joined,
    states_before_chunks,
)


def state_space(
    c_BxTxGxK,
    b_BxTxGxK,
    v_BxTxHxV,
    log_decay_BxTxH,
    begins_BxT,
    state_BxHxKxV,
    *,
    backend: str = "auto",
):
    """Returns y, (B, T, H, V), and the last state, (B, H, K, V), both float32. `log_decay_BxTxH` is
    log a ≤ 0. Where `begins_BxT`, (B or 1, T), a new text begins, which does not see the state. A
    token with log a = 0 and v = 0, such as padding, does not change the state. With the `backend`
    "xla", no kernel is used.
    """
    inputs = [x.astype(jnp.float32) for x in (c_BxTxGxK, b_BxTxGxK, v_BxTxHxV, log_decay_BxTxH)]
    _, time, _, width = v_BxTxHxV.shape
    if time == 1:
        c_BxGxK, b_BxGxK, v_BxHxV, log_decay_BxH = (x[:, 0] for x in inputs)
        kept_BxH = jnp.where(begins_BxT, 0.0, jnp.exp(log_decay_BxH))
        state_BxHxKxV = (
            kept_BxH[:, :, None, None] * state_BxHxKxV + b_BxGxK[..., None] * v_BxHxV[:, :, None]
        )
        return jnp.sum(c_BxGxK[..., None] * state_BxHxKxV, axis=2)[:, None], state_BxHxKxV
    if (
        backend != "xla"
        and platform() == "tpu"
        and recurrence_kernel.fits(time, c_BxTxGxK.shape[-1], width)
    ):
        return recurrence_kernel.in_kernel(inputs, begins_BxT, state_BxHxKxV)
    return in_plain_jax(*inputs, begins_BxT, state_BxHxKxV)


def in_plain_jax(c_BxTxGxK, b_BxTxGxK, v_BxTxHxV, log_decay_BxTxH, begins_BxT, state_BxHxKxV):
    """As `state_space`, of float32 arrays."""
    time = v_BxTxHxV.shape[1]
    length = chunk_length(time)
    c, b, v, log_decay = (
        in_chunks(x, length) for x in (c_BxTxGxK, b_BxTxGxK, v_BxTxHxV, log_decay_BxTxH)
    )
    decays, kept, until_end = decays_in_chunk(log_decay, in_chunks(begins_BxT[:, :, None], length))
    y_NxBxHxCxV = (decays * (c @ jnp.swapaxes(b, -1, -2))) @ v
    added_NxBxHxKxV = jnp.swapaxes(until_end[..., None] * b, -1, -2) @ v
    states_NxBxHxKxV, state_BxHxKxV = states_before_chunks(
        kept[..., -1], None, added_NxBxHxKxV, state_BxHxKxV
    )
    return joined(y_NxBxHxCxV + kept[..., None] * (c @ states_NxBxHxKxV), time), state_BxHxKxV
