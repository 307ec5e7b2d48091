"""Lists the operations of each recipe's GPU program that add in no fixed order, and what it costs to
fix the order. Needs no GPU, but the GPU compiler (extra `plan-gpu`).

    python benchmarks/gpu_bits.py --output=docs/results/gpu-bits.json

The costs are ratios of rooflines: estimates, not measurements.
"""

import json
from pathlib import Path

from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.planning.plan import plan
from smallgpt_jax.storage.atomic import write_atomically

RECIPES = ["gpt", "pgpt", "lgpt", "cgpt", "llama", "moe", "hybrid", "mamba"]
_RECIPES = flags.DEFINE_list("recipes", RECIPES, "Recipes, at the size quickstart in bfloat16.")
_TOPOLOGY = flags.DEFINE_string("topology", "h100:1", "A GPU, as for `plan`.")
_OUTPUT = flags.DEFINE_string("output", "", "File to write the result to, as JSON; '': none.")


def main() -> None:
    rows = {recipe: measure(recipe, _TOPOLOGY.value) for recipe in _RECIPES.value}
    print(
        "| recipe | operations without a fixed order | with deterministic | roofline with / without |"
    )
    print("|---|---|---|---|")
    for recipe, row in rows.items():
        operations = "; ".join(f"{times} × {name}" for name, times in row["unordered"].items())
        left = sum(row["unordered_deterministic"].values())
        print(f"| {recipe} | {operations} | {left} | {row['cost']:.2f} |")
    result = json.dumps({"topology": _TOPOLOGY.value, "recipes": rows})
    if _OUTPUT.value:
        write_atomically(Path(_OUTPUT.value), result + "\n")
    print(result)


def measure(recipe: str, topology: str) -> dict:
    usual, fixed = (
        plan(
            f"{recipe}:quickstart",
            topology,
            {"model.dtype": "bfloat16", "train.deterministic": deterministic},
        ).estimate
        for deterministic in (False, True)
    )
    return {
        "unordered": usual.unordered_operations,
        "unordered_deterministic": fixed.unordered_operations,
        "cost": round(fixed.estimated_step_seconds / usual.estimated_step_seconds, 3),
    }


if __name__ == "__main__":
    cli.run(main)
