"""The plots of a diagnosis. Solid lines are the trained model, dashed ones its initialisation."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator

from smallgpt_jax.run.plotting import COLORS, png, style_axes

_BINS = 16  # points of the loss by position
_STREAM = {
    "residual": "residual to rank one (0: all tokens equal)",
    "token_similarity": "mean cosine of all tokens",
    "neighbour_similarity": "mean cosine of adjacent tokens",
    "effective_rank": "effective rank",
}
_ATTENTION = {
    "entropy": "entropy / ln(number of keys)",
    "first_weight": "weight on position 0",
    "effective_rank": "effective rank of A",
    "log_determinant": "ln det A",
}
_COLLAPSE = {
    "whole": "with skips",
    "without_skips": "without skips",
    "attention_alone": "without skips and MLPs",
}
_DPI = 110
_BLUE = COLORS[0]


def draw(content: dict[str, Any]) -> dict[str, bytes]:
    """Returns {file name: PNG} of the content of diagnose.json."""
    figures = {"depth.png": _depth(content), "losses.png": _losses(content)}
    if any("attention" in block for block in content["trained"]["blocks"]):
        figures["attention.png"] = _attention(content)
    if "deep" in content:
        figures["collapse.png"] = _collapse(content)
    if "experts" in content["trained"]:
        figures["experts.png"] = _experts(content)
    return {name: png(figure, _DPI) for name, figure in figures.items()}


def _new_figure(rows: int, columns: int, width: float = 4.6):
    figure = Figure(figsize=(columns * width, rows * 3.3), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).ravel()


def _finish(plot, x: str, y: str) -> None:
    style_axes(plot, x, y)
    plot.xaxis.set_major_locator(MaxNLocator(integer=True))


def _depth(content: dict[str, Any]) -> Figure:
    """Plots the measures of the residual stream by depth. A line goes from a block's input to its
    output; it jumps where a layer between two blocks changes the stream.
    """
    paths = content["paths"]
    figure, plots = _new_figure(2, 2)
    for plot, (measure, label) in zip(plots, _STREAM.items()):
        for state, linestyle in (("trained", "-"), ("initial", "--")):
            blocks = content[state]["blocks"]
            depth = len(blocks) // paths
            for path in range(paths):
                x, y = [], []
                for number, block in enumerate(blocks[path * depth : (path + 1) * depth]):
                    x += [number, number + 1]
                    y += [block["input"][measure], block["output"][measure]]
                label_of_line = f"{state}, path {path}" if paths > 1 else state
                style = {"linestyle": linestyle, "color": COLORS[path % len(COLORS)]}
                plot.plot(x, y, marker="o", markersize=3, label=label_of_line, **style)
        _finish(plot, "blocks before", label)
    plots[0].legend(fontsize=8, frameon=False)
    return figure


def _attention(content: dict[str, Any]) -> Figure:
    """Plots the measures of attention by block, with one dot per head."""
    figure, plots = _new_figure(2, 2)
    # beside each other, so that the dots of one state do not cover those of the other
    states = (("trained", "o", _BLUE, -0.12), ("initial", "x", COLORS[1], 0.12))
    for plot, (measure, label) in zip(plots, _ATTENTION.items()):
        for state, marker, color, shift in states:
            x, y = [], []
            for number, block in enumerate(content[state]["blocks"]):
                by_head = block.get("attention", {}).get(measure, [])
                x += [number + shift] * len(by_head)
                y += by_head
            plot.plot(x, y, marker, color=color, markersize=4, label=state)
        _finish(plot, "block", label)
    plots[0].legend(fontsize=8, frameon=False)
    return figure


def _losses(content: dict[str, Any]) -> Figure:
    """Plots the loss by position, after the first blocks, and without single blocks."""
    figure, (by_position, after, without) = _new_figure(1, 3)
    has_paths = content["paths"] > 1
    losses = content["trained"]["losses"]
    bins = np.array_split(losses["by_position"], min(_BINS, len(losses["by_position"])))
    ends = np.cumsum([len(losses_T) for losses_T in bins])
    middles = ends - [len(losses_T) / 2 for losses_T in bins]
    by_position.plot(middles, [losses_T.mean() for losses_T in bins], color=_BLUE)
    style_axes(by_position, "position", "loss, nats per token")

    after.plot([kept["loss"] for kept in losses["after_blocks"]], "o-", color=_BLUE, markersize=4)
    label = "blocks before the head in each path" if has_paths else "blocks before the head"
    _finish(after, label, "loss, nats per token")

    left_out = {str(number): entry for number, entry in enumerate(losses["without_block"])}
    for path, entry in enumerate(losses.get("without_path", [])):
        left_out[f"path {path}"] = entry
    without.bar(
        list(left_out),
        [entry["difference"] for entry in left_out.values()],
        yerr=np.nan_to_num([entry["error"] for entry in left_out.values()]),  # of one window: NaN
        color=_BLUE,
    )
    label = "left out: block, path" if has_paths else "left out: block"
    without.set(xlabel=label, ylabel="increase of the loss")
    # the first block matters hundreds of times as much as the last
    without.set_yscale("symlog", linthresh=0.01)
    without.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    without.grid(axis="y", alpha=0.3)
    without.spines[["top", "right"]].set_visible(False)
    return figure


def _collapse(content: dict[str, Any]) -> Figure:
    """Plots how fast the tokens of an untrained model become equal. The dotted line is the rate of
    uniform causal attention, whose matrix has the eigenvalues 1, 1/2, 1/3, …
    """
    figure, (residual, similarity) = _new_figure(1, 2)
    blocks = content["deep"]["blocks"]
    x = np.arange(1, 1 + blocks)
    for color, (name, label) in zip(COLORS, _COLLAPSE.items()):
        measures = content["deep"][name]
        residual.plot(x, measures["residual"], color=color, label=label)
        similarity.plot(x, measures["token_similarity"], color=color)
    # through the last point of the last line
    halves = measures["residual"][-1] * 2.0 ** (blocks - x)
    residual.plot(x, halves, ":", color="black", label="half per block")
    _finish(residual, "number of blocks", _STREAM["residual"])
    _finish(similarity, "number of blocks", _STREAM["token_similarity"])
    residual.set_yscale("log")
    residual.set_ylim(top=2)
    # powers of ten would need math text
    residual.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    residual.legend(fontsize=8, frameon=False)
    return figure


def _experts(content: dict[str, Any]) -> Figure:
    """Shows the load of each expert relative to the mean load, one row per block and text."""
    figure, (plot,) = _new_figure(1, 1, width=7)
    names, loads = [], []
    for number, block in enumerate(content["trained"]["experts"]):
        for name, load in block["by_text"].items():
            names.append(f"block {number}, {name}")
            loads.append(load)
    num_experts = len(loads[0])
    relative = np.array(loads) * num_experts
    image = plot.imshow(relative, aspect="auto", cmap="viridis", vmin=0)
    plot.set(xlabel="expert", yticks=range(len(names)), yticklabels=names)
    figure.colorbar(image, label="load / mean load")
    return figure
