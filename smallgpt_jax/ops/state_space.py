"""The state space recurrence of Mamba-2 (Dao & Gu, arXiv 2405.21060), in chunks, in float32.

Each head has a state, (K, V), which decays and to which a token adds the product of its key and its
value:

    h_t = a_t·h_(t−1) + k_t·v_tᵀ        y_t = h_tᵀ·q_t

(equation 2, with a scalar a_t; its B is our k, its C our q, and v_t = Δ_t·x_t). Inside a chunk, y is
a product with a matrix of decays (section 6, "SSD"); the states between chunks are computed one
after another.

Shapes: B batch, T time, H heads, G = 1 or H heads of keys and queries, K state size, V value width;
N chunks of C positions.
"""

import jax.numpy as jnp

from smallgpt_jax.ops import chunks, recurrence_kernel
from smallgpt_jax.ops.chunks import RecurrenceInputs


def state_space(inputs: RecurrenceInputs, begins_BxT, state_BxHxKxV, *, backend: str = "auto"):
    """Returns y, (B, T, H, V), and the last state, (B, H, K, V), both float32. Where `begins_BxT`,
    (B or 1, T), a new text begins, which does not see the state. Padding has a log decay of 0 and
    v = 0, which keeps the state. The `backend` "xla" uses no kernel.
    """
    inputs = inputs.map(lambda x: x.astype(jnp.float32))
    if inputs.v_BxTxHxV.shape[1] == 1:
        return _one_token(inputs, begins_BxT, state_BxHxKxV)
    if recurrence_kernel.applies(inputs, backend):
        return recurrence_kernel.in_kernel(inputs, begins_BxT, state_BxHxKxV)
    return in_plain_jax(inputs, begins_BxT, state_BxHxKxV)


def _one_token(inputs: RecurrenceInputs, begins_BxT, state_BxHxKxV):
    """Equation 2 of the paper (see this module's docstring), for one token."""
    q_BxGxK, k_BxGxK, v_BxHxV, log_decay_BxH, _ = inputs.map(lambda x: x[:, 0])
    kept_BxH = jnp.where(begins_BxT, 0.0, jnp.exp(log_decay_BxH))
    kept_state_BxHxKxV = kept_BxH[:, :, None, None] * state_BxHxKxV
    added_BxHxKxV = k_BxGxK[..., None] * v_BxHxV[:, :, None]
    state_BxHxKxV = kept_state_BxHxKxV + added_BxHxKxV
    y_BxHxV = jnp.sum(q_BxGxK[..., None] * state_BxHxKxV, axis=2)
    return y_BxHxV[:, None], state_BxHxKxV


def in_plain_jax(inputs: RecurrenceInputs, begins_BxT, state_BxHxKxV):
    """As `state_space`, of float32 arrays."""
    time = inputs.v_BxTxHxV.shape[1]
    length = chunks.chunk_length(time)
    # each: (N, B, H or G, C, …)
    q, k, v, log_decay, _ = inputs.map(lambda x: chunks.in_chunks(x, length))
    begins_NxBx1xC = chunks.in_chunks(begins_BxT[:, :, None], length)
    decays, kept, until_end = chunks.decays_in_chunk(log_decay, begins_NxBx1xC)  # Γ, γ, ω
    # (i, j): how much of the value of token j token i reads
    scores = decays * (q @ jnp.swapaxes(k, -1, -2))
    y_NxBxHxCxV = scores @ v
    added_NxBxHxKxV = jnp.swapaxes(until_end[..., None] * k, -1, -2) @ v
    states_NxBxHxKxV, state_BxHxKxV = chunks.states_before_chunks(
        kept[..., -1], None, added_NxBxHxKxV, state_BxHxKxV
    )
    y_NxBxHxCxV = y_NxBxHxCxV + kept[..., None] * (q @ states_NxBxHxKxV)
    return chunks.joined(y_NxBxHxCxV, time), state_BxHxKxV
