"""The section of a report about inference: loss against latency and memory, and the measurements."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from smallgpt_jax.comparison import aggregation, choice, costs, figures
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Plot, Table
from smallgpt_jax.comparison.choice import Candidate
from smallgpt_jax.comparison.records import Record
from smallgpt_jax.comparison.results import Run

# {name of a plot: (budget of `choose`, batch size, label of the axis, what the caption says)}
PLOTS = {
    "loss-latency": ("decode_ms", 1, "ms per decoding step, batch 1, full cache", "the time of a decoding step"),
    "loss-latency-32": ("decode_ms", 32, "ms per decoding step, batch 32, full cache", "the time of a decoding step"),
    "loss-memory": ("memory", 1, "bytes of weights and full cache, batch 1", "the memory of inference"),
    "loss-memory-32": ("memory", 32, "bytes of weights and full cache, batch 32", "the memory of inference"),
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
    for name, (budget, batch, label, what) in PLOTS.items():
        candidates, _ = choice.read_candidates(recorded, costs.budgets(batch)[budget])
        candidates = [candidate for candidate in candidates if candidate.cost is not None]
        if len(candidates) > 1:
            found.append(Plot(name, loss_against_cost(candidates, label), (
                f"Last validation loss against {what}, batch size {batch}. Vertical lines: range over seeds. Gray "
                "line, filled markers: Pareto front.")))
    return found


def loss_against_cost(candidates: Sequence[Candidate], label: str) -> Figure:
    """Plots one marker per candidate, in the color of its model, and the Pareto front. Sizes are beside the markers."""
    figure, plot = figures.new_plot(label, "validation loss, nats per token")
    front = choice.pareto_front(candidates)
    plot.step([one.cost for one in front], [one.loss for one in front], where="post", color="gray", linewidth=1,
              zorder=1)
    styles = dict(zip(dict.fromkeys(candidate.model for candidate in candidates), figures.line_styles()))
    labeled = set()
    for candidate in candidates:
        style, losses = styles[candidate.model], [choice.final_loss(run) for run in candidate.runs]
        plot.vlines(candidate.cost, min(losses), max(losses), color=style["color"], linewidth=2, alpha=0.4)
        plot.plot(candidate.cost, candidate.loss, style["marker"], color=style["color"], markersize=6,
                  markerfacecolor=style["color"] if candidate in front else "none",
                  label=None if candidate.model in labeled else candidate.model)
        plot.annotate(candidate.name.removeprefix(candidate.model).lstrip("@"), (candidate.cost, candidate.loss),
                      xytext=(5, 3), textcoords="offset points", fontsize=7)
        labeled.add(candidate.model)
    found = [candidate.cost for candidate in candidates]
    if max(found) > 4 * min(found):
        plot.set_xscale("log")
    plot.margins(x=0.1)
    return figures.finish_plot(figure, plot)


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
