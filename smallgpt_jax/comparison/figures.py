"""The plots of a comparison's report."""

import csv
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from smallgpt_jax.comparison import aggregation
from smallgpt_jax.comparison.learning_rates import Grid
from smallgpt_jax.comparison.results import Run
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.plotting import COLORS, style_axes

STYLES = ("-", (0, (4, 3)))  # every second line is dashed, so that overlapping lines stay visible
MARKERS = "os^Dv"
SIZE = (5.2, 3.7)  # inches
AXES = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds of training"}
PAPER_TOKENS_PER_STEP = 524_288  # in the runs of the paper's authors (arXiv 2404.14462, released code)


def loss_against(axis: str, runs: Sequence[Run], logged: dict[str, list] | None = None) -> Figure:
    """Plots mean losses over seeds with bands of their range, and curves as returned by `read_logged`."""
    figure, plot = new_plot(AXES[axis], "validation loss, nats per token")
    for style, (name, group) in zip(line_styles(), aggregation.group_by_name(runs).items()):
        curve = aggregation.mean_curve(group, axis)
        if not curve:
            continue
        x, losses = zip(*curve)
        finished = all(run.is_finished for run in group)
        plot.plot(x, [loss.mean for loss in losses], label=name + ("" if finished else " (unfinished)"), **style)
        plot.fill_between(x, [loss.low for loss in losses], [loss.high for loss in losses],
                          color=style["color"], alpha=0.2, linewidth=0)
    names = dict.fromkeys([*(run.name for run in runs), *(logged or {})])
    colors = {name: style["color"] for style, name in zip(line_styles(), names)}
    for name, curve in (logged or {}).items():
        plot.plot(*zip(*curve), label=f"{name}, as logged by the paper's authors", color=colors[name],
                  linestyle=":", linewidth=1)
    return finish_plot(figure, plot)


def loss_against_parameters(runs: Sequence[Run]) -> Figure:
    figure, plot = new_plot("parameters", "validation loss, nats per token")
    for style, (name, group) in zip(line_styles(), aggregation.group_by_name(runs).items()):
        finished = [run for run in group if run.is_finished and run.final("loss") is not None]
        if finished:
            plot.plot([run.parameters for run in finished], [run.final("loss") for run in finished], style["marker"],
                      color=style["color"], markerfacecolor="none", label=name)
    plot.margins(x=0.15)
    return finish_plot(figure, plot)


def loss_against_learning_rate(grids: dict[str, Grid], runs: Sequence[Run]) -> Figure:
    """Returns a plot of the last validation loss against the learning rate, with a line for each grid.

    The best rate has a filled marker. A dotted line shows the parabola of `Grid.minimum`. A rate at which the run has
    diverged has a cross near the top. `runs` are the runs at the best rates, with the seeds of the comparison. A
    vertical line shows the range of their losses.
    """
    figure, plot = new_plot("learning rate", "validation loss, nats per token")
    groups = aggregation.group_by_name(runs)
    for number, (style, (name, grid)) in enumerate(zip(line_styles(), grids.items())):
        color = style["color"]
        finite = {multiple * grid.learning_rate: loss for multiple, loss in grid.losses.items()
                  if loss is not None and loss < math.inf}
        plot.plot(finite.keys(), finite.values(), label=name, markerfacecolor="none", **style)
        diverged = [multiple * grid.learning_rate for multiple, loss in grid.losses.items() if loss == math.inf]
        height = 0.97 - 0.05 * (number % 10)  # crosses of different models must not cover each other
        plot.plot(diverged, [height] * len(diverged), "x", color=color, transform=plot.get_xaxis_transform())
        if not grid.has_diverged and grid.best is not None:
            best = grid.best * grid.learning_rate
            plot.plot(best, finite[best], style["marker"], color=color)
            if minimum := grid.minimum:
                x = np.linspace(-1, 1, 41) * math.log(2)
                plot.plot(minimum.multiple * grid.learning_rate * np.exp(x),
                          minimum.loss + minimum.curvature * x**2 / 2, color=color, linestyle=":", linewidth=1)
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
            lengths, bits = zip(*curve.items())
            plot.plot(lengths, [b.mean for b in bits], label=name, **style)
            plot.fill_between(lengths, [b.low for b in bits], [b.high for b in bits], color=style["color"], alpha=0.2,
                              linewidth=0)
            ticks |= curve.keys()
    plot.set_xscale("log", base=2)
    plot.set_xticks(sorted(ticks), map(str, sorted(ticks)))
    plot.minorticks_off()
    return finish_plot(figure, plot)


def expert_load(run: Run) -> Figure:
    """Returns an image of the load of each expert, relative to the mean load, with one row per block."""
    figure = Figure(figsize=SIZE, layout="constrained")
    plot = figure.subplots()
    stacks = [np.reshape(np.array(load, float), (-1, np.shape(load)[-1])) for load in run.expert_load.values()]
    image = plot.imshow(np.concatenate(stacks), vmin=0, vmax=2, cmap="RdBu_r", aspect="auto")
    plot.set(xlabel="expert", ylabel="block")
    for axis in (plot.xaxis, plot.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    figure.colorbar(image, label="load / mean load", extend="max")
    return figure


def read_logged(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the loss curves in a CSV file with the columns model,step,val_loss: {model: [(tokens, validation loss)]}.

    The paper's authors logged these curves, with PAPER_TOKENS_PER_STEP tokens per step. Raises UserError if the
    file cannot be read as such a table, or has no rows.
    """
    try:
        with path.open(newline="") as file:
            curves: dict[str, list] = {}
            for row in csv.DictReader(file):
                curves.setdefault(row["model"], []).append(
                    (int(row["step"]) * PAPER_TOKENS_PER_STEP, float(row["val_loss"])))
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"--logged={path}: not a CSV file with the columns model,step,val_loss ({error})") from None
    if not curves:
        raise UserError(f"--logged={path}: the table has no rows; expected the columns model,step,val_loss")
    return curves


def line_styles():
    for i in itertools.count():
        yield {"color": COLORS[i % len(COLORS)], "linestyle": STYLES[i % len(STYLES)],
               "marker": MARKERS[i % len(MARKERS)], "markersize": 4}


def new_plot(x: str, y: str):
    figure = Figure(figsize=SIZE, layout="constrained")
    plot = figure.subplots()
    style_axes(plot, x, y)
    return figure, plot


def finish_plot(figure: Figure, plot) -> Figure:
    handles = [line for line in plot.lines if not line.get_label().startswith("_child")]
    labels = [line.get_label() for line in handles]
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(4, 60 // max(map(len, labels)))),
                      fontsize=8, frameon=False)
    return figure
