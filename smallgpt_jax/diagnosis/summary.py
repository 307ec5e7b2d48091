"""The numbers of a diagnosis that the record of a comparison contains."""

from pathlib import Path
from typing import Any

import numpy as np

from smallgpt_jax.run.names import DIAGNOSIS_FOLDER
from smallgpt_jax.storage.json_files import (
    NULL,
    NUMBER,
    Optional,
    integer,
    one_of,
    read_json_or_none,
)

FORMAT = 1
JSON_FILE = "diagnose.json"
VALIDATION = "validation"
MAYBE = (NULL, NUMBER)
STREAM, ATTENTION = (
    ("token_similarity", "neighbour_similarity", "effective_rank"),
    ("entropy", "first_weight"),
)
# The parts of diagnose.json that are read.
DIAGNOSIS = {
    "format": one_of(FORMAT),
    "split": one_of(VALIDATION),
    "step": integer(0),
    "paths": integer(1),
    "trained": {
        "blocks": [
            {
                "output": dict.fromkeys(STREAM, MAYBE),
                "attention": Optional({measure: [MAYBE] for measure in ATTENTION}),
            }
        ],
        "losses": {
            "loss": MAYBE,
            "in_context_score": MAYBE,
            "without_block": [{"difference": MAYBE}],
            "repeats": Optional({"loss": MAYBE, "others": MAYBE}),
        },
    },
}
SUMMARY = {
    "step": integer(0),
    "loss": MAYBE,
    "in_context_score": MAYBE,
    "least_important_block": MAYBE,
    "most_important_block": MAYBE,
    "loss_of_repeats": Optional(MAYBE),
    "loss_of_others": Optional(MAYBE),
    "blocks": [dict.fromkeys((*STREAM, *ATTENTION), MAYBE)],
}


def read_summary(workdir: Path, step: int) -> dict[str, Any] | None:
    """Returns the summary of a checkpoint's diagnosis on the validation split; None if there is
    none.
    """
    content = read_json_or_none(workdir / DIAGNOSIS_FOLDER / JSON_FILE, DIAGNOSIS)
    return summarize(content) if content and content["step"] == step else None


def summarize(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a SUMMARY: losses, means over paths and heads by depth, and what leaving out one
    block costs.
    """
    blocks, losses = content["trained"]["blocks"], content["trained"]["losses"]
    depth = len(blocks) // content["paths"]
    increases = [
        entry["difference"] for entry in losses["without_block"] if entry["difference"] is not None
    ]
    repeats = losses.get("repeats", {})
    return {
        "step": content["step"],
        "loss": losses["loss"],
        "in_context_score": losses["in_context_score"],
        "loss_of_repeats": repeats.get("loss"),
        "loss_of_others": repeats.get("others"),
        "least_important_block": min(increases, default=None),
        "most_important_block": max(increases, default=None),
        "blocks": [measures_of(blocks[number::depth]) for number in range(depth)],
    }


def measures_of(blocks: list[dict]) -> dict[str, float | None]:
    """`blocks` are those of all paths at one depth."""
    return {
        **{measure: mean(block["output"][measure] for block in blocks) for measure in STREAM},
        **{
            measure: mean(
                value for block in blocks for value in block.get("attention", {}).get(measure, ())
            )
            for measure in ATTENTION
        },
    }


def mean(values) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if found else None
