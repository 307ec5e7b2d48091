"""The plots of the scaling section of a report."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from smallgpt_jax.comparison import figures, prediction, scaling
from smallgpt_jax.comparison.scaling import Fit, Outcome, Prediction
from smallgpt_jax.run.plotting import style_axes

POINTS = 40  # of a line
LIMITS = [(1 - scaling.INTERVAL) / 2, (1 + scaling.INTERVAL) / 2]


def loss_against_compute(fits: Mapping[str, Fit], predictions: Mapping[str, Any] | None) -> Figure:
    """Plots each model's trained losses, the frontier of its law, and the held-out losses beside their predictions."""
    figure, plot = figures.new_plot("training FLOPs", "validation loss, nats per token")
    held_out = _held_out_points(predictions)
    for style, (name, fitted) in zip(figures.line_styles(), fits.items()):
        means = mean_losses(fitted)
        trained = [(flops, loss) for point, (flops, loss) in means.items() if (name, *point) not in held_out]
        plot.plot(*zip(*trained), style["marker"], color=style["color"], markersize=4, markerfacecolor="none",
                  alpha=0.7, label="_runs")
        costs = fitted.values("flops")
        frontier = scaling.frontier(fitted, np.geomspace(costs.min(), costs.max(), POINTS))
        plot.plot(frontier.budgets, frontier.losses, label=name, markevery=[-1], **style)
        for point, (flops, loss) in means.items():
            if row := held_out.get((name, *point)):
                plot.vlines(flops, row.low, row.high, color=style["color"], linewidth=8, alpha=0.4)
                plot.plot(flops, loss, style["marker"], color=style["color"], markersize=5, markeredgecolor="black",
                          label="_held-out")
    log_axis(plot)
    plot.set_yscale("log")
    plot.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)))
    plot.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    plot.yaxis.set_minor_formatter(NullFormatter())
    return _with_legend(figure, plot)


def _held_out_points(predictions: Mapping[str, Any] | None) -> dict[tuple, Prediction]:
    rows = prediction.predictions_of(predictions) if predictions else []
    return {(row.name, row.size, row.tokens): row for row in rows}


def mean_losses(fitted: Fit) -> dict[tuple[float, float], tuple[float, float]]:
    """Returns {(parameters, tokens): (FLOPs, loss)}, means over the seeds."""
    groups: dict[tuple, list] = {}
    for record in fitted.records:
        groups.setdefault((record.parameters, record.tokens), []).append((record.flops, record.loss))
    return {point: tuple(map(float, np.mean(values, 0))) for point, values in groups.items()}


def log_axis(plot) -> None:
    plot.set_xscale("log")
    plot.xaxis.set_major_locator(LogLocator())
    plot.xaxis.set_major_formatter(lambda value, _: f"1e{round(math.log10(value))}")
    plot.xaxis.set_minor_formatter(NullFormatter())


def _with_legend(figure: Figure, plot) -> Figure:
    handles = [line for line in plot.lines if not line.get_label().startswith("_")]
    figure.legend(handles, [line.get_label() for line in handles], loc="outside lower center", ncols=4, fontsize=8,
                  frameon=False)
    return figure


def difference_from(fits: Mapping[str, Fit], reference: str) -> Figure:
    """Returns one panel per model: the loss minus that of the reference at equal budgets, with its interval."""
    others = [(style, name) for style, name in zip(figures.line_styles(), fits) if name != reference]
    columns = min(3, len(others))
    figure = Figure(figsize=figures.SIZE, layout="constrained")
    panels = figure.subplots(-(-len(others) // columns), columns, sharex=True, sharey=True, squeeze=False).flat
    for panel, (style, name) in zip(panels, others):
        style_axes(panel, "", "")
        low, high = scaling.trained_range([fits[name], fits[reference]])
        if low < high:
            budgets = np.geomspace(low, high, POINTS)
            own, base = (scaling.frontier(fits[one], budgets) for one in (name, reference))
            panel.fill_between(budgets, *np.quantile(own.draws - base.draws, LIMITS, axis=0), color=style["color"],
                               alpha=0.25, linewidth=0)
            panel.plot(budgets, own.losses - base.losses, color=style["color"], linewidth=1.8)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_title(name, fontsize=9)
        panel.tick_params(labelsize=7)
        log_axis(panel)
    for panel in list(panels):  # the grid has more panels than models
        panel.set_axis_off()
    figure.supxlabel("training FLOPs", fontsize=9)
    figure.supylabel(f"loss minus that of {reference}, nats", fontsize=9)
    return figure


def held_out(predictions: Sequence[Prediction], outcomes: Sequence[Outcome]) -> Figure:
    """Returns a row per model, in the predicted order: interval and loss for the most tokens, and the trained loss."""
    figure, plot = figures.new_plot("validation loss, nats per token", "")
    longest = {row.name: row for row in sorted(predictions, key=lambda row: row.tokens)}
    trained = {outcome.prediction: outcome.loss for outcome in outcomes}
    rows = sorted(longest.values(), key=lambda row: -row.loss)
    for height, row in enumerate(rows):
        plot.hlines(height, row.low, row.high, color="#56B4E9", linewidth=9)
        plot.vlines(row.loss, height - 0.3, height + 0.3, color="black", linewidth=1.5)
        if row in trained:
            plot.plot(trained[row], height, "o", color="#D55E00", markeredgecolor="black", markersize=8)
    plot.set_yticks(range(len(rows)), [row.name for row in rows])
    plot.set_ylim(-0.7, len(rows) - 0.3)
    plot.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    return figure
