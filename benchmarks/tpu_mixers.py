"""Estimates the mixers' speed on a TPU, for several context lengths. Needs no TPU, but its compiler
(extra `plan`).

    python benchmarks/tpu_mixers.py

Compiles whole training steps of 16,384 tokens: forward pass, gradients, optimizer. The models have
four scanned blocks of configs/llama.py at size `paper`, with another mixer in all blocks, or in
three of four ("hybrid"). The table has two numbers per model and context: the compiler's cycles per
token, and those of attention's kernels at peak speed.
"""

import json
import sys

import jax
from absl import flags

from configs import hybrid, llama, mamba
from smallgpt_jax import cli
from smallgpt_jax.devices import chips
from smallgpt_jax.errors import UserError
from smallgpt_jax.planning import estimate, topologies
from smallgpt_jax.planning.compilation import Compiler
from smallgpt_jax.planning.hlo import HloModule
from smallgpt_jax.training.build import build_program

MIXERS = {
    "attention": (llama, {}),
    "hybrid": (hybrid, {}),
    "mamba": (mamba, {}),
    "delta": (hybrid, {"mixers": ("delta",), "position": "none", "num_kv_heads": 0}),
    "conv": (mamba, {"mixers": ("conv",)}),
}

_MIXERS = flags.DEFINE_multi_enum(
    "mixer", list(MIXERS), list(MIXERS), "Repeat the flag for several mixers."
)
_CONTEXTS = flags.DEFINE_list("contexts", ["1024", "4096", "16384"], "Context lengths of training.")
_TOPOLOGY = flags.DEFINE_string("topology", "v5e:1x1", "A TPU, as for `plan`.")
_BLOCKS = flags.DEFINE_integer(
    "blocks", 4, "Blocks, of which equal neighbors are scanned.", lower_bound=1
)
_VOCABULARY = flags.DEFINE_integer(
    "vocabulary", 50_304, "Size of the vocabulary; a small one leaves the blocks."
)

TOKENS = 16384  # per step


def cycles_per_token(name: str, context: int, devices: list[jax.Device]) -> tuple[float, float]:
    """Returns the cycles of the program, and those of its kernels."""
    recipe, fields = MIXERS[name]
    config = recipe.get_config("paper")
    config.model.update(
        context_length=context,
        num_layers=_BLOCKS.value,
        scan_layers=True,
        vocab_size=_VOCABULARY.value,
        **fields,
    )
    config.train.update(batch_size=max(1, TOKENS // context), microbatches=1)
    program, chip = build_program(config, devices), chips.find_chip(devices[0].device_kind)
    try:
        text = Compiler(devices).compile(program.lowered_train_step).text
    except jax.errors.JaxRuntimeError as error:
        needed = estimate.bytes_needed(error, 0) / chips.GiB
        raise UserError(
            f"{name}, context {context}: needs {needed:.1f} GiB; decrease --blocks"
        ) from None
    if text is None or not (cycles := estimate.tpu_cycles(HloModule(text), context, chip)):
        raise UserError(
            f"--topology={_TOPOLOGY.value}: the compiled program has no readable cycles; choose "
            "v5e:1x1"
        )
    tokens = config.train.batch_size * context
    return cycles.compiled / tokens, cycles.kernels / tokens


def main() -> None:
    if not _TOPOLOGY.value.startswith("v"):
        raise UserError(f"--topology={_TOPOLOGY.value}: only TPUs have cycles; choose v5e:1x1")
    devices, rows = topologies.topology_devices(_TOPOLOGY.value), []
    for name in _MIXERS.value:
        for context in map(int, _CONTEXTS.value):
            try:
                program, kernels = cycles_per_token(name, context, devices)
            except UserError as error:  # the other models may fit
                print(error, file=sys.stderr, flush=True)
                continue
            rows.append(
                {
                    "mixer": name,
                    "context": context,
                    "cycles_per_token": program,
                    "of_kernels": kernels,
                }
            )
            print(f"{name} {context}: {program:,.0f} + {kernels:,.0f}", file=sys.stderr, flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    cli.run(main)
