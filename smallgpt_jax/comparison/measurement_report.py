"""Sections of a report on other measurements than the loss: inference, the inside of the models, texts, speed."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smallgpt_jax.comparison import aggregation, costs, figures, results, statistics
from smallgpt_jax.comparison.aggregation import Spread
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Plot, Table, with_range
from smallgpt_jax.comparison.candidates import read_candidates
from smallgpt_jax.comparison.results import OWN_TEXT, Run
from smallgpt_jax.comparison.statistics import Difference
from smallgpt_jax.evaluation.inside import summary
from smallgpt_jax.formatting import safe_name

SPEEDS = {"tokens/s": ",.0f", "seconds": ",.0f", "memory MB": ",.1f", "decoding tokens/s": ",.0f"}  # {column: format}
STREAM_LABELS = ("similarity", "neighbours", "effective rank")  # of summary.STREAM
# {name of a plot: (budget of `choose`, batch size, its unit, label of the axis)}
PLOTS = {
    "loss-latency": ("decode_ms", 1, 1, "ms per decoding step, batch 1, full cache"),
    "loss-latency-32": ("decode_ms", 32, 1, "ms per decoding step, batch 32, full cache"),
    "loss-memory": ("memory", 1, 1e6, "MB of weights and full cache, batch 1"),
    "loss-memory-32": ("memory", 32, 1e6, "MB of weights and full cache, batch 32"),
}
CASES = [(batch, cache) for batch in costs.DECODING_BATCHES for cache in ("empty", "full")]


# ------------------------------------------------------------------ inference
def inference_blocks(runs: Sequence[Run]) -> list:
    groups = {name: measured for name, group in aggregation.group_by_name(runs).items()
              if (measured := [run for run in group if run.inference])}
    if not groups:
        return []
    measured = [run for group in groups.values() for run in group]
    text = ("Medians and, in parentheses, quartiles of repeated timings in one process; with several seeds, the median "
            "of each over the seeds. A decoding step adds one token per text. Empty cache: the first "
            "tokens of a text; full: the last ones of the context. Weights and cache: exact sizes in decoding, in ")
    dtypes, devices = (", ".join(dict.fromkeys(run.inference[key] for run in measured)) for key in ("dtype", "device"))
    return [Heading("Inference"), Paragraph(f"{text}{dtypes} (vectors and routers in float32). Measured on {devices}."),
            *inference_plots(runs), inference_table(groups)]


def inference_plots(runs: Sequence[Run]) -> list[Plot]:
    found, recorded = [], [dataclasses.asdict(run) for run in runs]
    for name, (budget, batch, unit, label) in PLOTS.items():
        candidates, _ = read_candidates(recorded, costs.budgets(batch)[budget])
        candidates = [dataclasses.replace(candidate, cost=candidate.cost / unit) for candidate in candidates
                      if candidate.cost is not None]
        if len(candidates) > 1:
            found.append(Plot(name, figures.loss_against_cost(candidates, label), (
                f"Last validation loss against {label}. Vertical lines: range over seeds. Gray line, filled markers: "
                "Pareto front.")))
    return found


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
    return with_range(*(np.median([one[key] for one in found]) for key in ("median", "low", "high")), ".3g")


# ------------------------------------------------------------------ inside the models
def inside_blocks(runs: Sequence[Run], reference: str = "") -> list:
    observed = aggregation.group_by_name([run for run in runs if run.inside and run.inside["blocks"]])
    groups = {name: [run.inside for run in group] for name, group in observed.items()}
    if not groups:
        return []
    return [Heading("Inside the models"), Paragraph(
        "Measured by diagnose on windows of the validation split, after the last step; means over seeds, paths and "
        "heads. Similarity of all and of adjacent tokens, and rank: after the last block. Entropy and weight on "
        "position 0: means over the blocks. Repeats: loss of tokens that follow a pair of tokens as at its last "
        "occurrence in the window (lowest to highest over the seeds). In-context score: loss late minus early in the "
        "context. Last columns: how much higher the loss is without the block that matters least, and without the one "
        "that matters most."),
        Plot("inside", figures.by_depth(groups), "Measures after each block. Blocks of parallel paths are averaged."),
        without_empty_columns(Table(
            ("run", *STREAM_LABELS, "entropy", "position 0", "repeats", "other tokens", "in-context score",
             "least important block", "most important block"),
            tuple((name, *cells(group)) for name, group in groups.items()))),
        *differences_blocks({label: {name: {
            run.seed: value for run in group if (value := run.inside["blocks"][-1][measure]) is not None}
            for name, group in observed.items()} for measure, label in zip(summary.STREAM, STREAM_LABELS)}, reference)]


def without_empty_columns(table: Table) -> Table:
    kept = [i for i in range(len(table.head)) if any(row[i] != MISSING for row in table.rows)]
    head, *rows = (tuple(line[i] for i in kept) for line in (table.head, *table.rows))
    return Table(head, tuple(rows))


def cells(group: Sequence[dict]) -> tuple[str, ...]:
    def cell(values, form: str) -> str:
        found = summary.mean(values)
        return MISSING if found is None else format(found, form)

    return (*(cell((found["blocks"][-1][measure] for found in group), form)
              for measure, form in zip(summary.STREAM, (".3f", ".3f", ".1f"))),
            *(cell((block[measure] for found in group for block in found["blocks"]), ".3f")
              for measure in summary.ATTENTION),
            *(spread_cell([found.get(name) for found in group]) for name in ("loss_of_repeats", "loss_of_others")),
            *(cell((found[name] for found in group), "+.4f")
              for name in ("in_context_score", "least_important_block", "most_important_block")))


def spread_cell(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return MISSING
    mean = summary.mean(found)
    return with_range(mean, min(found), max(found), ".3f") if len(found) > 1 else f"{mean:.3f}"


# ------------------------------------------------------------------ other measurements
def answers_blocks(groups: dict[str, list[Run]]) -> list:
    """Returns the measures of a probe's answers; [] for text."""
    found = {name: aggregation.answers(group) for name, group in groups.items()}
    heads = {measure: measure.replace("_", " ") for row in found.values() for measure in row}
    if not heads:
        return []
    return [Heading("Answers"), Paragraph(
        "Exact match: fraction of the validation examples without a wrong answer. Accuracy: fraction of right answers. "
        "Both after the last step. An answer is the most probable token after the inputs, among which are the right "
        "earlier answers. \"at N\": at the further length N."),
        spread_table(groups, found, heads)]


