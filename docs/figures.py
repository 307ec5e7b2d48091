"""Draws the first figure of docs/results.md from docs/results/rates.json.

python docs/figures.py
"""

import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib

from smallgpt_jax.analysis import record
from smallgpt_jax.analysis.record import Run

DOCS = Path(__file__).parent
SIZE = "0.2M"
PAPER = ("gpt", "pgpt", "lgpt", "cgpt", "gpt-learned")  # the models of the paper are blue


def best_runs(runs: tuple[Run, ...]) -> dict[str, list[Run]]:
    """Returns {model: its runs at the learning rate with the lowest mean loss}, best model first."""
    by_rate = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.size.startswith(SIZE):
            by_rate[run.model][run.size].append(run)
    best = {model: min(rates.values(), key=_mean_loss) for model, rates in by_rate.items()}
    return dict(sorted(best.items(), key=lambda item: _mean_loss(item[1])))


def draw(best: dict[str, list[Run]], path: Path) -> None:
    matplotlib.use("Agg")
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


if __name__ == "__main__":
    runs = record.read(DOCS / "results" / "rates.json").runs
    draw(best_runs(runs), DOCS / "results-models.png")
