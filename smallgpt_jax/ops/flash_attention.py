"""A TPU kernel for causal attention. The last axis of all arrays is for positions, not for the head width.

It is FlashAttention (Dao, arXiv 2307.08691): the (time, time) scores exist only in blocks of (keys × queries), in a
core's own memory. Two properties make it faster than JAX's splash attention at context lengths of a few thousand:

- The axis order. Heads narrower than 128 need no padding in memory. The products with the attention weights stream K
  rows per head through the matrix unit; splash attention streams T rows.
- One kernel for all gradients. It computes the scores once; splash attention computes them in each of two kernels.

The kernels keep the queries, keys, values and gradients of a whole head in a core's memory; see `fits`.

Shapes: B batch, H heads, G key–value heads, R = H/G query heads per key–value head, K head width, T time.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = 512  # maximum length of a block of keys or queries
MAX_BYTES = 2**19  # maximum bytes of queries per key–value head; see `fits`
OUTPUT = "attention_output"  # name of the forward pass's results in rematerialization policies


def block_length(time: int) -> int:
    return math.gcd(time, BLOCK)


def fits(per_group: int, head_width: int, time: int, dtype: str) -> bool:
    """Returns whether the kernels' arrays fit into the 16 MiB of a core's memory that a kernel may use by default.

    For each byte of a key–value head's queries, the gradient kernel needs at most 18 bytes: a float32 sum, and two
    copies of each of its 7 arguments and results. One copy is moved while the other is used. Blocks of scores need
    another 5 MiB.
    """
    return per_group * max(head_width, 16) * time * jnp.dtype(dtype).itemsize <= MAX_BYTES


def blocks_in_reach(time: int, window: int) -> int:
    """Returns the maximum number of earlier blocks of keys that a block of queries attends to.

    A query attends to keys that are at most `window` − 1 positions before it; a window of 0 is unlimited. Keys that are
    d blocks before a query are at least d · length − (length − 1) positions before it.
    """
    length = block_length(time)
    return (window + length - 2) // length if window else time // length


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def flash_attention(q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, window: int, interpret: bool):
    """Returns the causal attention output softmax(kᵀ·q)·v, (B, H, K, T). The softmax is over keys and float32.

    T must be a multiple of 128; see also `fits`. Each query attends to its newest `window` positions, or to all of them
    if `window` is 0. With `interpret`, the kernels run on any platform.
    """
    return _forward(q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, window, interpret)[0]


def _dot(a, b, contract: tuple[int, int]):
    dimensions = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _scores(k_KxS, q_KxC, blocks_apart, window: int):
    """Returns the scores of a block of keys and the block of queries that is `blocks_apart` blocks later, (S, C)."""
    scores_SxC = _dot(k_KxS, q_KxC, (0, 0))
    is_diagonal = isinstance(blocks_apart, int)  # the int is 0; all other distances are traced
    if not window and not is_diagonal:
        return scores_SxC
    key, query = (jax.lax.broadcasted_iota(jnp.int32, scores_SxC.shape, axis) for axis in (0, 1))
    distance = query - key + blocks_apart * q_KxC.shape[1]
    allowed = distance < window if window else True
    return jnp.where(allowed & (distance >= 0) if is_diagonal else allowed, scores_SxC, -1e30)


def _forward_kernel(q_KxC, k_KxT, v_KxT, y_KxC, log_sums_1xC, *, window: int):
    """Computes the output and the log-sums of exponentials of one block of C queries."""
    width, length = q_KxC.shape
    query_block = pl.program_id(2)
    q = q_KxC[...]

    def add_keys(blocks_apart, carry):
        largest_1xC, sums_1xC, y = carry
        keys = pl.ds((query_block - blocks_apart) * length, length)
        scores_SxC = _scores(k_KxT[:, keys], q, blocks_apart, window)
        new_largest_1xC = jnp.maximum(largest_1xC, jnp.max(scores_SxC, axis=0, keepdims=True))
        weights_SxC = jnp.exp(scores_SxC - new_largest_1xC)
        rescale_1xC = jnp.exp(largest_1xC - new_largest_1xC)
        y = y * rescale_1xC + _dot(v_KxT[:, keys], weights_SxC.astype(v_KxT.dtype), (1, 0))
        return new_largest_1xC, sums_1xC * rescale_1xC + jnp.sum(weights_SxC, axis=0, keepdims=True), y

    zeros_1xC = jnp.zeros((1, length), jnp.float32)
    carry = add_keys(0, (zeros_1xC - 1e30, zeros_1xC, jnp.zeros((width, length), jnp.float32)))
    previous = jnp.minimum(query_block, blocks_in_reach(k_KxT.shape[1], window))
    largest_1xC, sums_1xC, y = jax.lax.fori_loop(1, previous + 1, add_keys, carry)
    y_KxC[...] = (y / sums_1xC).astype(y_KxC.dtype)
    log_sums_1xC[...] = largest_1xC + jnp.log(sums_1xC)


def _gradient_kernel(q_RxKxT, k_KxT, v_KxT, dy_RxKxT, log_sums_Rx1xT, products_Rx1xT, dq_RxKxT, dk_KxT, dv_KxT,
                     dq_sums_RxKxT, *, window: int):
    """Computes the gradients of one key–value head and of its R query heads.

    `products_Rx1xT` are the sums of y·dy over the head width (Dao, arXiv 2307.08691, section 3.1.2).
    """
    per_group, width, time = q_RxKxT.shape
    length = block_length(time)
    blocks = time // length
    dq_sums_RxKxT[...] = jnp.zeros(dq_sums_RxKxT.shape, jnp.float32)

    def add_block(head, key_block, blocks_apart, carry):
        dk, dv = carry
        keys, queries = pl.ds(key_block * length, length), pl.ds((key_block + blocks_apart) * length, length)
        k, v, q, dy = k_KxT[:, keys], v_KxT[:, keys], q_RxKxT[head, :, queries], dy_RxKxT[head, :, queries]
        weights_SxC = jnp.exp(_scores(k, q, blocks_apart, window) - log_sums_Rx1xT[head, :, queries])
        d_scores_SxC = weights_SxC * (_dot(v, dy, (0, 0)) - products_Rx1xT[head, :, queries])
        d_scores_SxC = d_scores_SxC.astype(q.dtype)
        dq_sums_RxKxT[head, :, queries] += _dot(k, d_scores_SxC, (1, 0))
        return dk + _dot(q, d_scores_SxC, (1, 1)), dv + _dot(dy, weights_SxC.astype(dy.dtype), (1, 1))

    def gradients_of_keys(key_block, _):
        later = jnp.minimum(blocks - 1 - key_block, blocks_in_reach(time, window))

        def add_head(head, carry):
            return jax.lax.fori_loop(
                1, later + 1, functools.partial(add_block, head, key_block), add_block(head, key_block, 0, carry))

        zeros_KxS = jnp.zeros((width, length), jnp.float32)
        dk, dv = jax.lax.fori_loop(0, per_group, add_head, (zeros_KxS, zeros_KxS))
        keys = pl.ds(key_block * length, length)
        dk_KxT[:, keys], dv_KxT[:, keys] = dk.astype(dk_KxT.dtype), dv.astype(dv_KxT.dtype)

    jax.lax.fori_loop(0, blocks, gradients_of_keys, None)
    dq_RxKxT[...] = dq_sums_RxKxT[...].astype(dq_RxKxT.dtype)


def _forward(q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, window: int, interpret: bool):
    batch, heads, width, time = q_BxHxKxT.shape
    per_group, length = heads // k_BxGxKxT.shape[1], block_length(time)

    def queries(rows):
        return pl.BlockSpec((None, None, rows, length), lambda batch, head, block: (batch, head, 0, block))

    def group(batch, head, block):
        return batch, jax.lax.div(head, per_group), 0, 0  # `//` does not compile for devices that are not attached

    keys = pl.BlockSpec((None, None, width, time), group)
    y_BxHxKxT, log_sums_BxHx1xT = pl.pallas_call(
        functools.partial(_forward_kernel, window=window), name=f"flash_attention_forward_{window}",
        grid=(batch, heads, time // length), in_specs=[queries(width), keys, keys],
        out_specs=[queries(width), queries(1)],
        out_shape=[jax.ShapeDtypeStruct(q_BxHxKxT.shape, q_BxHxKxT.dtype),
                   jax.ShapeDtypeStruct((batch, heads, 1, time), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel")),
        interpret=interpret)(q_BxHxKxT, k_BxGxKxT, v_BxGxKxT)
    y_BxHxKxT, log_sums_BxHx1xT = (checkpoint_name(x, OUTPUT) for x in (y_BxHxKxT, log_sums_BxHx1xT))
    return y_BxHxKxT, (q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, y_BxHxKxT, log_sums_BxHx1xT)


def _backward(window: int, interpret: bool, saved, dy_BxHxKxT):
    q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, y_BxHxKxT, log_sums_BxHx1xT = saved
    batch, heads, width, time = q_BxHxKxT.shape
    groups = k_BxGxKxT.shape[1]
    per_group = heads // groups
    products_BxHx1xT = jnp.sum(
        y_BxHxKxT.astype(jnp.float32) * dy_BxHxKxT.astype(jnp.float32), axis=2, keepdims=True)

    def spec(*block):
        return pl.BlockSpec((None, *block, time), lambda batch, group: (batch, group, 0, 0))

    queries, sums, keys = spec(per_group, width), spec(per_group, 1), spec(None, width)
    return pl.pallas_call(
        functools.partial(_gradient_kernel, window=window), name=f"flash_attention_gradient_{window}",
        grid=(batch, groups), in_specs=[queries, keys, keys, queries, sums, sums], out_specs=[queries, keys, keys],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BxHxKxT, k_BxGxKxT, v_BxGxKxT)],
        scratch_shapes=[pltpu.VMEM((per_group, width, time), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret)(q_BxHxKxT, k_BxGxKxT, v_BxGxKxT, dy_BxHxKxT, log_sums_BxHx1xT, products_BxHx1xT)


flash_attention.defvjp(_forward, _backward)
