"""Roofline of the custom kernels in a TPU program: the time of their matrix products at the chip's peak speed.

For the kernels of ops/flash_attention.py, it includes the time of the vector unit.
"""

import math
import re

from smallgpt_jax.analysis.chips import Chip
from smallgpt_jax.ops.flash_attention import block_length, blocks_in_reach

# {name of a kernel: number of matrix products that it computes}. Each product has as many FLOPs as the product of the
# attention weights and the values. "online-softmax" is the TPU compiler's kernel for plain attention: it turns the
# scores (its first operand) into attention weights and multiplies the weights by the values.
KERNEL_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4, "online-softmax": 1}

# {name of a kernel of ops/flash_attention.py: (products that result in scores, products with scores, cycles of the
# vector unit per 1024 scores)}. A product with scores streams only the rows of the head width through the matrix unit,
# so its heads are not padded to 128. The cycles of the vector unit are those of the TPU compiler's schedules for v5e
# and v6e (libtpu 0.0.51).
FLASH_KERNELS = {"flash_attention_forward": (1, 1, 3), "flash_attention_gradient": (2, 3, 4)}


def kernel_seconds(line: str, positions: int, chip: Chip) -> float | None:
    """Returns the seconds that a kernel takes at peak speed; None for an unknown kernel.

    `line` is the HLO instruction that calls the kernel; `positions` is the context length. Memory traffic is ignored.
    In every kernel except "online-softmax", which reads the scores from memory, it takes less time than the products.
    """
    operands = line.partition("operand_layout_constraints=")[2]
    if "ragged-dot-metadata" in line:  # computes the groups of each tile, without matrix products
        return 0.0
    if "ragged-dot" in line:
        return ragged_dot_flops(line, operands) / chip.flops
    if name := next((name for name in FLASH_KERNELS if name in line), None):
        window = int(re.search(rf"{name}_(\d+)", line)[1])
        return flash_attention_seconds(name, window, operands, chip)
    name = next((name for name in KERNEL_PRODUCTS if name in line), None)
    return name and KERNEL_PRODUCTS[name] * attention_product_flops(name, operands, positions) / chip.flops


def flash_attention_seconds(name: str, window: int, operands: str, chip: Chip) -> float:
    """Returns the seconds of a kernel of ops/flash_attention.py.

    The vector unit processes a block of scores while the matrix unit computes the next block, so the slower of the two
    counts. The products with the scores are added.
    """
    to_scores, with_scores, vector_cycles = FLASH_KERNELS[name]
    *rows_and_heads, width, positions = map(int, re.search(r"\w+\[(\d+(?:,\d+){3,})\]", operands)[1].split(","))
    length = block_length(positions)
    blocks = sum(min(i, blocks_in_reach(positions, window)) + 1 for i in range(positions // length))
    scores = math.prod(rows_and_heads) * blocks * length**2
    of_scores = max(to_scores * 2 * max(width, 128) / chip.flops, vector_cycles / 1024 / (chip.cores * chip.hertz))
    return scores * (of_scores + with_scores * 2 * max(width, 16) / chip.flops)


def attention_product_flops(name: str, operands: str, positions: int) -> float:
    """Returns the FLOPs of one matrix product of an attention kernel, as the matrix unit computes it.

    Heads are padded to a width of 128, and splash attention computes all scores of a block of (queries × keys) unless
    the mask excludes the whole block.
    """
    is_splash = name != "online-softmax"
    shapes = re.findall(r"\w+\[(\d+(?:,\d+){3,})\]", operands)
    # The last two axes of the operand are the head width and the number of positions. They may be in the other order,
    # so only their product is used.
    *rows_and_heads, width, length = map(int, shapes[0 if is_splash else 1].split(","))
    head_width = width * length // positions
    computed = computed_blocks(operands) if is_splash else 1
    return 2 * math.prod(rows_and_heads) * computed * positions**2 * max(head_width, 128)


def ragged_dot_flops(line: str, operands: str) -> float:
    """Returns the FLOPs of the TPU compiler's kernel for `jax.lax.ragged_dot` and its gradients.

    The kernel multiplies tiles of rows. A tile with rows of several groups is computed once per group. The number of
    computed tiles is therefore at most rows / tile + groups − 1. One operand lists the group of each computed tile and
    has this length.
    """
    tile = int(re.search(r'ragged_dot_tiling="(\d+),', line)[1])
    tiles = max(int(length) for length in re.findall(r"s32\[(\d+)\]", operands))
    left, right = (tuple(map(int, shape.split(","))) for shape in re.findall(r"[a-z]+\d+\[(\d+(?:,\d+)+)\]", operands))
    # The right operand has one matrix per group. In the gradient of the matrices, it has one row per row of the left
    # operand instead.
    return 2 * tiles * tile * (math.prod(right[-2:]) if len(right) > 2 else left[-1] * right[-1])


def computed_blocks(operands: str) -> float:
    """Returns the fraction of the blocks of scores that a splash kernel computes.

    `operands` is HLO text that gives the types of the operands. The first operand contains one list per block of
    queries: the blocks of keys to compute. In the kernel "dkv", it contains one list per block of keys: the blocks of
    queries. Its shape is (1, n, m), in "dkv" (1, m, n), where n is the number of lists and m is the length of the
    longest list. Without an attention window, m = n. The mask is causal, so the lists have min(i + 1, m) blocks, for i
    from 0 to n − 1.
    """
    sizes = re.search(r"\bs(?:8|16|32)\[1,(\d+),(\d+)\]", operands).groups()
    longest, blocks = sorted(map(int, sizes))
    return sum(min(i + 1, longest) for i in range(blocks)) / blocks**2
