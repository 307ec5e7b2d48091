"""The numbers of a diagnosis that the record of a comparison contains."""

from collections.abc import Iterable
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
_MAYBE = (NULL, NUMBER)
_STREAM = ("token_similarity", "neighbour_similarity", "effective_rank")
_ATTENTION = ("entropy", "first_weight")
# The parts of diagnose.json that are read.
_DIAGNOSIS = {
    "format": one_of(FORMAT),
    "split": one_of(VALIDATION),
    "step": integer(0),
    "paths": integer(1),
    "trained": {
        "blocks": [
            {
                "output": dict.fromkeys(_STREAM, _MAYBE),
                "attention": Optional({measure: [_MAYBE] for measure in _ATTENTION}),
            }
        ],
        "losses": {
            "loss": _MAYBE,
            "in_context_score": _MAYBE,
            "without_block": [{"difference": _MAYBE}],
            "repeats": Optional({"loss": _MAYBE, "others": _MAYBE}),
        },
    },
}


def read_summary(workdir: Path, step: int) -> dict[str, Any] | None:
    """Returns the summary of a checkpoint's diagnosis on the validation split, or None."""
    content = read_json_or_none(workdir / DIAGNOSIS_FOLDER / JSON_FILE, _DIAGNOSIS)
    # the run may have been trained further since
    return _summarize(content) if content and content["step"] == step else None


def _summarize(content: dict[str, Any]) -> dict[str, Any]:
    """Returns losses, means over paths and heads by depth, and what leaving out one block costs."""
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
        # with paths, a depth has a block of each: path 0 has blocks 0 … depth − 1, path 1 the next
        "blocks": [_measures_of(blocks[number::depth]) for number in range(depth)],
    }


def _measures_of(blocks: list[dict]) -> dict[str, float | None]:
    """Returns the means over blocks, those of all paths at one depth."""
    means = {}
    for measure in _STREAM:
        means[measure] = _mean(block["output"][measure] for block in blocks)
    # recurrent blocks have no attention, and each head of the others has a value
    attentions = [block["attention"] for block in blocks if "attention" in block]
    for measure in _ATTENTION:
        means[measure] = _mean(value for heads in attentions for value in heads[measure])
    return means


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None
