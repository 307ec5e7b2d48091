"""Time of the custom kernels in a TPU program: mostly, of their products at peak speed."""

import math
import re

from smallgpt_jax.devices.chips import Chip
from smallgpt_jax.ops.flash_attention import block_length, blocks_in_reach, is_short
from smallgpt_jax.ops.recurrence_kernel import LENGTH

# {kernel: number of matrix products}. Each product has as many FLOPs as (attention weights) ×
# (values). "online-softmax" is the TPU compiler's kernel for plain attention. Its first operand is
# the scores. It computes the attention weights from them and multiplies the weights by the values.
_KERNEL_PRODUCTS = {
    "splash_mha_fwd": 2,
    "splash_mha_dq": 3,
    "splash_mha_dkv": 4,
    "online-softmax": 1,
}

_SCORES_PER_VECTOR = 1024  # of one operation of the vector unit: 8 rows of 128 float32 numbers

# {kernel of ops/flash_attention.py: (number of products that compute scores, number of products
# that use scores, cycles of the vector unit per 1024 scores, the same with a short attention
# window)}. Heads are padded to 128 in products that compute scores, but not in those that use
# scores. The cycles are from the TPU compiler's schedules for v5e and v6e (libtpu 0.0.51). They are
# higher with a short window, because blocks are shorter and most of them are masked.
_FLASH_KERNELS = {
    "flash_attention_forward": (1, 1, 3, 3.5),
    "flash_attention_gradient": (2, 3, 4, 5),
}

# {kernel of ops/recurrence_kernel.py: (cycles per chunk and head, the same per unit of keys' width,
# of values' width)}. The cycles are fitted to the TPU compiler's schedules for v5e (libtpu 0.0.51),
# for widths of 16 + 32 to 128 + 256, state_space to 128 + 384. They include 62 for a chunk's and
# head's part in a step of the grid, but no time for waiting for memory.
_RECURRENCE_KERNELS = {
    "gated_delta_forward": (1160, 0.85, 0.85),
    "gated_delta_gradient": (1540, 2.85, 2.85),
    "state_space_forward": (247, 0.33, 0.86),
    "state_space_gradient": (460, 0.32, 1.62),
}


def kernel_seconds(line: str, positions: int, chip: Chip) -> float | None:
    """Returns the seconds of the kernel that an HLO line calls; None for an unknown kernel."""
    # Ignores memory traffic, which takes less time than the products, except in "online-softmax",
    # which reads the scores.
    operands = line.partition("operand_layout_constraints=")[2]
    if "ragged-dot-metadata" in line:  # computes the groups of each tile, without matrix products
        return 0.0
    if "ragged-dot" in line:
        return _ragged_dot_flops(line, operands) / chip.flops
    # The names of the kernels are in the line, whatever the compiler calls the instruction.
    names = [*_FLASH_KERNELS, *_RECURRENCE_KERNELS, *_KERNEL_PRODUCTS]
    name = next((name for name in names if name in line), None)
    if name in _FLASH_KERNELS:
        window = int(re.search(rf"{name}_(\d+)", line)[1])
        return _flash_attention_seconds(name, window, operands, chip)
    if name in _RECURRENCE_KERNELS:
        return _recurrence_seconds(name, operands, chip)
    if name in _KERNEL_PRODUCTS:
        flops = _KERNEL_PRODUCTS[name] * _attention_product_flops(name, operands, positions)
        return flops / chip.flops
    return None


def _shapes(operands: str, min_axes: int = 1) -> list[list[int]]:
    """Returns the shapes in a text such as "f32[2,3]{1,0}, s32[5]{0}"."""
    texts = re.findall(rf"\w+\[(\d+(?:,\d+){{{min_axes - 1},}})\]", operands)
    return [list(map(int, text.split(","))) for text in texts]


