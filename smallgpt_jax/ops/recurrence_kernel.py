"""TPU kernels of recurrences with a state, and of their gradients: Mamba-2's (see state_space.py)
and, with a further gate β, the gated delta rule (see gated_delta.py).

A chunk's matrices exist only in a core's own memory. The gradient kernel computes them again from
the state before the chunk, which is all that the forward kernel saves; its formulas are JAX's
gradient of `chunk`.

Shapes: B batch, H heads, G = 1 or H heads of queries and keys, K key width, V value width, T time;
R = 3 gates, or 4 with β; C positions of a chunk. In the kernels, the last axis of all arrays is for
time.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smallgpt_jax.devices import sharding
from smallgpt_jax.devices.platform import platform
from smallgpt_jax.ops.chunks import product as exact_product

LENGTH = 128  # positions per chunk: the width of the matrix unit
MAX_WIDTH = 512  # largest sum of the widths of keys and values
BLOCK = 512  # largest number of positions per step of a kernel's grid
ROWS = 8  # of a register
HEADS = 2  # per step: while one waits for a product, the other computes
FORGET = -1e30  # log decay of a token that does not see the state; sums of it are finite


def fits(time: int, key_width: int, value_width: int) -> bool:
    """Returns whether there is a chunk, and the blocks fit into the 16 MiB of a core's memory that
    a kernel may use.
    """
    return time >= LENGTH and key_width + value_width <= MAX_WIDTH


def in_kernel(inputs, begins_BxT, state_BxHxKxV, dtype: str = "bfloat16"):
    """Returns y, (B, T, H, V), and the last state. `inputs` are float32 queries and keys, (B, T, G,
    K), values, (B, T, H, V), logarithms of decays, (B, T, H), and for the delta rule β. Operands of
    products are rounded to `dtype`, as TPUs by default round float32 to bfloat16.
    """
    q_BxTxGxK, k_BxTxGxK, v_BxTxHxV, log_decay_BxTxH, *beta = inputs
    batch, time, heads, _ = v_BxTxHxV.shape
    log_decay_BxTxH = jnp.where(begins_BxT[:, :, None], FORGET, log_decay_BxTxH)
    q, k, v, log_decay, *beta = (
        jnp.moveaxis(jnp.pad(x, [(0, 0), (0, -time % LENGTH)] + [(0, 0)] * (x.ndim - 2)), 1, -1)
        for x in (q_BxTxGxK, k_BxTxGxK, v_BxTxHxV, log_decay_BxTxH, *beta)
    )
    log_decay_BxHxNxC = log_decay.reshape(batch, heads, -1, LENGTH)
    from_start, to_end = (
        jnp.exp(exact_product(log_decay_BxHxNxC, sums)).reshape(log_decay.shape)
        for sums in (jnp.tri(LENGTH).T, jnp.tri(LENGTH, k=-1))
    )
    gates_BxHxRxT = jnp.stack([log_decay, from_start, to_end, *beta], axis=2)
    run = sharding.per_device(
        functools.partial(recurrence, interpret=platform() != "tpu"),
        (("batch", "heads", None, None),) * 5,
    )
    y_BxHxVxT, state_BxHxVxK = run(
        jnp.swapaxes(state_BxHxKxV, 2, 3), *(x.astype(dtype) for x in (q, k, v)), gates_BxHxRxT
    )
    return jnp.moveaxis(y_BxHxVxT, 3, 1)[:, :time], jnp.swapaxes(state_BxHxVxK, 2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def recurrence(state_BxHxVxK, q_BxGxKxT, k_BxGxKxT, v_BxHxVxT, gates_BxHxRxT, interpret: bool):
    """Returns y, (B, H, V, T), and the last state, (B, H, V, K), both float32. T must be a multiple
    of LENGTH.

    The gates are the logarithm of the decay, γ, ω (see ops/chunks.py) and, for the delta rule, β,
    all float32.
    """
    return _forward(state_BxHxVxK, q_BxGxKxT, k_BxGxKxT, v_BxHxVxT, gates_BxHxRxT, interpret)[0]


def chunk(q_KxC, k_KxC, v_VxC, gates_RxC, state_VxK):
    """Returns y, (V, C), and the state after the chunk. Matrices over pairs of positions are
    transposed: (j, i).
    """
    log_decay, from_start, to_end, *beta = (gates_RxC[i : i + 1] for i in range(len(gates_RxC)))
    product = functools.partial(dot, dtype=q_KxC.dtype)
    j, i = (jax.lax.broadcasted_iota(jnp.int32, (LENGTH, LENGTH), axis) for axis in (0, 1))
    decays = jnp.where(j <= i, jnp.exp(sums_between(log_decay)), 0.0)
    u_VxC = v_VxC.astype(jnp.float32)
    if beta:
        earlier = jnp.where(j < i, decays * product(k_KxC, k_KxC, (0, 0)), 0.0) * beta[0]
        rest_VxC = beta[0] * (u_VxC - from_start * product(state_VxK, k_KxC, (1, 0)))
        u_VxC = solve(earlier, rest_VxC, q_KxC.dtype)
    y_VxC = from_start * product(state_VxK, q_KxC, (1, 0))
    y_VxC += product(u_VxC, decays * product(k_KxC, q_KxC, (0, 0)), (1, 0))
    kept = jnp.sum(jnp.where(i[:1] == LENGTH - 1, from_start, 0.0), axis=1, keepdims=True)
    return y_VxC, kept * state_VxK + product(to_end * u_VxC, k_KxC, (1, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot(a, b, contract, dtype):
    dimensions = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(
        a.astype(dtype), b.astype(dtype), dimensions, preferred_element_type=jnp.float32
    )


def _dot_backward(contract, dtype, operands, dy):
    """Rounds the gradient to `dtype` as well."""
    (a, b), (axis_a, axis_b) = operands, contract
    da = dot(dy, b, (1, 1 - axis_b), dtype) if axis_a else dot(b, dy, (1 - axis_b, 1), dtype)
    db = dot(dy, a, (0, 1 - axis_a), dtype) if axis_b else dot(a, dy, (1 - axis_a, 0), dtype)
    return da.astype(a.dtype), db.astype(b.dtype)


dot.defvjp(lambda a, b, contract, dtype: (dot(a, b, contract, dtype), (a, b)), _dot_backward)


@jax.custom_vjp
def sums_between(x_1xC):
    """Returns Σ x over the positions after j and up to i, (j, i), with no sum that contains
    others.
    """
    j, i = (jax.lax.broadcasted_iota(jnp.int32, (LENGTH, LENGTH), axis) for axis in (0, 1))
    until, total = (j <= i).astype(jnp.bfloat16), 0.0
    for _ in range(
        3
    ):  # 3 numbers of 8 bits make a float32, and their products with 1 and 0 are exact
        part = x_1xC.astype(jnp.bfloat16)
        x_1xC -= part.astype(jnp.float32)
        rows = jnp.where(i > j, part.astype(jnp.float32), 0.0)
        total += dot(rows, until, (1, 0), jnp.bfloat16)
    return total


def _sums_backward(_, dy):
    j, i = (jax.lax.broadcasted_iota(jnp.int32, (LENGTH, LENGTH), axis) for axis in (0, 1))
    ends_minus_starts = jnp.sum(dy - dy.T, axis=0, keepdims=True)
    after = (j >= i).astype(jnp.float32)
    return (
        jax.lax.dot_general(
            ends_minus_starts,
            after,
            (((1,), (0,)), ((), ())),
            precision="highest",
            preferred_element_type=jnp.float32,
        ),
    )


sums_between.defvjp(lambda x_1xC: (sums_between(x_1xC), None), _sums_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def solve(upper, rest_VxC, dtype):
    """Returns U with U·(I + upper) = rest, for a strictly upper triangular matrix."""
    return _solve_forward(upper, rest_VxC, dtype)[0]


def _solve_forward(upper, rest_VxC, dtype):
    inverse = unit_inverse(upper, dtype)
    u_VxC = dot(rest_VxC, inverse, (1, 0), dtype)
    return u_VxC, (inverse, u_VxC)


def _solve_backward(dtype, saved, du_VxC):
    inverse, u_VxC = saved
    d_rest = dot(du_VxC, inverse, (1, 1), dtype)
    return -dot(u_VxC, d_rest, (0, 0), dtype), d_rest


solve.defvjp(_solve_forward, _solve_backward)


def unit_inverse(upper, dtype):
    """Returns (I + upper)⁻¹ by block doubling: [[P, R], [0, Q]]⁻¹ = [[P⁻¹, −P⁻¹·R·Q⁻¹], [0, Q⁻¹]].

    The diagonal blocks lie side by side in a (size, C) matrix, since a product takes time for each
    row of its left operand. The first blocks have the 8 rows of a register.
    """
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (LENGTH, LENGTH), axis) for axis in (0, 1))
    sides, registers = column[:ROWS] % ROWS, range(0, LENGTH, ROWS)
    blocks = sum(
        jnp.where(column[:ROWS] // ROWS == n // ROWS, upper[n : n + ROWS], 0.0) for n in registers
    )
    inverse = (row[:ROWS] == sides).astype(jnp.float32)
    for size in (1, 2, 4):
        r = jnp.where(joins(row[:ROWS], sides, size), blocks, 0.0)
        inverse -= (
            r
            if size == 1
            else precise(precise(inverse, on_diagonal(r), dtype), on_diagonal(inverse), dtype)
        )
    while len(inverse) < LENGTH:
        size = len(inverse)
        r = jnp.where(joins(row, column, size), upper, 0.0)
        joined = precise(precise(inverse, r, dtype), on_diagonal(inverse), dtype)
        is_second = column[:size] // size % 2 == 1
        inverse = jnp.concatenate(
            [jnp.where(is_second, -joined, inverse), jnp.where(is_second, inverse, 0.0)]
        )
    return inverse


def joins(row, column, size: int):
    """Returns where the blocks R of pairs of diagonal blocks are."""
    return (row // size + 1 == column // size) & (column // size % 2 == 1)


def on_diagonal(blocks):
    """(size, C) → (C, C)"""
    size = len(blocks)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (LENGTH, LENGTH), axis) for axis in (0, 1))
    return jnp.where(
        row // size == column // size, jnp.concatenate([blocks] * (LENGTH // size)), 0.0
    )


def precise(a, b, dtype):
    """Returns a·b. In bfloat16, operands are sums of two numbers."""
    if dtype != jnp.bfloat16:
        return jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)
    a_high, b_high = a.astype(dtype), b.astype(dtype)
    a_low, b_low = a - a_high.astype(jnp.float32), b - b_high.astype(jnp.float32)
    return (
        dot(a_high, b_high, (1, 0), dtype)
        + dot(a_low, b_high, (1, 0), dtype)
        + dot(a_high, b_low, (1, 0), dtype)
    )


def of_group(q, k, v, gates, states):
    """Returns y and the state after the chunk for each head of a group, from one array per head. A
    list of queries or keys with one array is for all heads.
    """
    q, k = (x * (len(v) // len(x)) for x in (q, k))
    return [chunk(*inputs) for inputs in zip(q, k, v, gates, states, strict=True)]


def heads_at(positions, arrays):
    return [[x[h, :, positions] for h in range(len(x))] for x in arrays]


def _forward_kernel(q, k, v, gates, state, y, states, last, carried):
    @pl.when(pl.program_id(2) == 0)
    def _():
        carried[...] = state[...]

    def next_chunk(n, _):
        at = pl.ds(n * LENGTH, LENGTH)
        before = [carried[h] for h in range(len(carried))]
        for h, (y_VxC, after) in enumerate(of_group(*heads_at(at, (q, k, v, gates)), before)):
            states[h, n], y[h, :, at], carried[h] = before[h], y_VxC, after

    jax.lax.fori_loop(0, v.shape[-1] // LENGTH, next_chunk, None)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        last[...] = carried[...]


def _gradient_kernel(q, k, v, gates, states, dy, d_last, dq, dk, dv, d_gates, d_state, carried):
    @pl.when(pl.program_id(2) == 0)
    def _():
        carried[...] = d_last[...]

    chunks, heads = v.shape[-1] // LENGTH, range(len(carried))

    def previous_chunk(step, _):
        n = chunks - 1 - step
        at = pl.ds(n * LENGTH, LENGTH)
        _, gradient = jax.vjp(
            of_group, *heads_at(at, (q, k, v, gates)), [states[h, n] for h in heads]
        )
        *gradients, d_states = gradient([(dy[h, :, at], carried[h]) for h in heads])
        for x, by_head in zip((dq, dk, dv, d_gates), gradients, strict=True):
            for h, gradient_of_x in enumerate(by_head):
                x[h, :, at] = gradient_of_x
        for h in heads:
            carried[h] = d_states[h]

    jax.lax.fori_loop(0, chunks, previous_chunk, None)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        d_state[...] = carried[...]


def _call(kernel, name, inputs, outputs, kinds, reverse, interpret):
    """A step of the grid gets the heads of a group, or what they share, and by their kinds a block
    of "positions", the states of its "chunks", or the "state" at an end of the text.
    """
    batch, heads, width_v, time = inputs[2].shape
    group, block = math.gcd(heads, HEADS), math.gcd(time, BLOCK)
    blocks = time // block

    def spec(x, kind):
        in_step, is_split = max(1, x.shape[1] * group // heads), x.shape[1] > 1
        lengths, after_head = {
            "positions": ((x.shape[2], block), lambda t: (0, t)),
            "chunks": ((block // LENGTH, *x.shape[3:]), lambda t: (t, 0, 0)),
            "state": (x.shape[2:], lambda t: (0, 0)),
        }[kind]

        def index(b, h, t):
            return b, h if is_split else 0, *after_head(blocks - 1 - t if reverse else t)

        return pl.BlockSpec((None, in_step, *lengths), index)

    specs = [spec(x, kind) for x, kind in zip((*inputs, *outputs), kinds, strict=True)]
    rule = "gated_delta" if inputs[3].shape[2] == 4 else "state_space"
    return pl.pallas_call(
        kernel,
        name=f"{rule}_{name}",
        grid=(batch, heads // group, blocks),
        in_specs=specs[: len(inputs)],
        out_specs=specs[len(inputs) :],
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM((group, width_v, inputs[1].shape[2]), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
    )(*inputs)


def _forward(state, q, k, v, gates, interpret):
    batch, heads, width_v, time = v.shape
    shapes = [v.shape, (batch, heads, time // LENGTH, width_v, k.shape[2]), state.shape]
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    kinds = [*["positions"] * 4, "state", "positions", "chunks", "state"]
    y, states, last = _call(
        _forward_kernel, "forward", (q, k, v, gates, state), outputs, kinds, False, interpret
    )
    return (y, last), (q, k, v, gates, states)


def _backward(interpret, saved, cotangents):
    """The kernel sums the gradient of what heads share over the heads of a group."""
    *inputs, _ = saved
    dy, d_last = cotangents
    batch, heads = dy.shape[:2]
    groups = heads // math.gcd(heads, HEADS)
    outputs = [
        jax.ShapeDtypeStruct(
            x.shape if x.shape[1] == heads else (batch, groups, *x.shape[2:]), x.dtype
        )
        for x in (*inputs, d_last)
    ]
    kinds = [*["positions"] * 4, "chunks", "positions", "state", *["positions"] * 4, "state"]
    *gradients, d_state = _call(
        _gradient_kernel, "gradient", (*saved, dy, d_last), outputs, kinds, True, interpret
    )
    return d_state, *(
        dx if dx.shape == x.shape else jnp.sum(dx, axis=1, keepdims=True)
        for dx, x in zip(gradients, inputs)
    )


recurrence.defvjp(_forward, _backward)
