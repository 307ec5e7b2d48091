"""TPU kernels of recurrences with a state, and of their gradients: Mamba-2's (see state_space.py)
and, with a further gate β, the gated delta rule (see gated_delta.py).

A chunk's matrices exist only in a core's own memory. The gradient kernel computes them again from
the state before the chunk, which is all that the forward kernel saves; its formulas are JAX's
gradient of `_chunk`.

Shapes: B batch, H heads, G = 1 or H heads of queries and keys, K key width, V value width, T time;
R = 3 gates, or 4 with β; C positions of a chunk. In the kernels, the last axis of all arrays is for
time.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smallgpt_jax.devices import sharding
from smallgpt_jax.devices.platform import platform
from smallgpt_jax.ops.chunks import RecurrenceInputs
from smallgpt_jax.ops.chunks import product as exact_product

LENGTH = 128  # positions per chunk: the width of the matrix unit
_MAX_WIDTH = 512  # largest sum of the widths of keys and values
_BLOCK = 512  # largest number of positions per step of a kernel's grid
_ROWS = 8  # of a register
_HEADS = 2  # per step: while one waits for a product, the other computes
_FORGET = -1e30  # log decay of a token that does not see the state; sums of it are finite


def fits(time: int, key_width: int, value_width: int) -> bool:
    """Returns whether there is a chunk, and its blocks fit into a kernel's 16 MiB."""
    return time >= LENGTH and key_width + value_width <= _MAX_WIDTH


def applies(inputs: RecurrenceInputs, backend: str) -> bool:
    """Returns whether a recurrence uses the kernel; not if the `backend` is "xla"."""
    _, time, _, key_width = inputs.q_BxTxGxK.shape
    value_width = inputs.v_BxTxHxV.shape[-1]
    return backend != "xla" and platform() == "tpu" and fits(time, key_width, value_width)


class _Arrays(NamedTuple):
    """What the kernels read of each token, or the gradients by it."""

    q_BxGxKxT: jax.Array
    k_BxGxKxT: jax.Array
    v_BxHxVxT: jax.Array
    gates_BxHxRxT: jax.Array