def measurement_blocks(groups: dict[str, list[Run]], runs: Sequence[Run], reference: str) -> list:
    blocks = answers_blocks(groups)
    for text in results.text_names(runs):
        label = "their own text" if text == OWN_TEXT else text
        table = contexts_table(groups, text)
        if len(table.head) > 2:
            blocks += [Heading(f"Longer contexts: {label}"), Plot(
                f"context-{safe_name(text)}", figures.loss_against_context(text, label, runs),
                f"Bits per byte of {label} by context length. They are measured on other tokens than the validation "
                "loss. Models with learned positions are limited to the context length of training."), table]
        elif text != OWN_TEXT:  # the summary table already shows the loss on a run's training text
            blocks += [Heading(f"Bits per byte of {text}"), table]
    if any(run.benchmarks for run in runs):
        blocks += [Heading("Benchmarks"), benchmarks_table(groups), *differences_blocks(
            {task: {name: {run.seed: run.benchmarks[task] for run in group if task in run.benchmarks}
                    for name, group in groups.items()} for task in benchmark_names(groups)}, reference)]
    if with_experts := [group[0] for group in groups.values() if group[0].expert_load]:
        blocks += [Heading("Load of experts"), *(Plot(
            f"experts-{safe_name(run.name)}", figures.expert_load(run),
            f"{run.name}, seed {run.seed}: tokens per expert in the last logged step, relative to the block's mean.")
            for run in with_experts)]
    if len(groups) < len(runs):
        blocks += [Heading("Speed and memory"), Paragraph("Medians over the seeds (quartiles)."), speed_table(groups)]
    return [*blocks, Heading("Parameters by component"), components_table(groups)]


