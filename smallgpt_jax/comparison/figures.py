"""The plots of a comparison's report."""

import csv
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from smallgpt_jax.comparison import aggregation
from smallgpt_jax.comparison.aggregation import Spread
from smallgpt_jax.comparison.candidates import Candidate, by_model, pareto_front
from smallgpt_jax.comparison.equal_budgets import Estimate
from smallgpt_jax.comparison.learning_rates import Grid
from smallgpt_jax.comparison.names import size_of
from smallgpt_jax.comparison.results import Run
from smallgpt_jax.diagnosis import summary
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.plotting import COLORS, style_axes

STYLES = ("-", (0, (4, 3)))  # every second line is dashed, so that overlapping lines stay visible
MARKERS = "os^Dv"
SIZE, INSIDE_SIZE = (5.2, 3.7), (8.4, 6.0)  # inches
BY_DEPTH = {
    "token_similarity": "mean cosine of all tokens",
    "effective_rank": "effective rank of the activations",
    "entropy": "attention entropy / ln(keys)",
    "first_weight": "attention on position 0",
}
AXES = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds of training"}
PAPER_TOKENS_PER_STEP = (
    524_288  # in the runs of the paper's authors (arXiv 2404.14462, released code)
)


def loss_against(axis: str, runs: Sequence[Run], logged: dict[str, list] | None = None) -> Figure:
    """Plots mean losses over seeds with bands of their range, and curves as returned by
    `read_logged`.
    """
    figure, plot = new_plot(AXES[axis], "validation loss, nats per token")
    for style, (name, group) in zip(line_styles(), aggregation.group_by_name(runs).items()):
        curve = aggregation.mean_curve(group, axis)
        if not curve:
            continue
        finished = all(run.is_finished for run in group)
        plot_band(plot, *zip(*curve), name + ("" if finished else " (unfinished)"), style)
    names = dict.fromkeys([*(run.name for run in runs), *(logged or {})])
    colors = {name: style["color"] for style, name in zip(line_styles(), names)}
    for name, curve in (logged or {}).items():
        plot.plot(
            *zip(*curve),
            label=f"{name}, as logged by the paper's authors",
            color=colors[name],
            linestyle=":",
            linewidth=1,
        )
    return finish_plot(figure, plot)


def loss_against_parameters(runs: Sequence[Run]) -> Figure:
    figure, plot = new_plot("parameters", "validation loss, nats per token")
    for style, (name, group) in zip(line_styles(), aggregation.group_by_name(runs).items()):
        finished = [run for run in group if run.is_finished and run.final("loss") is not None]
        if finished:
            plot.plot(
                [run.parameters for run in finished],
                [run.final("loss") for run in finished],
                style["marker"],
                color=style["color"],
                markerfacecolor="none",
                label=name,
            )
    plot.margins(x=0.15)
    return finish_plot(figure, plot)


def loss_against_learning_rate(grids: dict[str, Grid], runs: Sequence[Run]) -> Figure:
    """Returns a plot of the last validation loss against the learning rate, with a line for each
    grid.

    The best rate has a filled marker. A dotted line shows the parabola of `Grid.minimum`. A rate at
    which the run has diverged has a cross near the top. `runs` are the runs at the best rates, with
    the seeds of the comparison. A vertical line shows the range of their losses.
    """
    figure, plot = new_plot("learning rate", "validation loss, nats per token")
    groups = aggregation.group_by_name(runs)
    for number, (style, (name, grid)) in enumerate(zip(line_styles(), grids.items())):
        color = style["color"]
        finite = {
            multiple * grid.learning_rate: loss
            for multiple, loss in grid.losses.items()
            if loss is not None and loss < math.inf
        }
        plot.plot(finite.keys(), finite.values(), label=name, markerfacecolor="none", **style)
        diverged = [
            multiple * grid.learning_rate
            for multiple, loss in grid.losses.items()
            if loss == math.inf
        ]
        height = 0.97 - 0.05 * (
            number % 10
        )  # crosses of different models must not cover each other
        plot.plot(
            diverged,
            [height] * len(diverged),
            "x",
            color=color,
            transform=plot.get_xaxis_transform(),
        )
        if not grid.has_diverged and grid.best is not None:
            best = grid.best * grid.learning_rate
            plot.plot(best, finite[best], style["marker"], color=color)
            if minimum := grid.minimum:
                x = np.linspace(-1, 1, 41) * math.log(2)
                plot.plot(
                    minimum.multiple * grid.learning_rate * np.exp(x),
                    minimum.loss + minimum.curvature * x**2 / 2,
                    color=color,
                    linestyle=":",
                    linewidth=1,
                )
            if spread := aggregation.final_spread(groups.get(name, []), "loss"):
                plot.vlines(best, spread.low, spread.high, color=color, linewidth=3, alpha=0.4)
    plot.set_xscale("log")
    plot.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plot.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    plot.xaxis.set_minor_locator(NullLocator())
    return finish_plot(figure, plot)


def loss_against_context(text: str, label: str, runs: Sequence[Run]) -> Figure:
    figure, plot = new_plot("context length, tokens", f"bits per byte, {label}")
    ticks = set()
    for style, (name, group) in zip(line_styles(), aggregation.group_by_name(runs).items()):
        curve = aggregation.bits_by_context(group, text)
        if curve:
            plot_band(plot, curve.keys(), curve.values(), name, style)
            ticks |= curve.keys()
    plot.set_xscale("log", base=2)
    plot.set_xticks(sorted(ticks), map(str, sorted(ticks)))
    plot.minorticks_off()
    return finish_plot(figure, plot)


