"""The section of a report about inference: loss against latency and memory, and the measurements."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from smallgpt_jax.comparison import aggregation, costs, figures
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Plot, Table
from smallgpt_jax.comparison.candidates import Candidate, by_model, pareto_front, read_candidates
from smallgpt_jax.comparison.records import Record
from smallgpt_jax.comparison.results import Run

# {name of a plot: (budget of `choose`, batch size, its unit, label of the axis)}
PLOTS = {
    "loss-latency": ("decode_ms", 1, 1, "ms per decoding step, batch 1, full cache"),
    "loss-latency-32": ("decode_ms", 32, 1, "ms per decoding step, batch 32, full cache"),
    "loss-memory": ("memory", 1, 1e6, "MB of weights and full cache, batch 1"),
    "loss-memory-32": ("memory", 32, 1e6, "MB of weights and full cache, batch 32"),
}
CASES = [(batch, cache) for batch in costs.DECODING_BATCHES for cache in ("empty", "full")]


def inference_blocks(record: Record) -> list:
    groups = {name: measured for name, group in aggregation.group_by_name(record.runs).items()
              if (measured := [run for run in group if run.inference])}
    if not groups:
        return []
    measured = [run for group in groups.values() for run in group]
    text = ("Medians and, in parentheses, quartiles of repeated timings in one process; with several seeds, the median "
            "of each over the seeds. A decoding step adds one token per text. Empty cache: the first "
            "tokens of a text; full: the last ones of the context. Weights and cache: exact sizes in decoding, in ")
    dtypes, devices = (", ".join(dict.fromkeys(run.inference[key] for run in measured)) for key in ("dtype", "device"))
    return [Heading("Inference"), Paragraph(f"{text}{dtypes} (vectors and routers in float32). Measured on {devices}."),
            *plots(record.runs), inference_table(groups)]


def plots(runs: Sequence[Run]) -> list[Plot]:
    found, recorded = [], [dataclasses.asdict(run) for run in runs]
    for name, (budget, batch, unit, label) in PLOTS.items():
        candidates, _ = read_candidates(recorded, costs.budgets(batch)[budget])
        candidates = [dataclasses.replace(candidate, cost=candidate.cost / unit) for candidate in candidates
                      if candidate.cost is not None]
        if len(candidates) > 1:
            found.append(Plot(name, loss_against_cost(candidates, label), (
                f"Last validation loss against {label}. Vertical lines: range over seeds. Gray line, filled markers: "
                "Pareto front.")))
    return found


def loss_against_cost(candidates: Sequence[Candidate], label: str) -> Figure:
    """Plots a marker per candidate and the Pareto front. Thin lines join the sizes of a model."""
    figure, plot = figures.new_plot(label, "validation loss, nats per token")
    front = pareto_front(candidates)
    plot.step([one.cost for one in front], [one.loss for one in front], where="post", color="gray", linewidth=1,
              zorder=1)
    # by_model has the order of the runs, so that a model has the same color in all plots.
    for style, (model, sizes) in zip(figures.line_styles(), by_model(candidates).items()):
        plot_sizes(plot, sorted(sizes, key=lambda one: one.cost), front, style, model)
    found = [candidate.cost for candidate in candidates]
    if max(found) > 4 * min(found):
        plot.set_xscale("log")
        plot.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plot.xaxis.set_minor_locator(NullLocator())
    plot.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    plot.margins(x=0.1)
    return figures.finish_plot(figure, plot)


def plot_sizes(plot, sizes: Sequence[Candidate], front: Sequence[Candidate], style: dict, model: str) -> None:
    color = style["color"]
    for one in sizes:
        losses = one.losses.values()
        plot.vlines(one.cost, min(losses), max(losses), color=color, linewidth=2, alpha=0.4)
    filled = [one for one in sizes if one in front]
    plot.plot([one.cost for one in sizes], [one.loss for one in sizes], color=color, linewidth=0.7, alpha=0.6,
              marker=style["marker"], markersize=6, markerfacecolor="none", label=model)
    plot.plot([one.cost for one in filled], [one.loss for one in filled], style["marker"], color=color, markersize=6)
    for one in filled:
        if size := one.name.partition("@")[2]:
            plot.annotate(size, (one.cost, one.loss), xytext=(-4, -4), textcoords="offset points", fontsize=7,
                          ha="right", va="top")


def inference_table(groups: dict[str, list[Run]]) -> Table:
    return Table(
        ("run", "weights MB", "cache bytes per token", "cache MB, full", "context", "prefill ms",
         *(f"step ms, batch {batch}, {cache}" for batch, cache in CASES)),
        tuple((name, *table_cells(group)) for name, group in groups.items()))


def table_cells(group: list[Run]) -> tuple[str, ...]:
    first, inferences = group[0].inference, [run.inference for run in group]
    weights = group[0].weight_bytes
    return (MISSING if weights is None else f"{weights / 1e6:,.1f}", f"{first['cache_bytes_per_token']:,}",
            f"{first['cache_bytes'] / 1e6:,.2f}", f"{first['context_length']:,}",
            format_quartiles([found["prefill_ms"] for found in inferences]),
            *(format_quartiles([costs.step_quartiles(found, *case) for found in inferences]) for case in CASES))


def format_quartiles(timings: Sequence[dict[str, float] | None]) -> str:
    found = [quartiles for quartiles in timings if quartiles]
    if not found:
        return MISSING
    median, low, high = (f"{np.median([quartiles[key] for quartiles in found]):.3g}"
                         for key in ("median", "low", "high"))
    return f"{median} ({low} to {high})"
