"""A TPU kernel for causal attention. The last axis of all arrays is for positions, not for the head
width.

It is FlashAttention (Dao, arXiv 2307.08691): the (time, time) scores exist only in blocks of (keys
× queries), in a core's own memory. At context lengths of a few thousand, it is faster than JAX's
splash attention:

- Heads narrower than 128 need no padding, and products with the attention weights stream K rows per
  head, not T.
- One kernel for all gradients computes the scores once; splash attention computes them in each of
  two kernels.

Shapes: B batch, H heads, G key–value heads, R = H/G, K head width, T time, C queries and S keys of
  a block.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_BLOCK = 512  # maximum length of a block of keys or queries
_SHORT_BLOCK = 256  # the same with a short window; see `is_short`
_MAX_BYTES = 2**19  # maximum bytes of queries per key–value head; see `fits`
OUTPUT = "attention_output"  # name of the forward pass's results in rematerialization policies


def is_short(window: int) -> bool:
    # Then a query reaches so few blocks that loops over them are unrolled, and only blocks at an
    # edge of the mask are masked.
    return 0 < window <= 2 * _SHORT_BLOCK


def block_length(time: int, window: int) -> int:
    # Short blocks have fewer scores outside the window; in long blocks, a score takes less time.
    return math.gcd(time, _SHORT_BLOCK if is_short(window) else _BLOCK)


def fits(per_group: int, head_width: int, time: int, dtype: str) -> bool:
    """Returns whether a whole head fits into the 16 MiB of a core's memory that a kernel may use."""
    # Blocks of scores need 5 MiB, and each byte of queries at most 18 for gradients: a float32 sum,
    # and 7 arguments and results, each twice, as one copy is moved while the other is used. Heads
    # narrower than 16 are padded to 16.
    bytes_of_queries = per_group * max(head_width, 16) * time * jnp.dtype(dtype).itemsize
    return bytes_of_queries <= _MAX_BYTES


def blocks_in_reach(time: int, window: int) -> int:
    """Returns how many blocks of keys before its own block a query can attend to, at most."""
    length = block_length(time, window)
    if not window:
        return time // length
    # Keys d blocks before a query are at least d · length − (length − 1) positions before it, so
    # d ≤ ⌈(window − 1) / length⌉: 1 for windows up to 257 and blocks of 256.
    return (window + length - 2) // length


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def flash_attention(q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, window: int, interpret: bool):
    """Returns softmax(kᵀ·q)·v, (B, H, K, T), for T a multiple of 128; a window of 0: none."""
    return _forward(q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, window, interpret)[0]


def _dot(a, b, contract: tuple[int, int]):
    """Sums over an axis of `a` and one of `b`: (1, 0) gives a·b, (0, 0) aᵀ·b, and (1, 1) a·bᵀ."""
    dimensions = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _scores(k_KxS, q_KxC, blocks_apart, window: int):
    """Returns masked (S, C) scores; `blocks_apart` is an int, or a positive traced integer."""
    scores_SxC = _dot(k_KxS, q_KxC, (0, 0))
    length = q_KxC.shape[1]
    is_static = isinstance(blocks_apart, int)
    is_diagonal = is_static and blocks_apart == 0
    is_in_window = not window or (is_static and (blocks_apart + 1) * length <= window)
    if is_in_window and not is_diagonal:  # nothing to mask
        return scores_SxC
    key, query = (jax.lax.broadcasted_iota(jnp.int32, scores_SxC.shape, axis) for axis in (0, 1))
    distance = query - key + blocks_apart * length
    allowed = True if is_in_window else distance < window
    if is_diagonal:
        allowed = allowed & (distance >= 0)
    # Finite, because the difference of two infinities would be NaN.
    return jnp.where(allowed, scores_SxC, -1e30)


def _for_each_block(time: int, window: int, body, count_after: bool = False):
    """Calls body(i, n), with n blocks in reach before block i, or after it with `count_after`; n is
    an int if the window is short.
    """
    blocks = time // block_length(time, window)
    reach = blocks_in_reach(time, window)

    def neighbors(i):
        return blocks - 1 - i if count_after else i

    if not is_short(window):
        jax.lax.fori_loop(0, blocks, lambda i, _: body(i, jnp.minimum(neighbors(i), reach)), None)
        return
    # Blocks from `start` to `stop` have `reach` neighbors; those at the edge of the row have fewer.
    edge = min(reach, blocks)
    start, stop = (0, blocks - edge) if count_after else (edge, blocks)
    for i in range(start):
        body(i, neighbors(i))
    jax.lax.fori_loop(start, stop, lambda i, _: body(i, reach), None)
    for i in range(stop, blocks):
        body(i, neighbors(i))


