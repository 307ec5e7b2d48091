"""Plots of losses at equal compute, of scaling laws and of their predictions."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from smallgpt_jax.comparison import equal_budgets, figures, scaling
from smallgpt_jax.comparison.equal_budgets import Curve
from smallgpt_jax.comparison.names import grouped
from smallgpt_jax.comparison.scaling import Fit, Outcome, Prediction

FRONTIER_POINTS = 40  # of a line


def loss_against_compute(fits: Mapping[str, Fit], predictions: Sequence[Prediction]) -> Figure:
    """Plots each model's trained losses, the frontier of its law, and the held-out losses beside
    their predictions.
    """
    figure, plot = figures.new_plot("training FLOPs", "validation loss, nats per token")
    held_out = {(row.name, row.size, row.tokens): row for row in predictions}
    for number, (style, (name, fitted)) in enumerate(zip(figures.line_styles(), fits.items())):
        shift = 1.02 ** (number - len(fits) // 2)  # held-out runs have about equal FLOPs
        means = mean_losses(fitted)
        trained = [
            (flops, loss)
            for point, (flops, loss) in means.items()
            if (name, *point) not in held_out
        ]
        plot.plot(
            *zip(*trained),
            style["marker"],
            color=style["color"],
            markersize=4,
            markerfacecolor="none",
            alpha=0.7,
        )
        costs = fitted.values("flops")
        frontier = scaling.frontier(fitted, np.geomspace(costs.min(), costs.max(), FRONTIER_POINTS))
        plot.plot(frontier.budgets, frontier.losses, label=name, markevery=[-1], **style)
        for point, (flops, loss) in means.items():
            if row := held_out.get((name, *point)):
                plot.vlines(
                    flops * shift, row.low, row.high, color=style["color"], linewidth=4, alpha=0.4
                )
                plot.plot(
                    flops * shift,
                    loss,
                    style["marker"],
                    color=style["color"],
                    markersize=5,
                    markeredgecolor="black",
                )
    log_axis(plot)
    plot.set_yscale("log")
    plot.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)))
    plot.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    plot.yaxis.set_minor_formatter(NullFormatter())
    return figures.finish_plot(figure, plot)


def mean_losses(fitted: Fit) -> dict[tuple[float, float], tuple[float, float]]:
    """Returns {(parameters, tokens): (FLOPs, loss)}, means over the seeds."""
    groups = grouped(fitted.records, lambda record: (record.parameters, record.tokens))
    return {
        point: tuple(map(float, np.mean([(row.flops, row.loss) for row in rows], 0)))
        for point, rows in groups.items()
    }


def log_axis(plot) -> None:
    plot.set_xscale("log")
    plot.xaxis.set_major_locator(LogLocator())
    plot.xaxis.set_major_formatter(lambda value, _: f"1e{round(math.log10(value))}")
    plot.xaxis.set_minor_formatter(NullFormatter())


def difference_from(curves: Mapping[str, Curve], reference: str) -> Figure:
    """Plots the loss of each model minus that of the reference at equal budgets, with the interval
    of its mean.
    """
    figure, plot = figures.new_plot("training FLOPs", f"loss minus that of {reference}, nats")
    base, means = curves[reference], []
    plot.axhline(0, color="0.4", linewidth=1, label="_child")
    plot.text(base.budgets[0], 0, f" {reference}", ha="left", va="bottom", fontsize=8, color="0.4")
    for style, (name, curve) in zip(figures.line_styles(), curves.items()):
        budgets = equal_budgets.common_budgets(curve, base)
        rows = {
            budget: row
            for budget, values in zip(budgets, equal_budgets.differences(curve, base, budgets).T)
            if (row := equal_budgets.estimate(values))
        }
        if name == reference or not rows:  # no common budget or seed
            continue
        figures.plot_band(
            plot, rows.keys(), rows.values(), name, style | {"marker": ""}, alpha=0.12
        )
        means += [row.mean for row in rows.values()]
    log_axis(plot)
    last, margin = (
        max(curve.budgets[-1] for curve in curves.values()),
        0.3 * max(np.ptp(means), 0.1) if means else 0.0,
    )
    plot.set_xlim(right=10 * last)
    plot.axvspan(last, 10 * last, color="0.93", zorder=0)
    plot.text(
        3 * last,
        plot.get_ylim()[0],
        "not trained",
        ha="center",
        va="bottom",
        fontsize=8,
        color="0.4",
    )
    if means:  # wide intervals of few seeds are cut off
        plot.set_ylim(min(means) - margin, max(means) + margin)
    return figures.finish_plot(figure, plot)


def held_out(predictions: Sequence[Prediction], outcomes: Sequence[Outcome]) -> Figure:
    """Returns a row per model, in the predicted order: interval and loss for the most tokens, and
    the trained loss.
    """
    figure, plot = figures.new_plot("validation loss, nats per token", "")
    longest = {row.name: row for row in sorted(predictions, key=lambda row: row.tokens)}
    trained = {outcome.prediction: outcome.loss for outcome in outcomes}
    rows = sorted(longest.values(), key=lambda row: -row.loss)
    for height, row in enumerate(rows):
        plot.hlines(height, row.low, row.high, color="#56B4E9", linewidth=9)
        plot.vlines(row.loss, height - 0.3, height + 0.3, color="black", linewidth=1.5)
        if row in trained:
            plot.plot(
                trained[row], height, "o", color="#D55E00", markeredgecolor="black", markersize=8
            )
    plot.set_yticks(range(len(rows)), [row.name for row in rows])
    plot.set_ylim(-0.7, len(rows) - 0.3)
    plot.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    return figure
