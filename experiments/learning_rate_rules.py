"""Compares rules for the learning rate by size with the best rates of docs/results/.

    python experiments/learning_rate_rules.py

Prints a Markdown table: for each model and size, the best recorded rate, the rates of the rules, and
by how much the loss at a rule's rate exceeds the best one. Losses between two recorded rates are
interpolated linearly in the logarithm of the rate. All runs train on 20 tokens per parameter, in
batches of 2,048 tokens, which the published rules would not choose.
"""

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path

from smallgpt_jax import models
from smallgpt_jax.run import sizing

RECORDS = Path(__file__).parents[1] / "docs" / "results"
BATCH = 2048  # tokens
TOKENS_PER_PARAMETER = 20
Losses = dict[float, float]  # learning rate → loss


def olmo(parameters: float) -> float:
    """OLMo-core's model ladder (github.com/allenai/OLMo-core): half the rate of Porian et al.
    (arXiv 2406.19146), for parameters without embeddings.
    """
    return 0.0047 / 2 * (parameters / 108e6) ** (-1 / 3)


def step_law(parameters: float, tokens: float) -> float:
    """Li et al., arXiv 2503.04715, for parameters without embeddings and head."""
    return 1.79 * parameters**-0.713 * tokens**0.307


def ladders() -> dict[str, tuple[models.ModelConfig, Losses]]:
    """Returns {model@size: its config and its losses}."""
    ladders = {}
    for record in ("scaling", "mixers"):
        content = json.loads((RECORDS / f"{record}.json").read_text())
        runs = {run["name"]: run["config"] for run in content["runs"]}
        for name in SMALLEST[record]:
            rates = content["learning_rates"][name]["rates"]
            losses = {rate["learning_rate"]: rate["loss"] for rate in rates}
            ladders[name] = _model(runs[name]), losses
    runs = json.loads((RECORDS / "rates.json").read_text())["runs"]
    first_seed = min(run["seed"] for run in runs)  # which has all rates
    for run in runs:
        if run["seed"] != first_seed:
            continue
        name = run["name"].rpartition("-")[0]  # such as gpt@0.2M-0.5x
        _, losses = ladders.setdefault(name, (_model(run["config"]), {}))
        losses[run["config"]["optimizer.learning_rate"]] = run["curve"][-1]["loss"]
    return {name: ladder for name, ladder in ladders.items() if len(ladder[1]) > 1}


SMALLEST = {
    "scaling": [
        f"{name}@45k" for name in ("gpt", "gpt-learned", "llama", "pgpt", "moe", "lgpt", "cgpt")
    ],
    "mixers": [f"{name}@45k" for name in ("hybrid", "delta", "mamba", "conv")],
}


def _model(config: Mapping) -> models.ModelConfig:
    fields = {name[6:]: value for name, value in config.items() if name.startswith("model.")}
    return models.make_config(**fields)


def excess(losses: Losses, rate: float) -> str:
    """Returns the loss at a rate, minus the lowest one; beyond the recorded rates, that of the last
    with ">", or "–" where that is the best.
    """
    rates = sorted(losses)
    best = min(losses.values())
    if not rates[0] <= rate <= rates[-1]:
        last = rates[0] if rate < rates[0] else rates[-1]
        return f"> {losses[last] - best:.2f}" if losses[last] > best else "–"
    for low, high in itertools.pairwise(rates):
        if low <= rate <= high:
            x = math.log(rate / low) / math.log(high / low)
            return f"{(1 - x) * losses[low] + x * losses[high] - best:.2f}"
    return "0.00"


def table() -> list[str]:
    lines = [
        "| model | best rate | ours | excess | OLMo | excess | Step Law | excess |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (model, losses) in ladders().items():
        best = min(losses, key=losses.get)
        edge = " (edge)" if best in (min(losses), max(losses)) else ""
        cells = [name, f"{best:.2g}{edge}"]
        parameters = sizing.block_parameters(model)
        total = models.num_active_parameters(models.LanguageModel(model))
        for rate in (
            sizing.usual_rate(model, BATCH),
            olmo(parameters),
            step_law(parameters, TOKENS_PER_PARAMETER * total),
        ):
            cells += [f"{rate:.2g}", excess(losses, rate)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