def _flash_attention_seconds(name: str, window: int, operands: str, chip: Chip) -> float:
    """Returns the seconds of a kernel of ops/flash_attention.py."""
    score_products, later_products, vector_cycles, cycles_if_short = _FLASH_KERNELS[name]
    if is_short(window):
        vector_cycles = cycles_if_short
    *rows_and_heads, width, positions = _shapes(operands, min_axes=4)[0]
    length = block_length(positions, window)
    reach = blocks_in_reach(positions, window)
    # block i of queries sees itself and the blocks before it, as far as the window reaches
    blocks = sum(min(i, reach) + 1 for i in range(positions // length))
    scores = math.prod(rows_and_heads) * blocks * length**2
    # Seconds per score. While the matrix unit computes a block of scores, the vector unit processes
    # the previous block: the slower one counts. Then come the products that use the scores.
    # Products that compute scores sum over the head's width, which is padded to the 128 rows of the
    # matrix unit; the others only to 16.
    matrix_unit = score_products * 2 * max(width, 128) / chip.flops
    vector_unit = vector_cycles / _SCORES_PER_VECTOR / (chip.cores * chip.hertz)
    later_seconds = later_products * 2 * max(width, 16) / chip.flops
    return scores * (max(matrix_unit, vector_unit) + later_seconds)


def _recurrence_seconds(name: str, operands: str, chip: Chip) -> float:
    """Returns the seconds of a kernel of ops/recurrence_kernel.py."""
    _, keys, values = _shapes(operands)[:3]  # the first are the queries
    *_, key_width, _ = keys
    *rows_and_heads, value_width, time = values
    per_chunk, per_key_width, per_value_width = _RECURRENCE_KERNELS[name]
    chunks = math.prod(rows_and_heads) * time // LENGTH
    cycles = chunks * (per_chunk + per_key_width * key_width + per_value_width * value_width)
    return cycles / (chip.cores * chip.hertz)


def _attention_product_flops(name: str, operands: str, positions: int) -> float:
    """Returns the FLOPs of one product of an attention kernel, as the matrix unit computes it."""
    is_splash = name != "online-softmax"
    shapes = _shapes(operands, min_axes=4)
    queries_or_values = shapes[0] if is_splash else shapes[1]  # shapes[0] would be the scores
    # The last two axes of the operand are the head width and the number of positions. They may be
    # in the other order, so only their product is used.
    *rows_and_heads, width, length = queries_or_values
    head_width = width * length // positions
    # Splash attention skips a block of (queries × keys) if the mask excludes all of it, and computes
    # all scores of the other blocks. Heads are padded to a width of 128.
    computed = _computed_blocks(operands) if is_splash else 1
    return 2 * math.prod(rows_and_heads) * computed * positions**2 * max(head_width, 128)


def _ragged_dot_flops(line: str, operands: str) -> float:
    """Returns the FLOPs of the compiler's kernel for `jax.lax.ragged_dot` and its gradients."""
    # A tile of rows is computed once for each group in it: at most rows / tile + groups − 1 products,
    # which one operand lists.
    tile = int(re.search(r'ragged_dot_tiling="(\d+),', line)[1])
    tiles = max(int(length) for length in re.findall(r"s32\[(\d+)\]", operands))
    left, right = _shapes(operands, min_axes=2)
    # Usually, the right operand has three axes: one matrix per group. In the kernel for the
    # matrices' gradient, it has two axes, and as many rows as the left operand.
    width = right[-2] if len(right) > 2 else left[-1]
    return 2 * tiles * tile * width * right[-1]


def _computed_blocks(operands: str) -> float:
    """Returns the fraction of the blocks of scores that a splash kernel computes."""
    # The first operand contains n lists of at most m blocks each. List i has the blocks of keys to
    # compute for the i-th block of queries; in the kernel "dkv", keys and queries change places. The
    # shape is (1, n, m), in "dkv" (1, m, n). Without an attention window, m = n. The mask is causal,
    # so the lengths of the lists are min(i + 1, m), for i from 0 to n − 1.
    sizes = re.search(r"\bs(?:8|16|32)\[1,(\d+),(\d+)\]", operands).groups()
    longest, blocks = sorted(map(int, sizes))
    computed = sum(min(i + 1, longest) for i in range(blocks))
    return computed / blocks**2