def contexts_table(groups: dict[str, list[Run]], text: str) -> Table:
    found = {name: aggregation.bits_by_context(group, text) for name, group in groups.items()}
    lengths = sorted({length for row in found.values() for length in row})
    return spread_table(groups, found, {length: f"context {length:,}" for length in lengths})


def benchmark_names(groups: dict[str, list[Run]]) -> list[str]:
    return list(dict.fromkeys(task for group in groups.values() for run in group for task in run.benchmarks))


def benchmarks_table(groups: dict[str, list[Run]]) -> Table:
    def cell(group: list[Run], task: str) -> str:
        scores = [run.benchmarks[task] for run in group if task in run.benchmarks]
        return format_spread(aggregation.spread(scores), len(group))

    return Table(("task", *groups), tuple(
        (task, *(cell(group, task) for group in groups.values())) for task in benchmark_names(groups)))


def speed_values(group: list[Run]) -> dict[str, list[float | None]]:
    """Returns {column of SPEEDS: one value per run}."""
    has_one_end = len({run.last and run.last.step for run in group}) == 1
    return dict(zip(SPEEDS, (
        [run.tokens_per_second for run in group],
        [run.last and run.last.seconds for run in group] if has_one_end else [],
        [run.memory_bytes and run.memory_bytes / 1e6 for run in group],
        [(ms := costs.step_ms(run.inference, batch=1)) and 1000 / ms for run in group])))


def speed_table(groups: dict[str, list[Run]]) -> Table:
    def cell(values: list[float | None], form: str) -> str:
        if (found := aggregation.quartiles(values)) is None:
            return MISSING
        median, low, high = (found[key] for key in ("median", "low", "high"))
        return format(median, form) if format(low, form) == format(high, form) else with_range(median, low, high, form)

    return Table(("run", "seeds", *SPEEDS), tuple(
        (name, f"{len(group)}", *(cell(values, SPEEDS[column]) for column, values in speed_values(group).items()))
        for name, group in groups.items()))


def components_table(groups: dict[str, list[Run]]) -> Table:
    parts = list(dict.fromkeys(part for group in groups.values() for part in group[0].components))
    return Table(("run", *parts, "total"), tuple(
        (name, *(f"{group[0].components[part]:,}" if part in group[0].components else MISSING for part in parts),
         f"{group[0].parameters:,}") for name, group in groups.items()))


def spread_table(groups: dict[str, list[Run]], found: dict[str, dict[Any, Spread]], heads: dict[Any, str]) -> Table:
    """Returns one row per model with `found`, {model: {measure: spread}}, under `heads`, {measure: text}."""
    return Table(("run", *heads.values()), tuple(
        (name, *(format_spread(row.get(measure), len(groups[name])) for measure in heads))
        for name, row in found.items()))


def format_spread(numbers: Spread | None, seeds: int = 1) -> str:
    """Returns text such as '1.2345 (1.2300 to 1.2390), 2 of 3 seeds'; the end only if seeds lack the number."""
    if numbers is None:
        return MISSING
    mean = f"{numbers.mean:.4f}" if numbers.count == 1 else with_range(numbers.mean, numbers.low, numbers.high)
    return mean + f", {numbers.count} of {seeds} seeds" * (numbers.count < seeds)


def differences_blocks(measures: Mapping[str, statistics.Losses], reference: str) -> list:
    """Returns blocks with the paired differences of {measure: {name: {seed: value}}} to the reference, if any."""
    rows = [(measure, row) for measure, values in measures.items() if reference in values
            for row in statistics.compare_pairs(values, [(name, reference) for name in values if name != reference])
            if row.half_width is not None]
    if not rows:
        return []
    head = ("measure", "run", "difference", "95% interval", "seeds", "p", "verdict")
    return [Paragraph(f"Against {reference}, paired by seed; p with Holm's correction for the runs of a measure:"),
            Table(head, tuple((measure, row.name, f"{row.mean:+.4f}", format_interval(row), f"{row.seeds}",
                               f"{row.p_value:.2g}", row.verdict) for measure, row in rows))]


def format_interval(difference: Difference) -> str:
    if difference.half_width is None:
        return MISSING
    return f"{difference.mean - difference.half_width:+.4f} to {difference.mean + difference.half_width:+.4f}"
