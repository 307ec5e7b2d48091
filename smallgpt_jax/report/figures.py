"""The figures of a report."""

import base64
import csv
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from smallgpt_jax.analysis.findings import Contest, Curve, EqualFlops, Findings, Rates
from smallgpt_jax.analysis.record import Run, grouped, model_of
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.plotting import COLORS, style_axes, svg

SIZE, WIDE = (5.2, 3.9), (8.4, 6.0)  # inches
LOSS = "validation loss, nats per token"
PAPER_TOKENS_PER_STEP = 524_288  # of the paper's authors (arXiv 2404.14462, released code)
BY_DEPTH = {
    "token_similarity": "mean cosine of all tokens",
    "effective_rank": "effective rank of the activations",
    "entropy": "attention entropy / ln(keys)",
    "first_weight": "attention on position 0",
}
AXES = {"tokens": "training tokens", "flops": "training FLOPs"}
_SEVERAL = 1.1  # ratio of the largest and the least budget from which they are drawn over FLOPs
_STYLES = ("-", (0, (4, 3)))  # every second line is dashed, so that overlapping lines stay visible
_MARKERS = "os^Dv"

Styles = Mapping[str, dict]  # {model: style of its lines}, the same in all figures
LoggedCurves = dict[str, list[tuple[int, float]]]  # {model: [(tokens, validation loss)]}


class Drawn(NamedTuple):
    figure: Figure
    caption: str

    @property
    def base64(self) -> str:
        return base64.b64encode(svg(self.figure)).decode()


# ------------------------------------------------------------------ answers
def equal_flops(results: Sequence[EqualFlops], styles: Styles) -> Figure:
    """Plots losses minus that of the reference, with the bands that hold over all budgets."""
    reference = results[0].other
    figure, plot = _new_plot("training FLOPs", f"loss minus that of {reference}, nats")
    plot.axhline(0, color="0.4", linewidth=1)
    differences = []
    for one in results:
        style = styles[one.model]
        plot.plot(one.budgets, one.differences, label=one.model, **style | {"marker": ""})
        plot.fill_between(
            one.budgets, one.low, one.high, color=style["color"], alpha=0.07, linewidth=0
        )
        differences += one.differences
    plot.set_xscale("log")
    plot.xaxis.set_major_locator(LogLocator())
    plot.xaxis.set_major_formatter(lambda value, _: f"1e{round(math.log10(value))}")
    plot.xaxis.set_minor_formatter(NullFormatter())
    # A difference to a diverged model is infinite.
    finite = [value for value in differences if math.isfinite(value)]
    if finite:  # the axis suits the differences: wide bands of few seeds are cut off
        margin = 0.2 * max(np.ptp(finite), 0.1)
        plot.set_ylim(min(*finite, 0) - margin, max(*finite, 0) + margin)
    style = {"ha": "right", "va": "bottom", "fontsize": 8, "color": "0.4"}
    below = f"below 0: better than {reference}"
    plot.annotate(below, (0.99, 0.01), xycoords="axes fraction", **style)
    return _with_legend(figure, plot)


def ranking(contest: Contest, runs: Sequence[Run]) -> Figure:
    """Plots each model's runs, expected loss and its interval, the best on top."""
    # A diverged loss has no place on the axis.
    finite = [one for one in contest.standings if math.isfinite(one.loss)]
    from_below = finite[::-1]
    figure = Figure(figsize=(5.2, 1.2 + 0.34 * len(finite)), layout="constrained")
    plot = figure.subplots()
    style_axes(plot, LOSS, "")
    ranked_runs = [run for run in runs if run.is_finished and run.horizon == 1]
    runs_of = grouped(ranked_runs, lambda run: run.name)
    for height, one in enumerate(from_below):
        if one.interval:
            plot.hlines(height, one.interval.low, one.interval.high, color=COLORS[5], linewidth=8)
        plot.vlines(one.loss, height - 0.3, height + 0.3, color="black", linewidth=1.5)
        for run in runs_of.get(one.name, []):
            plot.plot(run.loss, height, "o", color=COLORS[1], markersize=4, alpha=0.8)
    plot.set_yticks(range(len(finite)), [one.name for one in from_below])
    plot.set_ylim(-0.6, len(finite) - 0.4)
    plot.xaxis.set_major_locator(MaxNLocator(6))
    plot.xaxis.set_major_formatter("{x:.4g}")
    return figure


# ------------------------------------------------------------------ curves and rates
def loss_curves(axis: str, curves: Sequence[Curve], styles: Styles, logged: LoggedCurves) -> Figure:
    """Plots mean losses over seeds against `axis`, a key of AXES, with bands of their range."""
    figure, plot = _new_plot(AXES[axis], LOSS)
    for curve in curves:
        losses = {getattr(point, axis): point.loss for point in curve.points}  # {x: Spread}
        losses.pop(None, None)  # FLOPs that cannot be counted
        if not losses:
            continue
        style = styles[model_of(curve.name)]
        plot.plot(list(losses), [loss.mean for loss in losses.values()], label=curve.name, **style)
        low = [loss.low for loss in losses.values()]
        high = [loss.high for loss in losses.values()]
        plot.fill_between(list(losses), low, high, color=style["color"], alpha=0.2, linewidth=0)
    for model, points in logged.items():
        color = styles[model]["color"] if model in styles else "0.5"
        label = f"{model}, as logged by the paper's authors"
        plot.plot(*zip(*points), label=label, color=color, linestyle=":", linewidth=1)
    return _with_legend(figure, plot)


