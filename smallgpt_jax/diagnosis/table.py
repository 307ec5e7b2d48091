"""The table that `diagnose` prints."""

from typing import Any

import numpy as np

from smallgpt_jax.formatting import aligned_rows

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
