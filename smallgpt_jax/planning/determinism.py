"""Operations of a compiled GPU program whose results depend on the order in which threads add."""

import re
from collections import Counter

from smallgpt_jax.planning.hlo import HloModule, Instruction

_ATTENTION_BACKWARD = '"__cudnn$fmhaSoftmaxBackward"'
_FLOATS = ("f", "bf")  # integers have the same sum in any order


# XLA compiles a sum into an array at repeated indices, such as the gradient of an embedding, to
# atomic additions. With the compiler option xla_gpu_deterministic_ops, it first sorts the indices
# and adds equal ones, cuDNN uses an ordered form of attention's backward pass, and each product uses
# the first suitable kernel instead of the one that was the fastest when the process measured.
def unordered_operations(module: HloModule, deterministic: bool) -> dict[str, int]:
    """Returns {operation: how often the program executes it}."""
    counts: Counter[str] = Counter()
    for times, instruction in module.executed():
        # the text does not say which form of cuDNN's kernel the program has
        if _ATTENTION_BACKWARD in instruction.line and not deterministic:
            counts["cuDNN's backward pass of attention"] += times
        elif _adds_with_atomics(instruction):
            counts[f"{instruction.opcode} of {_source(instruction)}"] += times
    return dict(counts)


def _adds_with_atomics(instruction: Instruction) -> bool:
    if instruction.opcode not in ("scatter", "select-and-scatter"):
        return False
    has_floats = any(array.dtype.startswith(_FLOATS) for array in instruction.arrays)
    # at indices that differ, each number is added to once
    return has_floats and "unique_indices=true" not in instruction.line


def _source(instruction: Instruction) -> str:
    """Returns the end of the operation's path in the traced program: "jit(_take)/scatter-add"."""
    match = re.search(r'op_name="([^"]*)"', instruction.line)
    return "/".join(match[1].split("/")[-2:]) if match else instruction.name
