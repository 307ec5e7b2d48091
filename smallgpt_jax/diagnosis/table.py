"""The table that `diagnose` prints."""

from typing import Any

import numpy as np

from smallgpt_jax.formatting import aligned_rows

_COLUMNS = (
    *("block", "width", "residual", "similarity", "neighbours"),
    *("entropy", "position 0", "loss after", "loss without"),
)


def table_lines(content: dict[str, Any]) -> list[str]:
    blocks, losses = content["trained"]["blocks"], content["trained"]["losses"]
    rows = [_row(number, blocks, losses, content["paths"]) for number in range(len(blocks))]
    lines = [
        *aligned_rows([_COLUMNS, *rows]),
        "",
        f"loss {losses['loss']:.4f} ± {losses['error']:.4f} nats per token; in-context score "
        f"{losses['in_context_score']:+.3f} ± {losses['in_context_score_error']:.3f}",
    ]
    for path, without in enumerate(losses.get("without_path", [])):
        lines.append(f"without path {path}: {without['loss']:.4f}")
    repeats = losses["repeats"]
    if repeats["fraction"]:
        lines.append(
            f"repeats ({repeats['fraction']:.0%} of the targets): {repeats['loss']:.4f}; "
            f"others: {repeats['others']:.4f}"
        )
    # the gap tells whether the windows need different blocks
    fixed = min(without["loss"] for without in losses["without_block"])
    lines.append(
        f"without the least important block: {fixed:.4f}; with the best choice for each window: "
        f"{losses['without_best_block_per_window']:.4f}"
    )
    return lines


def _row(number: int, blocks: list[dict], losses: dict[str, Any], paths: int) -> list[str]:
    block = blocks[number]
    depth = len(blocks) // paths  # of each path
    output, attention = block["output"], block.get("attention")
    row = [
        f"{number} (path {number // depth})" if paths > 1 else str(number),
        str(round(block["width"])),
        f"{output['residual']:.3f}",
        f"{output['token_similarity']:.3f}",
        f"{output['neighbour_similarity']:.3f}",
    ]
    if attention:
        row += [f"{np.mean(attention['entropy']):.3f}", f"{np.mean(attention['first_weight']):.3f}"]
    else:
        row += ["–", "–"]
    loss_after = losses["after_blocks"][1 + number % depth]["loss"]  # the first: after no block
    return [*row, f"{loss_after:.4f}", f"{losses['without_block'][number]['loss']:.4f}"]
