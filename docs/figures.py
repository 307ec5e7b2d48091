"""Draws the figures of docs/results.md from the records in docs/results/.

python docs/figures.py
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from smallgpt_jax.analysis import record
from smallgpt_jax.analysis.candidates import evidence_of
from smallgpt_jax.analysis.choice import Chooser
from smallgpt_jax.analysis.record import Record, Run
from smallgpt_jax.comparison import merging

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
SIZE = "0.2M"
PAPER = ("gpt", "pgpt", "lgpt", "cgpt", "gpt-learned")  # the models of the paper are blue
# The models of the second figure.
REFERENCE, OTHERS = "llama", ("gpt", "moe", "conv", "hybrid", "canon", "windows")
# FLOPs. With less, the mixers were trained at too few sizes.
BUDGETS = np.geomspace(2e12, 2.2e14, 40)


def best_runs(runs: tuple[Run, ...]) -> dict[str, list[Run]]:
    """Returns {model: its runs at the learning rate with the lowest mean loss}, best model first."""
    by_rate = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.size.startswith(SIZE):
            by_rate[run.model][run.size].append(run)
    best = {model: min(rates.values(), key=_mean_loss) for model, rates in by_rate.items()}
    return dict(sorted(best.items(), key=lambda item: _mean_loss(item[1])))


def draw_models(best: dict[str, list[Run]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.35 * len(best) + 0.8), layout="constrained")
    for row, (model, runs) in enumerate(best.items()):
        color = "tab:blue" if model in PAPER else "tab:gray"
        mean = _mean_loss(runs)
        axes.plot(mean, row, "|", color=color, markersize=14, markeredgewidth=3)
        axes.plot([run.loss for run in runs], [row] * len(runs), "o", color=color, markersize=4)
        axes.annotate(f"{mean:.2f}", (mean, row), (14, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(best)), best)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("validation loss, nats per token (left is better); blue: the paper's models")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _mean_loss(runs: list[Run]) -> float:
    return statistics.fmean(run.loss for run in runs)


def records_of_first_table() -> Record:
    """Returns the merged records from which the first table of the page is made."""
    names = re.search(r'"record": "([^"]+)"', (DOCS / "results.md").read_text())[1]
    paths = [RESULTS / f"{name}.json" for name in names.split("+")]
    return merging.merge([(path, record.read(path)) for path in paths], "")


def losses_at(budgets: Sequence[float], merged: Record) -> dict[str, np.ndarray]:
    """Returns {model: its lowest loss with each budget}; NaN where it was not trained with about so
    much.
    """
    chooser = Chooser(evidence_of(merged), "flops", 1)
    losses = defaultdict(lambda: np.full(len(budgets), np.nan))
    for i, budget in enumerate(budgets):
        for standing in chooser.contest(budget).standings:
            if standing.known in ("trained", "interpolated"):
                losses[standing.model][i] = standing.loss
    return losses


def draw_budgets(losses: dict[str, np.ndarray], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.4), layout="constrained")
    axes.axhline(0, color="black", label=REFERENCE)
    for model in OTHERS:
        axes.semilogx(BUDGETS, losses[model] - losses[REFERENCE], linewidth=2, label=model)
    figure.legend(loc="outside right upper", frameon=False)
    axes.grid(alpha=0.3)
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel(f"loss minus {REFERENCE}'s, nats\n(below 0 is better)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    matplotlib.use("Agg")
    draw_models(best_runs(record.read(RESULTS / "rates.json").runs), DOCS / "results-models.png")
    draw_budgets(losses_at(BUDGETS, records_of_first_table()), DOCS / "results-budgets.png")


if __name__ == "__main__":
    main()