# Of one head: fills `y_KxT` and `log_sums_1xT`, block of queries by block of queries.
def _forward_kernel(q_KxT, k_KxT, v_KxT, y_KxT, log_sums_1xT, *, window: int):
    width, time = q_KxT.shape
    length = block_length(time, window)

    def add_keys(query_block, blocks_apart, carry):
        # The softmax so far: the largest score, and sums of exp(score − largest).
        largest_1xC, sums_1xC, y = carry
        q = q_KxT[:, pl.ds(query_block * length, length)]
        keys = [pl.ds((query_block - apart) * length, length) for apart in blocks_apart]
        scores = [
            _scores(k_KxT[:, block], q, apart, window) for block, apart in zip(keys, blocks_apart)
        ]
        largest_of_blocks = [jnp.max(scores_SxC, axis=0, keepdims=True) for scores_SxC in scores]
        new_largest_1xC = functools.reduce(jnp.maximum, largest_of_blocks, largest_1xC)
        rescale_1xC = jnp.exp(largest_1xC - new_largest_1xC)
        sums_1xC = sums_1xC * rescale_1xC
        y = y * rescale_1xC
        for block, scores_SxC in zip(keys, scores):
            weights_SxC = jnp.exp(scores_SxC - new_largest_1xC)
            y += _dot(v_KxT[:, block], weights_SxC.astype(v_KxT.dtype), (1, 0))
            sums_1xC += jnp.sum(weights_SxC, axis=0, keepdims=True)
        return new_largest_1xC, sums_1xC, y

    def outputs_of_queries(query_block, blocks_before):
        zeros_1xC = jnp.zeros((1, length), jnp.float32)
        carry = zeros_1xC - 1e30, zeros_1xC, jnp.zeros((width, length), jnp.float32)
        if is_short(window):
            carry = add_keys(query_block, range(blocks_before + 1), carry)
        else:  # the block of the diagonal first: its mask needs `apart` as a constant
            carry = jax.lax.fori_loop(
                1,
                blocks_before + 1,
                lambda apart, carry: add_keys(query_block, [apart], carry),
                add_keys(query_block, [0], carry),
            )
        largest_1xC, sums_1xC, y = carry
        queries = pl.ds(query_block * length, length)
        y_KxT[:, queries] = (y / sums_1xC).astype(y_KxT.dtype)
        log_sums_1xT[:, queries] = largest_1xC + jnp.log(sums_1xC)

    _for_each_block(time, window, outputs_of_queries)


class _GradientInputs(NamedTuple):
    """The arrays that the gradient kernel reads, of one key–value head."""

    q_RxKxT: jax.Array
    k_KxT: jax.Array
    v_KxT: jax.Array
    dy_RxKxT: jax.Array
    log_sums_Rx1xT: jax.Array
    y_dy_Rx1xT: jax.Array  # sums of y·dy over the head width (D of Dao, section 3.1.2)


