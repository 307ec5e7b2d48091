"""Plots of a run's metrics."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smallgpt_jax.devices import distributed
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.run.metrics import sample_lines
from smallgpt_jax.run.names import CURVES_FILE, METRICS_FILE
from smallgpt_jax.storage.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110


def save_curves(workdir: Path, log: Callable[[str], None] = print) -> None:
    """Draws curves.png. An error is passed to `log`, not raised."""
    if not distributed.is_primary():
        return
    path = workdir / CURVES_FILE
    try:
        lines = sample_lines(workdir / METRICS_FILE)
        if lines:
            write_atomically(path, draw(lines))
    except Exception as error:  # a run must not fail because of its plots
        log(f"{path}: not drawn ({short_reason(error)})")


def draw(lines: Sequence[dict]) -> bytes:
    from smallgpt_jax.run import plotting

    return plotting.png(plot(lines), _DPI)


def plot(lines: Sequence[dict]) -> "Figure":
    """Returns a figure of the losses, the learning rate and the speed by step."""
    # Here, because these imports take half a second, and a run may end without a plot.
    from matplotlib.ticker import EngFormatter

    from smallgpt_jax.run import plotting

    figure = plotting.NotebookFigure(figsize=(9, 6))
    # Margins are fixed, because computing them with layout="constrained" doubles the time.
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.08, top=0.97, wspace=0.23, hspace=0.12)
    (loss, bits), (rate, speed) = figure.subplots(2, 2, sharex=True)
    blue, orange, green, *_ = plotting.COLORS
    faint = {"color": blue, "alpha": 0.3, "linewidth": 0.8}
    validation = {"color": orange, "marker": "o", "markersize": 3}
    loss.plot(*curve(lines, "train", "loss"), **faint, label="training (one batch)")
    loss.plot(
        *curve(lines, "train", "loss_mean"),
        color=blue,
        label="training (mean since the last point)",
    )
    loss.plot(*curve(lines, "eval", "loss"), **validation, label="validation")
    loss.legend(fontsize=8, frameon=False)
    bits.plot(*curve(lines, "eval", "bits_per_byte"), **validation)
    rate.plot(*curve(lines, "train", "learning_rate"), color=green)
    rate.ticklabel_format(axis="y", scilimits=(0, 0))  # labels such as 0.0005 would not fit
    speed.plot(*curve(lines, "train", "tokens_per_second"), color=blue)
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    plotting.style_axes(loss, "", "loss, nats per token")
    plotting.style_axes(bits, "", "validation, bits per byte")
    plotting.style_axes(rate, "training step", "learning rate")
    plotting.style_axes(speed, "training step", "tokens per second")
    return figure


def curve(lines: Sequence[dict], split: str, metric: str) -> tuple[list[int], list[float]]:
    """Returns (steps, values). Non-finite values, logged as null, are NaN."""
    steps, values = [], []
    for line in lines:
        if line["split"] == split and metric in line:
            steps.append(line["step"])
            values.append(math.nan if line[metric] is None else line[metric])
    return steps, values
