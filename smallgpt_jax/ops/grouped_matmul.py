"""Products of groups of rows with one matrix per group, for mixtures of experts.

Rows are moved into slots: a group of n rows has ⌈n/b⌉ blocks of b slots. The number of slots is
static and large enough for any grouping, so no row is ever dropped. Backends
(`config.model.grouped_matmul`):

- "ragged": `jax.lax.ragged_dot`, b = 1. TPUs have a kernel; elsewhere, XLA multiplies every row by
  all matrices.
- "blocks": one batched product of all blocks, each with a copy of its matrix; at most b − 1 unused
  rows per group.

Relative speed of "blocks": 9.7 × "ragged" and 0.32 × a dense MLP of equal FLOPs with 1,024 rows of
width 128, and 9.6 and 0.42 with 2,048 rows of width 256; 3 of 16 experts, forward and backward,
float32, two cores of an AMD EPYC, jax 0.10.2, 2026-11-24 (`python benchmarks/ops.py
--only=experts`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from smallgpt_jax.devices import sharding
from smallgpt_jax.devices.platform import platform

BACKENDS = ("auto", "ragged", "blocks")
# Rows per block. On CPUs, larger blocks are not faster, and have more unused rows. On GPUs, the
# traffic of the copied matrices and of their gradients takes longer than the products.
_MAX_BLOCK = {"cpu": 128, "gpu": 1024}


class Grouping(NamedTuple):
    """The slots of R rows that belong to G groups: S slots in N blocks of S / N slots."""

    row_of_slot_S: jax.Array  # R for unused slots
    slot_of_row_R: jax.Array
    group_sizes_G: jax.Array
    group_of_block_N: jax.Array


def block_size(backend: str, rows: int, num_groups: int) -> int:
    """Returns a power of two, at most half of the mean number of rows per group."""
    if backend == "ragged":
        return 1
    # 1,000 rows of 4 groups: half of the mean is 125, and the block 64.
    half_of_mean = rows // (2 * num_groups)
    power_of_two = 1 << max(0, half_of_mean.bit_length() - 1)
    return min(_MAX_BLOCK.get(platform(), 128), power_of_two)


def group_rows(group_of_row_R, num_groups: int, block: int) -> Grouping:
    """Sorts rows by group (int32), and pads each group to a multiple of `block`."""
    rows = group_of_row_R.size
    # A group with rows has at most `block` − 1 unused slots.
    num_blocks = (rows + min(num_groups, rows) * (block - 1)) // block
    order_R = jnp.argsort(group_of_row_R, stable=True)
    sorted_group_R = group_of_row_R[order_R]
    sizes_G = jnp.sum(jax.nn.one_hot(group_of_row_R, num_groups, dtype=jnp.int32), axis=0)
    if block == 1:  # slots are the sorted rows; TPUs sort faster than they scatter
        return Grouping(order_R, jnp.argsort(order_R), sizes_G, sorted_group_R)
    # Groups of 3 and 5 rows in blocks of 4: they begin at rows 0 and 3, and at slots 0 and 4.
    blocks_G = -(-sizes_G // block)
    first_row_G = jnp.cumsum(sizes_G) - sizes_G
    first_slot_G = (jnp.cumsum(blocks_G) - blocks_G) * block
    # Blocks after the last group's blocks are unused. The clip gives them to the last group.
    group_of_block_N = jnp.minimum(
        jnp.searchsorted(jnp.cumsum(blocks_G), jnp.arange(num_blocks), side="right"), num_groups - 1
    )
    num_slots = num_blocks * block
    group_of_slot_S = jnp.repeat(group_of_block_N, block, total_repeat_length=num_slots)
    # The place of each slot in its group; the first places have rows.
    place_S = jnp.arange(num_slots) - first_slot_G[group_of_slot_S]
    row_of_slot_S = jnp.where(
        place_S < sizes_G[group_of_slot_S],
        order_R[jnp.minimum(first_row_G[group_of_slot_S] + place_S, rows - 1)],
        rows,
    )
    slot_of_sorted_row_R = (
        first_slot_G[sorted_group_R] + jnp.arange(rows) - first_row_G[sorted_group_R]
    )
    slot_of_row_R = jnp.zeros(rows, jnp.int32)
    slot_of_row_R = slot_of_row_R.at[order_R].set(slot_of_sorted_row_R.astype(jnp.int32))
    return Grouping(row_of_slot_S, slot_of_row_R, sizes_G, group_of_block_N)


# Each of these two functions is the gradient of the other: the gradient of indexing would be a slow
# scatter.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def into_slots(x_TxD, grouping: Grouping, copies: int = 1):
    """Returns the rows x[i mod T] in their slots, (S, D), 0 in unused ones."""
    row_S = grouping.row_of_slot_S
    rows = len(grouping.slot_of_row_R)
    if len(row_S) == rows:  # filling slots with zeros would be a pass over all rows
        return jnp.take(x_TxD, row_S % len(x_TxD), axis=0, mode="clip")
    source_S = jnp.where(row_S < rows, row_S % len(x_TxD), len(x_TxD))
    return jnp.take(x_TxD, source_S, axis=0, mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def from_slots(y_SxD, grouping: Grouping, copies: int = 1):
    """Returns the rows, each summed over its copies, (T, D)."""
    slots_CxT = grouping.slot_of_row_R.reshape(copies, -1)
    # One sum over an array of all copies would take more passes over them.
    copies_TxD = (jnp.take(y_SxD, slots_T, axis=0, mode="clip") for slots_T in slots_CxT)
    return sum(y_TxD.astype(jnp.float32) for y_TxD in copies_TxD).astype(y_SxD.dtype)


into_slots.defvjp(
    lambda x_TxD, grouping, copies: (into_slots(x_TxD, grouping, copies), grouping),
    lambda copies, grouping, ct_SxD: (from_slots(ct_SxD, grouping, copies), None),
)
from_slots.defvjp(
    lambda y_SxD, grouping, copies: (from_slots(y_SxD, grouping, copies), grouping),
    lambda copies, grouping, ct_TxD: (into_slots(ct_TxD, grouping, copies), None),
)


def grouped_matmul(x_SxI, w_GxIxO, grouping: Grouping, backend: str):
    if backend == "ragged":
        return jax.lax.ragged_dot(x_SxI, w_GxIxO, grouping.group_sizes_G)
    slots, num_blocks = len(x_SxI), len(grouping.group_of_block_N)
    x_NxbxI = x_SxI.reshape(num_blocks, slots // num_blocks, -1)
    return _block_matmul(x_NxbxI, w_GxIxO, grouping.group_of_block_N).reshape(slots, -1)


@jax.custom_vjp
def _block_matmul(x_NxbxI, w_GxIxO, group_of_block_N):
    return jnp.einsum("nbi,nio->nbo", x_NxbxI, w_GxIxO[group_of_block_N])


def _block_matmul_backward(residuals, ct_NxbxO):
    """The gradient of a matrix is summed over its blocks in float32, whatever its dtype."""
    x_NxbxI, w_GxIxO, group_of_block_N = residuals
    dx_NxbxI = jnp.einsum("nbo,nio->nbi", ct_NxbxO, w_GxIxO[group_of_block_N])
    dw_NxIxO = jnp.einsum("nbi,nbo->nio", x_NxbxI, ct_NxbxO, preferred_element_type=jnp.float32)
    dw_GxIxO = jax.ops.segment_sum(
        dw_NxIxO, group_of_block_N, len(w_GxIxO), indices_are_sorted=True
    )
    return dx_NxbxI, dw_GxIxO.astype(w_GxIxO.dtype), None


_block_matmul.defvjp(lambda *inputs: (_block_matmul(*inputs), inputs), _block_matmul_backward)


class ExpertWeights(NamedTuple):
    into_ExDxF: list[jax.Array]  # [W_up], or [W_gate, W_up] of gated MLPs
    out_ExFxD: jax.Array


def grouped_experts(
    x_BxTxD, experts_BxTxK, gates_BxTxK, weights: ExpertWeights, activation, backend: str
):
    """Returns Σ_k gate_k · expert_k(x), (B, T, D)."""
    # Each device groups its own rows of the batch, so that no token moves to another device.
    into_ExDxF, out_ExFxD = weights
    if backend == "auto":
        backend = "ragged" if platform() == "tpu" else "blocks"
    is_gated = len(into_ExDxF) == 2

    def on_one_device(x_BxTxD, experts_BxTxK, gates_BxTxK, *weights):
        *into, out = weights
        num_choices, num_experts = experts_BxTxK.shape[-1], len(out)
        # Rows are ordered by choice, then by token.
        experts_R = experts_BxTxK.reshape(-1, num_choices).T.reshape(-1)
        gates_R = gates_BxTxK.reshape(-1, num_choices).T.reshape(-1)
        block = block_size(backend, len(experts_R), num_experts)
        grouping = group_rows(experts_R, num_experts, block)
        x_SxD = into_slots(x_BxTxD.reshape(-1, x_BxTxD.shape[-1]), grouping, num_choices)
        first, *up = (grouped_matmul(x_SxD, w_ExDxF, grouping, backend) for w_ExDxF in into)
        h_SxF = activation(first)
        if is_gated:
            h_SxF = h_SxF * up[0]
        # Gates multiply the input of the last product, so that their gradient needs no outputs of
        # experts.
        h_SxF *= into_slots(gates_R, grouping)[:, None].astype(h_SxF.dtype)
        y_SxD = grouped_matmul(h_SxF, out, grouping, backend)
        return from_slots(y_SxD, grouping, num_choices).reshape(x_BxTxD.shape)

    rows, choices = ("batch", "time", "embed_activation"), ("batch", "time", None)
    into_axes = [("expert", None, "mlp")] * len(into_ExDxF)
    axes = (rows, choices, choices, *into_axes, ("expert", "mlp", None))
    return sharding.per_device(on_one_device, axes, summed="mlp")(
        x_BxTxD, experts_BxTxK, gates_BxTxK, *into_ExDxF, out_ExFxD
    )