def learning_rates(all_rates: Sequence[Rates], styles: Styles) -> Figure:
    """Plots losses over learning rates. The marker of the best rate is filled."""
    figure, plot = _new_plot("learning rate", LOSS)
    for one in all_rates:
        style = styles[model_of(one.name)]
        losses = {}  # {learning rate: loss}
        for multiple, loss in one.grid.losses.items():
            if loss is not None and math.isfinite(loss):
                losses[multiple * one.grid.learning_rate] = loss
        rates = list(losses)
        plot.plot(rates, list(losses.values()), label=one.name, markerfacecolor="none", **style)
        if one.best:
            best = one.best * one.grid.learning_rate
            plot.plot(best, losses[best], style["marker"], color=style["color"], markersize=5)
    plot.set_xscale("log")
    # A range of less than a decade gets ticks at 1, 2 and 5, too.
    plot.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plot.xaxis.set_minor_locator(NullLocator())
    plot.xaxis.set_major_formatter("{x:g}")
    return _with_legend(figure, plot)


def inside_by_depth(runs: Sequence[Run], styles: Styles) -> Figure:
    """Small multiples: one plot per measure, one line per model."""
    figure = Figure(figsize=WIDE, layout="constrained")
    plots = figure.subplots(2, 2).ravel()
    groups = grouped((run for run in runs if run.inside), lambda run: run.name)
    for plot, (measure, label) in zip(plots, BY_DEPTH.items()):
        for name, group in groups.items():
            points = _means_by_block(group, measure)
            if points:
                plot.plot(*zip(*points), label=name, **styles[model_of(name)])
        style_axes(plot, "after block", label)
        plot.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    plots[0].legend(fontsize=8, frameon=False)
    return figure


def _means_by_block(runs: Sequence[Run], measure: str) -> list[tuple[int, float]]:
    """Returns (number of a block, mean over the runs) where all runs have the measure."""
    points = []
    for number, blocks in enumerate(zip(*(run.inside.blocks for run in runs))):
        values = [getattr(block, measure) for block in blocks]
        if None not in values:  # such as the entropy of a block without attention
            points.append((number, np.mean(values)))
    return points


# ------------------------------------------------------------------ losses of the paper
def read_logged(path: Path) -> LoggedCurves:
    """Returns {model: [(tokens, loss)]}; a step in the file is PAPER_TOKENS_PER_STEP tokens."""
    curves: LoggedCurves = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                tokens = int(row["step"]) * PAPER_TOKENS_PER_STEP
                curves.setdefault(row["model"], []).append((tokens, float(row["val_loss"])))
        if not curves:
            raise ValueError("no rows")
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(
            f"--logged={path}: not a CSV file with the columns model,step,val_loss ({error})"
        ) from None
    return curves


def draw(findings: Findings, runs: Sequence[Run], logged: LoggedCurves) -> dict[str, Drawn]:
    """Returns the figures by name, of what the findings contain, and of `logged` losses."""
    models = [*(run.model for run in runs), *(model_of(one.name) for one in findings.rates)]
    styles = dict(zip(dict.fromkeys(models), _line_styles()))
    figures = _draw_answer(findings, runs, styles)
    if findings.curves:
        for axis, label in AXES.items():
            caption = f"Validation loss against {label}. Bands: range over the seeds."
            further = logged if axis == "tokens" else {}
            figure = loss_curves(axis, findings.curves, styles, further)
            figures[f"loss-{axis}"] = Drawn(figure, caption)
    if any(len(one.grid.rates) > 1 for one in findings.rates):
        caption = "Loss against the learning rate. Filled: the best rate."
        figures["learning-rates"] = Drawn(learning_rates(findings.rates, styles), caption)
    if any(run.inside for run in runs):
        caption = "Measures after each block; means over seeds, paths and heads."
        figures["inside"] = Drawn(inside_by_depth(runs, styles), caption)
    return figures


def _draw_answer(findings: Findings, runs: Sequence[Run], styles: Styles) -> dict[str, Drawn]:
    """Returns the figure beside the answers: at equal FLOPs, or of models with one budget each."""
    results = []
    for one in findings.equal_flops:
        if one.budgets and max(one.budgets) > _SEVERAL * min(one.budgets):
            results.append(one)
    if results:
        caption = (
            f"Loss minus that of {findings.reference} at equal training FLOPs. Shaded: where the "
            "whole difference lies with 95% probability. Between the budgets of runs, losses are "
            "interpolated."
        )
        return {"answer": Drawn(equal_flops(results, styles), caption)}
    if findings.ranking and len(findings.ranking.standings) > 1:
        caption = (
            "Validation loss after the last step. Dots: seeds. Lines: mean. Bars: 80% interval of "
            "the mean."
        )
        return {"answer": Drawn(ranking(findings.ranking, runs), caption)}
    return {}


def _line_styles() -> Iterator[dict]:
    """Yields styles of lines without end."""
    # Of 7 colors, 2 line styles and 5 markers, the combination repeats only after 70 models.
    for i in itertools.count():
        yield {
            "color": COLORS[i % len(COLORS)],
            "linestyle": _STYLES[i % len(_STYLES)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "markersize": 4,
        }


def _new_plot(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    plot = figure.subplots()
    style_axes(plot, x, y)
    return figure, plot


def _with_legend(figure: Figure, plot: Axes) -> Figure:
    """Adds a legend below the plot, in as many columns as fit."""
    _, labels = plot.get_legend_handles_labels()
    if labels:
        columns = max(1, min(4, 60 // max(map(len, labels))))
        figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return figure
