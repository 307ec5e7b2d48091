"""Measures activations, attention and losses inside a trained model, and the loss without each of
its blocks.

    python -m smallgpt_jax.diagnose --workdir=runs/pgpt
    python -m smallgpt_jax.diagnose --workdir=runs/moe --text=code.txt --text=poems.txt

Prints a table, and writes diagnose.json and plots to WORKDIR/diagnosis. docs/inside.md explains the
measures.
"""

import functools
import sys
from typing import Any

import numpy as np
from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.diagnosis import diagnosis
from smallgpt_jax.diagnosis.windows import WINDOWS
from smallgpt_jax.formatting import aligned_rows
from smallgpt_jax.run.names import DIAGNOSIS_FOLDER
from smallgpt_jax.storage.paths import as_path

_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.")
_TRUST = cli.define_trust()
_STEP = flags.DEFINE_integer("step", None, "Checkpoint step. Default: the newest.")
_TEXT = flags.DEFINE_multi_string(
    "text",
    [],
    "Text file to observe the model on; repeatable. Default: the run's validation split.",
)
_WINDOWS = flags.DEFINE_integer(
    "windows", WINDOWS, "Windows of context_length tokens per text.", lower_bound=1
)
_DEEP = flags.DEFINE_integer(
    "deep",
    24,
    "Blocks of the untrained model whose collapse without skip connections is measured; 0: none.",
    lower_bound=0,
)
flags.mark_flag_as_required("workdir")

COLUMNS = (
    "block",
    "width",
    "residual",
    "similarity",
    "neighbours",
    "entropy",
    "position 0",
    "loss after",
    "loss without",
)


def main() -> None:
    log = functools.partial(print, file=sys.stderr, flush=True)
    content = diagnosis.diagnose(
        _WORKDIR.value, _STEP.value, _TEXT.value, _WINDOWS.value, _DEEP.value, _TRUST.value, log
    )
    print(
        "\n".join(
            [
                *table_lines(content),
                "",
                f"{as_path('--workdir', _WORKDIR.value) / DIAGNOSIS_FOLDER}",
            ]
        )
    )


def table_lines(content: dict[str, Any]) -> list[str]:
    blocks, losses, paths = (
        content["trained"]["blocks"],
        content["trained"]["losses"],
        content["paths"],
    )
    depth = len(blocks) // paths
    rows = [COLUMNS]
    for number, block in enumerate(blocks):
        attention = block.get("attention", {})
        rows.append(
            (
                str(number) + (f" (path {number // depth})" if paths > 1 else ""),
                str(round(block["width"])),
                *(
                    f"{block['output'][name]:.3f}"
                    for name in ("residual", "token_similarity", "neighbour_similarity")
                ),
                *(
                    f"{np.mean(attention[name]):.3f}" if attention else "–"
                    for name in ("entropy", "first_weight")
                ),
                f"{losses['after_blocks'][1 + number % depth]['loss']:.4f}",
                f"{losses['without_block'][number]['loss']:.4f}",
            )
        )
    found = [
        *aligned_rows(rows),
        "",
        f"loss {losses['loss']:.4f} ± {losses['error']:.4f} nats per token; in-context score "
        f"{losses['in_context_score']:+.3f} ± {losses['in_context_score_error']:.3f}",
    ]
    for path, entry in enumerate(losses.get("without_path", [])):
        found.append(f"without path {path}: {entry['loss']:.4f}")
    repeats = losses["repeats"]
    if repeats["fraction"]:
        found.append(
            f"repeats ({repeats['fraction']:.0%} of the targets): {repeats['loss']:.4f}; "
            f"others: {repeats['others']:.4f}"
        )
    fixed = min(entry["loss"] for entry in losses["without_block"])
    return [
        *found,
        f"without the least important block: {fixed:.4f}; with the best choice for each window: "
        f"{losses['without_best_block_per_window']:.4f}",
    ]


if __name__ == "__main__":
    cli.run(main)
