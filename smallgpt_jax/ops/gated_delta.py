"""The gated delta rule (Yang, Kautz & Hatamizadeh, arXiv 2412.06464), in chunks, in float32.

Each head has a state S, (K, V), which maps keys to values. A token scales the state by its decay α,
and then replaces the fraction β of the value that the state has for its key (equation 10, whose S
is the transpose of ours):

    S_t = α_t·(I − β_t·k_t·k_tᵀ)·S_(t−1) + β_t·k_t·v_tᵀ        y_t = S_tᵀ·q_t

Let S be the state before a chunk of C tokens, γ_i the decay from there to token i, and Γ_ij that
from token j to token i ≥ j. Then the state after token i is γ_i·S + Σ_(j≤i) Γ_ij·k_j·u_jᵀ, where
the rows u_i of U solve

    (I + A)·U = diag(β)·(V − diag(γ)·K·S)        A_ij = β_i·Γ_ij·(k_i·k_j) for j < i, otherwise 0

(section 3.3). With (I + A)⁻¹·diag(β)·V and (I + A)⁻¹·diag(β)·diag(γ)·K, a chunk is a few matrix
products, and only the states between chunks are computed one after another
(`states_before_chunks`).

Shapes: B batch, T time, H heads, K key width, V value width; N chunks of C positions.
"""

import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax.ops import chunks, recurrence_kernel
from smallgpt_jax.ops.chunks import RecurrenceInputs

_SMALL = 16  # products of smaller matrices cost more on CPUs than the zeros in larger ones


def gated_delta(inputs: RecurrenceInputs, begins_BxT, state_BxHxKxV, *, backend: str = "auto"):
    """Returns y, (B, T, H, V), and the last state, (B, H, K, V), both float32. Where `begins_BxT`,
    (B or 1, T), a new text begins, which does not see the state. Padding has a log decay of 0 and
    β = 0, which keeps the state. The `backend` "xla" uses no kernel.
    """
    inputs = inputs.map(lambda x: x.astype(jnp.float32))
    if inputs.v_BxTxHxV.shape[1] == 1:
        return _one_token(inputs, begins_BxT, state_BxHxKxV)
    if recurrence_kernel.applies(inputs, backend):
        return recurrence_kernel.in_kernel(inputs, begins_BxT, state_BxHxKxV)
    return in_plain_jax(inputs, begins_BxT, state_BxHxKxV)


def in_plain_jax(inputs: RecurrenceInputs, begins_BxT, state_BxHxKxV):
    """As `gated_delta`, of float32 arrays, by the equations of this module's docstring.

    On TPUs, the decays and the inverse are computed in float32 (`product`), but products written as
    @ round their inputs to bfloat16.
    """
    time = inputs.q_BxTxGxK.shape[1]
    length = chunks.chunk_length(time)
    q, k, v, log_decay, beta = inputs.map(lambda x: chunks.in_chunks(x, length))  # (N, B, H, C, …)
    begins_NxBx1xC = chunks.in_chunks(begins_BxT[:, :, None], length)
    decays, kept, until_end = chunks.decays_in_chunk(log_decay, begins_NxBx1xC)  # Γ, γ, ω
    earlier = jnp.tri(length, k=-1)[None, None, None]
    identity = jnp.eye(length)[None, None, None]
    a_NxBxHxCxC = earlier * beta[..., None] * decays * (k @ jnp.swapaxes(k, -1, -2))
    inverse = unit_lower_inverse(identity + a_NxBxHxCxC)
    # Both right sides at once, those of the values and those of the keys: U is the solution for the
    # values minus that for the keys times S.
    right_sides = [beta[..., None] * v, (beta * kept)[..., None] * k]
    solutions = inverse @ jnp.concatenate(right_sides, axis=-1)
    width_v = v.shape[-1]  # where values end and keys begin
    keys_at_end = until_end[..., None] * k
    scores = decays * (q @ jnp.swapaxes(k, -1, -2))
    # What a chunk adds to the state, (…, K, V), and erases of it, (…, K, K).
    of_chunk = jnp.swapaxes(keys_at_end, -1, -2) @ solutions
    added, erased = jnp.split(of_chunk, [width_v], axis=-1)
    y_NxBxHxCxV, reads = jnp.split(scores @ solutions, [width_v], axis=-1)
    states, state_BxHxKxV = chunks.states_before_chunks(kept[..., -1], erased, added, state_BxHxKxV)
    y_NxBxHxCxV += (kept[..., None] * q - reads) @ states
    return chunks.joined(y_NxBxHxCxV, time), state_BxHxKxV


def _one_token(inputs: RecurrenceInputs, begins_BxT, state_BxHxKxV):
    """Equation 10 of the paper (see this module's docstring), for one token."""
    q_BxHxK, k_BxHxK, v_BxHxV, log_decay_BxH, beta_BxH = inputs.map(lambda x: x[:, 0])
    kept_BxH = jnp.where(begins_BxT, 0.0, jnp.exp(log_decay_BxH))
    state_BxHxKxV = kept_BxH[:, :, None, None] * state_BxHxKxV
    read_BxHxV = jnp.einsum("bhk,bhkv->bhv", k_BxHxK, state_BxHxKxV)
    u_BxHxV = beta_BxH[:, :, None] * (v_BxHxV - read_BxHxV)
    state_BxHxKxV += k_BxHxK[..., None] * u_BxHxV[:, :, None]
    y_BxHxV = jnp.einsum("bhk,bhkv->bhv", q_BxHxK, state_BxHxKxV)
    return y_BxHxV[:, None], state_BxHxKxV


@jax.custom_vjp
def unit_lower_inverse(matrix):
    """Returns the inverse of (…, C, C) lower triangular matrices with ones on the diagonal."""
    # By halves (C is a power of two), because powers in the series Σ(I − matrix)ⁿ could overflow.
    length = matrix.shape[-1]
    if length <= _SMALL:
        return _small_inverse(matrix)
    # [[P, 0], [R, Q]]⁻¹ = [[P⁻¹, 0], [−Q⁻¹·R·P⁻¹, Q⁻¹]]
    half = length // 2
    diagonal_blocks = jnp.stack([matrix[..., :half, :half], matrix[..., half:, half:]])
    p_inverse, q_inverse = unit_lower_inverse(diagonal_blocks)
    r = matrix[..., half:, :half]
    lower_left = -chunks.product(chunks.product(q_inverse, r), p_inverse)
    return jnp.block([[p_inverse, jnp.zeros_like(p_inverse)], [lower_left, q_inverse]])


def _small_inverse(matrix):
    # The formula of `unit_lower_inverse` from blocks of one row upwards, for all pairs of blocks at
    # once: R is what joins the two blocks of each pair.
    length = matrix.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(length), matrix.shape)
    size = 1  # of the blocks that are inverted: 1, 2, 4, 8 of a matrix of 16 rows
    while size < length:
        row, column = np.indices((length, length)) // size  # of blocks
        joins_pair = (row == column + 1) & (row % 2 == 1)
        mask = np.where(joins_pair, np.float32(1), np.float32(0))
        r = mask.reshape((1,) * (matrix.ndim - 2) + mask.shape) * matrix
        if size > 1:  # the inverse of blocks of size 1 is the identity
            r = chunks.product(chunks.product(inverse, r), inverse)
        inverse -= r
        size *= 2
    return inverse


def _forward(matrix):
    inverse = unit_lower_inverse(matrix)
    return inverse, inverse


def _backward(inverse, cotangent):
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-chunks.product(chunks.product(transposed, cotangent), transposed),)


unit_lower_inverse.defvjp(_forward, _backward)
