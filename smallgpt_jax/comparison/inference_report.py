"""The section of a report about inference: loss against latency and memory, and the
measurements.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from smallgpt_jax.comparison import aggregation, costs, figures
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Plot, Table, with_range
from smallgpt_jax.comparison.candidates import read_candidates
from smallgpt_jax.comparison.results import Run

# {name of a plot: (budget of `choose`, batch size, its unit, label of the axis)}
PLOTS = {
    "loss-latency": ("decode_ms", 1, 1, "ms per decoding step, batch 1, full cache"),
    "loss-latency-32": ("decode_ms", 32, 1, "ms per decoding step, batch 32, full cache"),
    "loss-memory": ("memory", 1, 1e6, "MB of weights and full cache, batch 1"),
    "loss-memory-32": ("memory", 32, 1e6, "MB of weights and full cache, batch 32"),
}
CASES = [(batch, cache) for batch in costs.DECODING_BATCHES for cache in ("empty", "full")]


def inference_blocks(runs: Sequence[Run]) -> list:
    groups = {
        name: measured
        for name, group in aggregation.group_by_name(runs).items()
        if (measured := [run for run in group if run.inference])
    }
    if not groups:
        return []
    measured = [run for group in groups.values() for run in group]
    text = (
        "Medians and, in parentheses, quartiles of repeated timings in one process; with several "
        "seeds, the median of each over the seeds. A decoding step adds one token per text. Empty "
        "cache: the first tokens of a text; full: the last ones of the context. Weights and "
        "cache: exact sizes in decoding, in "
    )
    dtypes, devices = (
        ", ".join(dict.fromkeys(run.inference[key] for run in measured))
        for key in ("dtype", "device")
    )
    return [
        Heading("Inference"),
        Paragraph(f"{text}{dtypes} (vectors and routers in float32). Measured on {devices}."),
        *inference_plots(runs),
        inference_table(groups),
    ]


def inference_plots(runs: Sequence[Run]) -> list[Plot]:
    found, recorded = [], [dataclasses.asdict(run) for run in runs]
    for name, (budget, batch, unit, label) in PLOTS.items():
        candidates, _ = read_candidates(recorded, costs.budgets(batch)[budget])
        candidates = [
            dataclasses.replace(candidate, cost=candidate.cost / unit)
            for candidate in candidates
            if candidate.cost is not None
        ]
        if len(candidates) > 1:
            found.append(
                Plot(
                    name,
                    figures.loss_against_cost(candidates, label),
                    (
                        f"Last validation loss against {label}. Vertical lines: range over seeds. "
                        "Gray line, filled markers: Pareto front."
                    ),
                )
            )
    return found


def inference_table(groups: dict[str, list[Run]]) -> Table:
    return Table(
        (
            "run",
            "weights MB",
            "cache bytes per token",
            "cache MB, full",
            "context",
            "prefill ms",
            *(f"step ms, batch {batch}, {cache}" for batch, cache in CASES),
        ),
        tuple((name, *table_cells(group)) for name, group in groups.items()),
    )


def table_cells(group: list[Run]) -> tuple[str, ...]:
    first, inferences = group[0].inference, [run.inference for run in group]
    weights = group[0].weight_bytes
    return (
        MISSING if weights is None else f"{weights / 1e6:,.1f}",
        f"{first['cache_bytes_per_token']:,}",
        f"{first['cache_bytes'] / 1e6:,.2f}",
        f"{first['context_length']:,}",
        format_quartiles([found["prefill_ms"] for found in inferences]),
        *(
            format_quartiles([costs.step_quartiles(found, *case) for found in inferences])
            for case in CASES
        ),
    )


def format_quartiles(timings: Sequence[dict[str, float] | None]) -> str:
    found = [quartiles for quartiles in timings if quartiles]
    if not found:
        return MISSING
    return with_range(
        *(np.median([one[key] for one in found]) for key in ("median", "low", "high")), ".3g"
    )
