"""The plots of a report. Each function draws one, from what results.py makes of the runs."""

import csv
import io
import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter

from smallgpt_jax.comparison import results
from smallgpt_jax.comparison.results import Run
from smallgpt_jax.errors import UserError

# Okabe and Ito's colours, told apart by most who see colours differently. Dashes, so that of lines that lie on each
# other both are seen.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", (0, (4, 3)))
MARKERS = "os^Dv"
SIZE = (5.2, 3.7)  # inches
AXES = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds of training"}
PAPER_TOKENS_PER_STEP = 524_288  # of the authors' runs (arXiv 2404.14462, the released code)


def loss_against(axis: str, runs: Sequence[Run], logged: dict[str, list] | None = None) -> Figure:
    """The validation loss against tokens, FLOPs or seconds: means over seeds, and bands from the lowest to
    the highest. `logged`: curves {name: [(tokens, loss)]} drawn along."""
    figure, plot = begin(AXES[axis], "validation loss, nats a token")
    for look, (name, group) in zip(looks(), results.by_name(runs).items()):
        curve = results.mean_curve(group, axis)
        if not curve:
            continue
        x, losses = zip(*curve)
        ended = all(run.is_finished for run in group)
        plot.plot(x, [loss.mean for loss in losses], label=name + ("" if ended else " (unfinished)"), **look)
        plot.fill_between(x, [loss.low for loss in losses], [loss.high for loss in losses],
                          color=look["color"], alpha=0.2, linewidth=0)
    names = dict.fromkeys([*(run.name for run in runs), *(logged or {})])
    colours = {name: look["color"] for look, name in zip(looks(), names)}
    for name, curve in (logged or {}).items():
        plot.plot(*zip(*curve), label=f"{name}, as logged by the paper's authors", color=colours[name],
                  linestyle=":", linewidth=1)
    return finish(figure, plot)


def loss_against_parameters(runs: Sequence[Run]) -> Figure:
    """The last validation loss against the number of parameters, a dot for each run."""
    figure, plot = begin("parameters", "validation loss, nats a token")
    for look, (name, group) in zip(looks(), results.by_name(runs).items()):
        ended = [run for run in group if run.is_finished and run.last.loss is not None]
        if ended:
            plot.plot([run.parameters for run in ended], [run.last.loss for run in ended], look["marker"],
                      color=look["color"], markerfacecolor="none", label=name)
    plot.margins(x=0.15)
    return finish(figure, plot)


def loss_against_context(text: str, label: str, runs: Sequence[Run]) -> Figure:
    """Bits per byte on a text against the context it is read in."""
    figure, plot = begin("context, tokens", f"bits per byte, {label}")
    ticks = set()
    for look, (name, group) in zip(looks(), results.by_name(runs).items()):
        curve = results.contexts(group, text)
        if curve:
            lengths, bits = zip(*curve.items())
            plot.plot(lengths, [b.mean for b in bits], label=name, **look)
            plot.fill_between(lengths, [b.low for b in bits], [b.high for b in bits], color=look["color"], alpha=0.2,
                              linewidth=0)
            ticks |= curve.keys()
    plot.set_xscale("log", base=2)
    plot.set_xticks(sorted(ticks), map(str, sorted(ticks)))
    plot.minorticks_off()
    return finish(figure, plot)


def read_logged(path: Path) -> dict[str, list[tuple[int, float]]]:
    """{model: [(tokens, validation loss)]} of a file `model,step,val_loss` of the paper's authors."""
    try:
        with path.open(newline="") as file:
            curves: dict[str, list] = {}
            for row in csv.DictReader(file):
                curves.setdefault(row["model"], []).append(
                    (int(row["step"]) * PAPER_TOKENS_PER_STEP, float(row["val_loss"])))
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"--logged={path}: not a table of model,step,val_loss ({error})") from None
    if not curves:
        raise UserError(f"--logged={path}: a table without rows; model,step,val_loss are wanted")
    return curves


def looks():
    """How to draw the first run, the second, …"""
    for i in itertools.count():
        yield {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)],
               "marker": MARKERS[i % len(MARKERS)], "markersize": 4}


def begin(x: str, y: str):
    figure = Figure(figsize=SIZE, layout="constrained")
    plot = figure.subplots()
    plot.set(xlabel=x, ylabel=y)
    plot.xaxis.set_major_formatter(EngFormatter(sep=""))
    plot.grid(alpha=0.3)
    plot.spines[["top", "right"]].set_visible(False)
    return figure, plot


def finish(figure: Figure, plot) -> Figure:
    handles = [line for line in plot.lines if not line.get_label().startswith("_child")]
    labels = [line.get_label() for line in handles]
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(4, 60 // max(map(len, labels)))),
                      fontsize=8, frameon=False)
    return figure


def png(figure: Figure) -> bytes:
    return saved(figure, format="png", dpi=160, metadata={"Software": None})


def svg(figure: Figure) -> bytes:
    return saved(figure, format="svg", metadata={"Date": None})


def saved(figure: Figure, **options) -> bytes:
    """The same bytes each time; `$` in names is a dollar."""
    file = io.BytesIO()
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    with matplotlib.rc_context({"svg.hashsalt": "smallgpt_jax"}):
        figure.savefig(file, **options)
    return file.getvalue()
