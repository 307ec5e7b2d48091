"""The plots of a diagnosis. Solid lines are the trained model, dashed ones its initialisation."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator

from smallgpt_jax.run.plotting import COLORS, png, style_axes

BINS = 16  # points of the loss by position
STREAM = {
    "residual": "residual to rank one (0: all tokens equal)",
    "token_similarity": "mean cosine of all tokens",
    "neighbour_similarity": "mean cosine of adjacent tokens",
    "effective_rank": "effective rank",
}
ATTENTION = {
    "entropy": "entropy / ln(number of keys)",
    "first_weight": "weight on position 0",
    "effective_rank": "effective rank of A",
    "log_determinant": "ln det A",
}
COLLAPSE = {
    "whole": "with skips",
    "without_skips": "without skips",
    "attention_alone": "without skips and MLPs",
}
DPI = 110


def draw(content: dict[str, Any]) -> dict[str, bytes]:
    """Returns {file name: PNG} of the content of diagnose.json."""
    figures = {"depth.png": depth(content), "losses.png": losses(content)}
    if any("attention" in block for block in content["trained"]["blocks"]):
        figures["attention.png"] = attention(content)
    if "deep" in content:
        figures["collapse.png"] = collapse(content)
    if "experts" in content["trained"]:
        figures["experts.png"] = experts(content)
    return {name: png(figure, DPI) for name, figure in figures.items()}


def new_figure(rows: int, columns: int, width: float = 4.6, height: float = 3.3):
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).ravel()


def by_path(content: dict[str, Any], state: str) -> list[list[dict]]:
    blocks, paths = content[state]["blocks"], content["paths"]
    return [
        blocks[start : start + len(blocks) // paths]
        for start in range(0, len(blocks), len(blocks) // paths)
    ]


def depth(content: dict[str, Any]) -> Figure:
    """A line goes from a block's input to its output; it jumps where a layer between two blocks
    changes the stream.
    """
    figure, plots = new_figure(2, 2)
    for plot, (measure, label) in zip(plots, STREAM.items()):
        for state, linestyle in (("trained", "-"), ("initial", "--")):
            for path, blocks in enumerate(by_path(content, state)):
                x = [number + end for number in range(len(blocks)) for end in (0, 1)]
                y = [block[end][measure] for block in blocks for end in ("input", "output")]
                name = state + (f", path {path}" if content["paths"] > 1 else "")
                plot.plot(
                    x,
                    y,
                    linestyle,
                    color=COLORS[path % len(COLORS)],
                    marker="o",
                    markersize=3,
                    label=name,
                )
        finish(plot, "blocks before", label)
    plots[0].legend(fontsize=8, frameon=False)
    return figure


def attention(content: dict[str, Any]) -> Figure:
    """One dot per head."""
    figure, plots = new_figure(2, 2)
    for plot, (measure, label) in zip(plots, ATTENTION.items()):
        for state, marker, color, shift in (
            ("trained", "o", COLORS[0], -0.12),
            ("initial", "x", COLORS[1], 0.12),
        ):
            points = [
                (number + shift, value)
                for number, block in enumerate(content[state]["blocks"])
                for value in block.get("attention", {}).get(measure, [])
            ]
            plot.plot(*zip(*points), marker, color=color, markersize=4, label=state)
        finish(plot, "block", label)
    plots[0].legend(fontsize=8, frameon=False)
    return figure


def losses(content: dict[str, Any]) -> Figure:
    figure, (position, after, without) = new_figure(1, 3)
    found, blue = content["trained"]["losses"], COLORS[0]
    parts = np.array_split(np.array(found["by_position"]), min(BINS, len(found["by_position"])))
    ends = np.cumsum(list(map(len, parts)))
    position.plot(
        ends - [len(part) / 2 for part in parts], [part.mean() for part in parts], color=blue
    )
    style_axes(position, "position", "loss, nats per token")
    after.plot([kept["loss"] for kept in found["after_blocks"]], "o-", color=blue, markersize=4)
    finish(
        after,
        "blocks before the head" + (" in each path" if content["paths"] > 1 else ""),
        "loss, nats per token",
    )
    left_out = [(str(number), entry) for number, entry in enumerate(found["without_block"])]
    left_out += [
        (f"path {number}", entry) for number, entry in enumerate(found.get("without_path", []))
    ]
    without.bar(
        [name for name, _ in left_out],
        [entry["difference"] for _, entry in left_out],
        yerr=[0 if np.isnan(entry["error"]) else entry["error"] for _, entry in left_out],
        color=blue,
    )
    without.set(
        xlabel="left out: block" + (", path" if content["paths"] > 1 else ""),
        ylabel="increase of the loss",
    )
    without.set_yscale(
        "symlog", linthresh=0.01
    )  # the first block matters hundreds of times as much as the last
    without.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    without.grid(axis="y", alpha=0.3)
    without.spines[["top", "right"]].set_visible(False)
    return figure


def collapse(content: dict[str, Any]) -> Figure:
    """The dotted line is the rate of uniform causal attention, whose matrix has the eigenvalues 1,
    1/2, 1/3, …
    """
    figure, (residual, similarity) = new_figure(1, 2)
    for color, (name, label) in zip(COLORS, COLLAPSE.items()):
        found = content["deep"][name]
        x = range(1, 1 + content["deep"]["blocks"])
        residual.plot(x, found["residual"], color=color, label=label)
        similarity.plot(x, found["token_similarity"], color=color)
    residual.plot(
        x,
        [found["residual"][-1] * 2.0 ** (len(x) - number) for number in x],
        ":",
        color="black",
        label="half per block",
    )
    finish(residual, "number of blocks", STREAM["residual"])
    finish(similarity, "number of blocks", STREAM["token_similarity"])
    residual.set_yscale("log")
    residual.set_ylim(top=2)
    residual.yaxis.set_major_formatter(
        FormatStrFormatter("%g")
    )  # powers of ten would need math text
    residual.legend(fontsize=8, frameon=False)
    return figure


def experts(content: dict[str, Any]) -> Figure:
    """Loads relative to the mean load, one row per block and text."""
    figure, (plot,) = new_figure(1, 1, width=7)
    rows = [
        (f"block {number}, {name}", load)
        for number, block in enumerate(content["trained"]["experts"])
        for name, load in block["by_text"].items()
    ]
    loads = np.array([load for _, load in rows]) * len(rows[0][1])
    image = plot.imshow(loads, aspect="auto", cmap="viridis", vmin=0)
    plot.set(xlabel="expert", yticks=range(len(rows)), yticklabels=[name for name, _ in rows])
    figure.colorbar(image, label="load / mean load")
    return figure


def finish(plot, x: str, y: str) -> None:
    style_axes(plot, x, y)
    plot.xaxis.set_major_locator(MaxNLocator(integer=True))