def _gradient_kernel(
    inputs: _GradientInputs, dq_RxKxT, dk_KxT, dv_KxT, dq_sums_RxKxT, *, window: int
):
    """For each block of keys, goes over the R query heads and the blocks of queries that read it.

    dk and dv are summed in registers, dq over the blocks of keys in `dq_sums_RxKxT`. Queries come
    divided by √K, so dq is the gradient by these.
    """
    q_RxKxT, k_KxT, v_KxT, dy_RxKxT, log_sums_Rx1xT, y_dy_Rx1xT = inputs
    per_group, width, time = q_RxKxT.shape
    length = block_length(time, window)
    dq_sums_RxKxT[...] = jnp.zeros(dq_sums_RxKxT.shape, jnp.float32)

    def add_block(head, key_block, blocks_apart, carry):
        dk, dv = carry
        keys = pl.ds(key_block * length, length)
        queries = pl.ds((key_block + blocks_apart) * length, length)
        k, v = k_KxT[:, keys], v_KxT[:, keys]
        q, dy = q_RxKxT[head, :, queries], dy_RxKxT[head, :, queries]
        weights_SxC = jnp.exp(
            _scores(k, q, blocks_apart, window) - log_sums_Rx1xT[head, :, queries]
        )
        # Gradient of a softmax: weight · (v·dy − y·dy), where v·dy is the gradient by the weight, and
        # y·dy the mean of these, weighted.
        d_scores_SxC = weights_SxC * (_dot(v, dy, (0, 0)) - y_dy_Rx1xT[head, :, queries])
        d_scores_SxC = d_scores_SxC.astype(q.dtype)
        dq_sums_RxKxT[head, :, queries] += _dot(k, d_scores_SxC, (1, 0))
        dk = dk + _dot(q, d_scores_SxC, (1, 1))
        dv = dv + _dot(dy, weights_SxC.astype(dy.dtype), (1, 1))
        return dk, dv

    def gradients_of_keys(key_block, blocks_after):
        """Writes dk and dv of one block of keys, sums over the query heads that share it."""

        def add_head(head, carry):
            add = functools.partial(add_block, head, key_block)
            # `carry` is (dk, dv). Masks need constant distances on the diagonal (block 0), and at the
            # edge of a short window, whose few blocks are unrolled: `blocks_after` is an int then.
            if not is_short(window):
                return jax.lax.fori_loop(1, blocks_after + 1, add, add(0, carry))
            for blocks_apart in range(blocks_after + 1):
                carry = add(blocks_apart, carry)
            return carry

        zeros_KxS = jnp.zeros((width, length), jnp.float32)
        dk, dv = jax.lax.fori_loop(0, per_group, add_head, (zeros_KxS, zeros_KxS))
        keys = pl.ds(key_block * length, length)
        dk_KxT[:, keys] = dk.astype(dk_KxT.dtype)
        dv_KxT[:, keys] = dv.astype(dv_KxT.dtype)

    _for_each_block(time, window, gradients_of_keys, count_after=True)
    dq_RxKxT[...] = dq_sums_RxKxT[...].astype(dq_RxKxT.dtype)


def _forward(q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, window: int, interpret: bool):
    batch, heads, width, time = q_BxHxKxT.shape
    per_group = heads // k_BxGxKxT.shape[1]

    def queries(rows):
        return pl.BlockSpec((None, None, rows, time), lambda batch, head: (batch, head, 0, 0))

    def group(batch, head):
        # `//` does not compile for devices that are not attached.
        return batch, jax.lax.div(head, per_group), 0, 0

    keys = pl.BlockSpec((None, None, width, time), group)
    y_BxHxKxT, log_sums_BxHx1xT = pl.pallas_call(
        functools.partial(_forward_kernel, window=window),
        name=f"flash_attention_forward_{window}",
        grid=(batch, heads),
        in_specs=[queries(width), keys, keys],
        out_specs=[queries(width), queries(1)],
        out_shape=[
            jax.ShapeDtypeStruct(q_BxHxKxT.shape, q_BxHxKxT.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, time), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
    )(q_BxHxKxT, k_BxGxKxT, v_BxGxKxT)
    y_BxHxKxT = checkpoint_name(y_BxHxKxT, OUTPUT)
    log_sums_BxHx1xT = checkpoint_name(log_sums_BxHx1xT, OUTPUT)
    return y_BxHxKxT, (q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, y_BxHxKxT, log_sums_BxHx1xT)


def _backward(window: int, interpret: bool, saved, dy_BxHxKxT):
    q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, y_BxHxKxT, log_sums_BxHx1xT = saved
    batch, heads, width, time = q_BxHxKxT.shape
    groups = k_BxGxKxT.shape[1]
    per_group = heads // groups
    y_dy_BxHxKxT = y_BxHxKxT.astype(jnp.float32) * dy_BxHxKxT.astype(jnp.float32)
    # The gradient of a softmax needs y·dy of each query.
    y_dy_BxHx1xT = jnp.sum(y_dy_BxHxKxT, axis=2, keepdims=True)

    def spec(*block):
        return pl.BlockSpec((None, *block, time), lambda batch, group: (batch, group, 0, 0))

    queries = spec(per_group, width)
    sums = spec(per_group, 1)
    keys = spec(None, width)
    inputs = _GradientInputs(
        q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, dy_BxHxKxT, log_sums_BxHx1xT, y_dy_BxHx1xT
    )
    return pl.pallas_call(
        functools.partial(_gradient_kernel, window=window),
        name=f"flash_attention_gradient_{window}",
        grid=(batch, groups),
        in_specs=[_GradientInputs(queries, keys, keys, queries, sums, sums)],
        out_specs=[queries, keys, keys],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BxHxKxT, k_BxGxKxT, v_BxGxKxT)
        ],
        scratch_shapes=[pltpu.VMEM((per_group, width, time), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
    )(inputs)


flash_attention.defvjp(_forward, _backward)