def expert_load(run: Run) -> Figure:
    """Returns an image of the load of each expert, relative to the mean load, with one row per
    block.
    """
    figure = Figure(figsize=SIZE, layout="constrained")
    plot = figure.subplots()
    stacks = [
        np.reshape(np.array(load, float), (-1, np.shape(load)[-1]))
        for load in run.expert_load.values()
    ]
    image = plot.imshow(np.concatenate(stacks), vmin=0, vmax=2, cmap="RdBu_r", aspect="auto")
    plot.set(xlabel="expert", ylabel="block")
    for axis in (plot.xaxis, plot.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    figure.colorbar(image, label="load / mean load", extend="max")
    return figure


def read_logged(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the loss curves in a CSV file with the columns model,step,val_loss: {model: [(tokens,
    validation loss)]}.

    The paper's authors logged these curves, with PAPER_TOKENS_PER_STEP tokens per step. Raises
    UserError if the file cannot be read as such a table, or has no rows.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            curves: dict[str, list] = {}
            for row in csv.DictReader(file):
                curves.setdefault(row["model"], []).append(
                    (int(row["step"]) * PAPER_TOKENS_PER_STEP, float(row["val_loss"]))
                )
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(
            f"--logged={path}: not a CSV file with the columns model,step,val_loss ({error})"
        ) from None
    if not curves:
        raise UserError(
            f"--logged={path}: the table has no rows; expected the columns model,step,val_loss"
        )
    return curves


def loss_against_cost(candidates: Sequence[Candidate], label: str) -> Figure:
    """Plots a marker per candidate and the Pareto front. Thin lines join the sizes of a model."""
    figure, plot = new_plot(label, "validation loss, nats per token")
    front = pareto_front(candidates)
    plot.step(
        [one.cost for one in front],
        [one.loss for one in front],
        where="post",
        color="gray",
        linewidth=1,
        zorder=1,
    )
    # by_model has the order of the runs, so that a model has the same color in all plots.
    for style, (model, sizes) in zip(line_styles(), by_model(candidates).items()):
        plot_sizes(plot, sorted(sizes, key=lambda one: one.cost), front, style, model)
    found = [candidate.cost for candidate in candidates]
    if max(found) > 4 * min(found):
        plot.set_xscale("log")
        plot.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plot.xaxis.set_minor_locator(NullLocator())
    plot.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    plot.margins(x=0.1)
    return finish_plot(figure, plot)


def plot_sizes(
    plot, sizes: Sequence[Candidate], front: Sequence[Candidate], style: dict, model: str
) -> None:
    color = style["color"]
    for one in sizes:
        losses = one.losses.values()
        plot.vlines(one.cost, min(losses), max(losses), color=color, linewidth=2, alpha=0.4)
    filled = [one for one in sizes if one in front]
    plot.plot(
        [one.cost for one in sizes],
        [one.loss for one in sizes],
        color=color,
        linewidth=0.7,
        alpha=0.6,
        marker=style["marker"],
        markersize=6,
        markerfacecolor="none",
        label=model,
    )
    plot.plot(
        [one.cost for one in filled],
        [one.loss for one in filled],
        style["marker"],
        color=color,
        markersize=6,
    )
    for one in filled:
        if size := size_of(one.name):
            plot.annotate(
                size,
                (one.cost, one.loss),
                xytext=(-4, -4),
                textcoords="offset points",
                fontsize=7,
                ha="right",
                va="top",
            )


def by_depth(groups: dict[str, list[dict]]) -> Figure:
    """Small multiples: one plot per measure, one line per model."""
    figure = Figure(figsize=INSIDE_SIZE, layout="constrained")
    plots = figure.subplots(2, 2).ravel()
    depth = max(len(found["blocks"]) for group in groups.values() for found in group)
    for style, (name, group) in zip(line_styles(), groups.items()):
        for plot, measure in zip(plots, BY_DEPTH):
            values = [
                summary.mean(block[measure] for block in blocks)
                for blocks in zip(*(found["blocks"] for found in group))
            ]
            points = [(number, value) for number, value in enumerate(values) if value is not None]
            if points:
                plot.plot(*zip(*points), label=name, **style)
    for plot, label in zip(plots, BY_DEPTH.values()):
        style_axes(plot, "after block", label)
        plot.set_xlim(-0.5, depth - 0.5)
        plot.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    plots[0].legend(fontsize=8, frameon=False)
    return figure


def line_styles():
    for i in itertools.count():
        yield {
            "color": COLORS[i % len(COLORS)],
            "linestyle": STYLES[i % len(STYLES)],
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 4,
        }


def new_plot(x: str, y: str):
    figure = Figure(figsize=SIZE, layout="constrained")
    plot = figure.subplots()
    style_axes(plot, x, y)
    return figure, plot


def plot_band(
    plot,
    x: Iterable[float],
    values: Iterable[Spread | Estimate],
    label: str,
    style: dict,
    alpha: float = 0.2,
) -> None:
    """Plots means, with a band from the low to the high values."""
    x, means, low, high = zip(
        *((place, one.mean, one.low, one.high) for place, one in zip(x, values))
    )
    plot.plot(x, means, label=label, **style)
    plot.fill_between(x, low, high, color=style["color"], alpha=alpha, linewidth=0)


def finish_plot(figure: Figure, plot) -> Figure:
    handles = [line for line in plot.lines if not line.get_label().startswith("_child")]
    labels = [line.get_label() for line in handles]
    if labels:
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=max(1, min(4, 60 // max(map(len, labels)))),
            fontsize=8,
            frameon=False,
        )
    return figure