def in_kernel(inputs: RecurrenceInputs, begins_BxT, state_BxHxKxV, dtype: str = "bfloat16"):
    """Returns y, (B, T, H, V), and the last state. `inputs` are float32, with β only for the delta
    rule. Operands of products are rounded to `dtype`, as TPUs by default round float32 to bfloat16.
    """
    batch, time, heads, _ = inputs.v_BxTxHxV.shape
    log_decay_BxTxH = jnp.where(begins_BxT[:, :, None], _FORGET, inputs.log_decay_BxTxH)

    def time_last(x):  # (B, T, …) → (B, …, T), padded with zeros to whole chunks
        padding = [(0, 0), (0, -time % LENGTH)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, padding), 1, -1)

    inputs = inputs._replace(log_decay_BxTxH=log_decay_BxTxH)
    q, k, v, log_decay, beta = inputs.map(time_last)
    log_decay_BxHxNxC = log_decay.reshape(batch, heads, -1, LENGTH)
    # γ and ω: column i of the matrices sums the logarithms up to i, or those after i.
    until_i, after_i = jnp.tri(LENGTH).T, jnp.tri(LENGTH, k=-1)
    from_start = jnp.exp(exact_product(log_decay_BxHxNxC, until_i)).reshape(log_decay.shape)
    to_end = jnp.exp(exact_product(log_decay_BxHxNxC, after_i)).reshape(log_decay.shape)
    gates = [log_decay, from_start, to_end]
    if beta is not None:
        gates.append(beta)
    gates_BxHxRxT = jnp.stack(gates, axis=2)
    run = sharding.per_device(
        functools.partial(_recurrence, interpret=platform() != "tpu"),
        (("batch", "heads", None, None),) * 5,
    )
    state_BxHxVxK = jnp.swapaxes(state_BxHxKxV, 2, 3)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    y_BxHxVxT, state_BxHxVxK = run(state_BxHxVxK, q, k, v, gates_BxHxRxT)
    return jnp.moveaxis(y_BxHxVxT, 3, 1)[:, :time], jnp.swapaxes(state_BxHxVxK, 2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _recurrence(state_BxHxVxK, q_BxGxKxT, k_BxGxKxT, v_BxHxVxT, gates_BxHxRxT, interpret: bool):
    """Returns y, (B, H, V, T), and the last state, (B, H, V, K), both float32.

    LENGTH must divide T. The gates are the logarithm of the decay, γ, ω (see ops/chunks.py) and, for
    the delta rule, β, all float32.
    """
    return _forward(state_BxHxVxK, q_BxGxKxT, k_BxGxKxT, v_BxHxVxT, gates_BxHxRxT, interpret)[0]


def _chunk(q_KxC, k_KxC, v_VxC, gates_RxC, state_VxK):
    """Returns y, (V, C), and the state after the chunk. Matrices of positions are (j, i)."""
    # Γ, γ and ω of ops/chunks.py: `decays`, `from_start`, `to_end`
    log_decay, from_start, to_end, *beta = (gates_RxC[r : r + 1] for r in range(len(gates_RxC)))
    product = functools.partial(_dot, dtype=q_KxC.dtype)
    j, i = _row_and_column()
    decays = jnp.where(j <= i, jnp.exp(_sums_between(log_decay)), 0.0)
    u_VxC = v_VxC.astype(jnp.float32)
    if beta:  # what the delta rule adds in place of the values: see gated_delta.py
        earlier = jnp.where(j < i, decays * product(k_KxC, k_KxC, (0, 0)), 0.0) * beta[0]
        rest_VxC = beta[0] * (u_VxC - from_start * product(state_VxK, k_KxC, (1, 0)))
        u_VxC = _solve(earlier, rest_VxC, q_KxC.dtype)
    y_VxC = from_start * product(state_VxK, q_KxC, (1, 0))
    scores = decays * product(k_KxC, q_KxC, (0, 0))
    y_VxC += product(u_VxC, scores, (1, 0))
    # γ of the last token, as a sum: the gradient of a slice would be a padding.
    is_last = i[:1] == LENGTH - 1
    kept = jnp.sum(jnp.where(is_last, from_start, 0.0), axis=1, keepdims=True)
    return y_VxC, kept * state_VxK + product(to_end * u_VxC, k_KxC, (1, 1))


def _row_and_column():
    shape = (LENGTH, LENGTH)
    return (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dot(a, b, contract, dtype):
    """Returns the product over axis contract[0] of a and contract[1] of b, in float32."""
    dimensions = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(
        a.astype(dtype), b.astype(dtype), dimensions, preferred_element_type=jnp.float32
    )


def _dot_backward(contract, dtype, operands, dy):
    """Rounds the gradient to `dtype` as well."""
    a, b = operands
    axis_a, axis_b = contract
    kept_a, kept_b = 1 - axis_a, 1 - axis_b  # the axes of y are those that were not summed over
    # The left operand's axis comes first in a product, so the order gives a's axes, or b's.
    da = _dot(dy, b, (1, kept_b), dtype) if axis_a else _dot(b, dy, (kept_b, 1), dtype)
    db = _dot(dy, a, (0, kept_a), dtype) if axis_b else _dot(a, dy, (kept_a, 0), dtype)
    return da.astype(a.dtype), db.astype(b.dtype)


_dot.defvjp(lambda a, b, contract, dtype: (_dot(a, b, contract, dtype), (a, b)), _dot_backward)


@jax.custom_vjp
def _sums_between(x_1xC):
    """Returns Σ x over the positions after j and up to i, (j, i)."""
    # Not as a difference of two sums from the start of the chunk, which would lose digits.
    j, i = _row_and_column()
    until = (j <= i).astype(jnp.bfloat16)
    total = 0.0
    # 3 numbers of 8 bits make a float32, and their products with 1 and 0 are exact.
    for _ in range(3):
        leading_1xC = x_1xC.astype(jnp.bfloat16)
        x_1xC -= leading_1xC.astype(jnp.float32)
        rows = jnp.where(i > j, leading_1xC.astype(jnp.float32), 0.0)
        total += _dot(rows, until, (1, 0), jnp.bfloat16)
    return total


def _sums_backward(_, dy):
    # The sum of a pair (j, i) contains x_p if j < p ≤ i. So a pair counts once where it ends, and
    # minus once where it starts; the sum of these counts from p on is that of the pairs around p.
    j, i = _row_and_column()
    ends_minus_starts = jnp.sum(dy - dy.T, axis=0, keepdims=True)
    after = (j >= i).astype(jnp.float32)
    dx_1xC = jax.lax.dot_general(
        ends_minus_starts,
        after,
        (((1,), (0,)), ((), ())),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return (dx_1xC,)


_sums_between.defvjp(lambda x_1xC: (_sums_between(x_1xC), None), _sums_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _solve(upper, rest_VxC, dtype):
    """Returns U with U·(I + upper) = rest, for a strictly upper triangular matrix."""
    return _solve_forward(upper, rest_VxC, dtype)[0]


def _solve_forward(upper, rest_VxC, dtype):
    inverse = _unit_inverse(upper, dtype)
    u_VxC = _dot(rest_VxC, inverse, (1, 0), dtype)
    return u_VxC, (inverse, u_VxC)


def _solve_backward(dtype, saved, du_VxC):
    inverse, u_VxC = saved
    d_rest = _dot(du_VxC, inverse, (1, 1), dtype)
    return -_dot(u_VxC, d_rest, (0, 0), dtype), d_rest


_solve.defvjp(_solve_forward, _solve_backward)


def _unit_inverse(upper, dtype):
    """Returns (I + upper)⁻¹ by block doubling: [[P, R], [0, Q]]⁻¹ = [[P⁻¹, −P⁻¹·R·Q⁻¹], [0, Q⁻¹]].

    The diagonal blocks lie side by side in a (size, C) matrix, since a product takes time for each
    row of its left operand. The first blocks have the 8 rows of a register.
    """
    row, column = _row_and_column()
    sides = column[:_ROWS] % _ROWS  # column within its block
    # (8, C): the 8 × 8 blocks on the diagonal
    blocks = sum(
        jnp.where(column[:_ROWS] // _ROWS == n // _ROWS, upper[n : n + _ROWS], 0.0)
        for n in range(0, LENGTH, _ROWS)
    )
    inverse = (row[:_ROWS] == sides).astype(jnp.float32)
    # Up to 8 rows, both blocks of a pair are in the same 8 rows of the matrix.
    for size in (1, 2, 4):
        r = jnp.where(_joins(row[:_ROWS], sides, size), blocks, 0.0)
        if size > 1:  # the inverse of blocks of size 1 is the identity
            r = _precise(_precise(inverse, _on_diagonal(r), dtype), _on_diagonal(inverse), dtype)
        inverse -= r
    while len(inverse) < LENGTH:
        size = len(inverse)
        r = jnp.where(_joins(row, column, size), upper, 0.0)
        joined = _precise(_precise(inverse, r, dtype), _on_diagonal(inverse), dtype)
        is_second = column[:size] // size % 2 == 1
        # P⁻¹ and −P⁻¹·R·Q⁻¹ are the upper rows of a pair, 0 and Q⁻¹ the lower ones.
        inverse = jnp.concatenate(
            [jnp.where(is_second, -joined, inverse), jnp.where(is_second, inverse, 0.0)]
        )
    return inverse


def _joins(row, column, size: int):
    """Returns where the blocks R of pairs of diagonal blocks are."""
    return (row // size + 1 == column // size) & (column // size % 2 == 1)


def _on_diagonal(blocks):
    """(size, C) → (C, C)"""
    size = len(blocks)
    row, column = _row_and_column()
    is_diagonal = row // size == column // size
    copies = jnp.concatenate([blocks] * (LENGTH // size))
    return jnp.where(is_diagonal, copies, 0.0)


def _precise(a, b, dtype):
    """Returns a·b. In bfloat16, operands are sums of two numbers."""
    if dtype != jnp.bfloat16:
        return jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)
    a_high, b_high = a.astype(dtype), b.astype(dtype)
    a_low, b_low = a - a_high.astype(jnp.float32), b - b_high.astype(jnp.float32)
    # a_low·b_low is below the precision of the sum.
    return (
        _dot(a_high, b_high, (1, 0), dtype)
        + _dot(a_low, b_high, (1, 0), dtype)
        + _dot(a_high, b_low, (1, 0), dtype)
    )


def _of_group(inputs: _Arrays, states):
    """Returns y and the state after the chunk for each head, from lists of one array per head."""
    heads = len(states)
    q, k, v, gates = inputs
    # heads that share queries or keys have lists of one array, which are repeated
    q, k = q * (heads // len(q)), k * (heads // len(k))
    return [_chunk(*arrays) for arrays in zip(q, k, v, gates, states, strict=True)]


def _heads_at(positions, inputs: _Arrays) -> _Arrays:
    def by_head(x):
        return [x[h, :, positions] for h in range(len(x))]

    return _Arrays(*map(by_head, inputs))


def _forward_kernel(inputs: _Arrays, state, y, states, last, carried):
    """Writes y, the states before each chunk, and the last state."""
    # `carried`, (heads, V, K), is the state between chunks, which the steps of the grid hand on.

    @pl.when(pl.program_id(2) == 0)  # at the first positions of a row
    def _():
        carried[...] = state[...]

    heads = range(len(carried))

    def next_chunk(n, _):
        at = pl.ds(n * LENGTH, LENGTH)
        before = [carried[h] for h in heads]
        for h, (y_VxC, after) in enumerate(_of_group(_heads_at(at, inputs), before)):
            states[h, n] = before[h]
            y[h, :, at] = y_VxC
            carried[h] = after

    jax.lax.fori_loop(0, y.shape[-1] // LENGTH, next_chunk, None)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        last[...] = carried[...]


def _gradient_kernel(saved, cotangents, d_inputs: _Arrays, d_state, carried):
    """Goes from the last chunk to the first; `carried` is the gradient by the state after it."""
    inputs, states = saved
    dy, d_last = cotangents

    @pl.when(pl.program_id(2) == 0)
    def _():
        carried[...] = d_last[...]

    chunks = dy.shape[-1] // LENGTH
    heads = range(len(carried))

    def previous_chunk(step, _):
        n = chunks - 1 - step
        at = pl.ds(n * LENGTH, LENGTH)
        # The formulas of the forward kernel, from the state that it has saved, differentiated.
        _, gradient = jax.vjp(_of_group, _heads_at(at, inputs), [states[h, n] for h in heads])
        gradients, d_states = gradient([(dy[h, :, at], carried[h]) for h in heads])
        for x, by_head in zip(d_inputs, gradients, strict=True):
            for h, gradient_of_x in enumerate(by_head):
                x[h, :, at] = gradient_of_x
        for h in heads:
            carried[h] = d_states[h]

    jax.lax.fori_loop(0, chunks, previous_chunk, None)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        d_state[...] = carried[...]


class _Pass(NamedTuple):
    """A pass over the chunks. `inputs` and `outputs` say what a step of the grid gets of each
    array: a block of "positions", the states of its "chunks", or the "state" at an end of the text.
    """

    kernel: Callable
    name: str
    inputs: tuple
    outputs: tuple
    is_reversed: bool = False


_POSITIONS = _Arrays(*["positions"] * 4)
_FORWARD = _Pass(
    _forward_kernel,
    "forward",
    inputs=(_POSITIONS, "state"),
    outputs=("positions", "chunks", "state"),
)
_GRADIENT = _Pass(
    _gradient_kernel,
    "gradient",
    inputs=((_POSITIONS, "chunks"), ("positions", "state")),
    outputs=(_POSITIONS, "state"),
    is_reversed=True,
)


def _call(kernel_pass: _Pass, inputs, outputs, arrays: _Arrays, interpret: bool):
    """Returns the outputs, of shapes `outputs`. A step of the grid gets the heads of a group, or
    what they share. `inputs` contain `arrays`.
    """
    batch, heads, width_v, time = arrays.v_BxHxVxT.shape
    group = math.gcd(heads, _HEADS)
    block = math.gcd(time, _BLOCK)
    blocks = time // block

    # The part of the array `x` that a step of the grid gets; the kinds are those of `_Pass`.
    def spec(kind, x):
        heads_of_step = max(1, x.shape[1] * group // heads)
        is_split = x.shape[1] > 1  # over the steps of the grid; otherwise all heads share x
        if kind == "positions":
            lengths = (x.shape[2], block)
        elif kind == "chunks":
            lengths = (block // LENGTH, *x.shape[3:])
        else:
            lengths = x.shape[2:]

        def index(b, h, t):
            t = blocks - 1 - t if kernel_pass.is_reversed else t
            after_head = {"positions": (0, t), "chunks": (t, 0, 0), "state": (0, 0)}[kind]
            return b, h if is_split else 0, *after_head

        return pl.BlockSpec((None, heads_of_step, *lengths), index)

    rule = "gated_delta" if arrays.gates_BxHxRxT.shape[2] == 4 else "state_space"
    return pl.pallas_call(
        kernel_pass.kernel,
        name=f"{rule}_{kernel_pass.name}",
        grid=(batch, heads // group, blocks),
        in_specs=jax.tree.map(spec, kernel_pass.inputs, inputs),
        out_specs=jax.tree.map(spec, kernel_pass.outputs, outputs),
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM((group, width_v, arrays.k_BxGxKxT.shape[2]), jnp.float32)],
        # Steps along the positions run in order, because each reads the state of the one before.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
    )(*inputs)


def _forward(state, q, k, v, gates, interpret):
    batch, heads, width_v, time = v.shape
    width_k = k.shape[2]
    arrays = _Arrays(q, k, v, gates)
    shape_of_states = (batch, heads, time // LENGTH, width_v, width_k)  # before each chunk
    shapes = (v.shape, shape_of_states, state.shape)
    outputs = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    y, states, last = _call(_FORWARD, (arrays, state), outputs, arrays, interpret)
    return (y, last), (arrays, states)


def _backward(interpret, saved, cotangents):
    """Returns the gradients by the arguments of `_forward`."""
    arrays, _states = saved
    dy, d_last = cotangents
    batch, heads = dy.shape[:2]
    # The kernel sums the gradient of what all heads share, whose axis of heads has the length 1,
    # over the heads of a group. The sum over groups is done here.
    groups = heads // math.gcd(heads, _HEADS)

    def gradient_of(x):
        shape = x.shape if x.shape[1] == heads else (batch, groups, *x.shape[2:])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    outputs = (jax.tree.map(gradient_of, arrays), gradient_of(d_last))
    d_arrays, d_state = _call(_GRADIENT, (saved, cotangents), outputs, arrays, interpret)
    d_inputs = (
        dx if dx.shape == x.shape else jnp.sum(dx, axis=1, keepdims=True)
        for dx, x in zip(d_arrays, arrays)
    )
    return d_state, *d_inputs


_recurrence.defvjp(_forward, _backward)
