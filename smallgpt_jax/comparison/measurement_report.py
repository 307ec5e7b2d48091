"""Sections of a report on other measurements than the loss: answers, texts, benchmarks, experts,
speed, parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from smallgpt_jax.comparison import aggregation, costs, figures, results, statistics
from smallgpt_jax.comparison.aggregation import Spread
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Plot, Table, with_range
from smallgpt_jax.comparison.results import OWN_TEXT, Run
from smallgpt_jax.comparison.statistics import Difference
from smallgpt_jax.formatting import safe_name

SPEEDS = {
    "tokens/s": ",.0f",
    "seconds": ",.0f",
    "memory MB": ",.1f",
    "decoding tokens/s": ",.0f",
}  # {column: format}


def answers_blocks(groups: dict[str, list[Run]]) -> list:
    """Returns the measures of a probe's answers; [] for text."""
    found = {name: aggregation.answers(group) for name, group in groups.items()}
    heads = {measure: measure.replace("_", " ") for row in found.values() for measure in row}
    if not heads:
        return []
    return [
        Heading("Answers"),
        Paragraph(
            "Exact match: fraction of the validation examples without a wrong answer. Accuracy: "
            "fraction of right answers. Both after the last step. An answer is the most probable "
            "token after the inputs, among which are the right "
            'earlier answers. "at N": at the further length N.'
        ),
        spread_table(groups, found, heads),
    ]


def measurement_blocks(groups: dict[str, list[Run]], runs: Sequence[Run], reference: str) -> list:
    blocks = answers_blocks(groups)
    for text in results.text_names(runs):
        label = "their own text" if text == OWN_TEXT else text
        table = contexts_table(groups, text)
        if len(table.head) > 2:
            blocks += [
                Heading(f"Longer contexts: {label}"),
                Plot(
                    f"context-{safe_name(text)}",
                    figures.loss_against_context(text, label, runs),
                    f"Bits per byte of {label} by context length. They are measured on other "
                    "tokens than the validation loss. Models with learned positions are limited "
                    "to the context length of training.",
                ),
                table,
            ]
        elif text != OWN_TEXT:  # the summary table already shows the loss on a run's training text
            blocks += [Heading(f"Bits per byte of {text}"), table]
    if any(run.benchmarks for run in runs):
        blocks += [
            Heading("Benchmarks"),
            benchmarks_table(groups),
            *differences_blocks(
                {
                    task: {
                        name: {
                            run.seed: run.benchmarks[task]
                            for run in group
                            if task in run.benchmarks
                        }
                        for name, group in groups.items()
                    }
                    for task in benchmark_names(groups)
                },
                reference,
            ),
        ]
    if with_experts := [group[0] for group in groups.values() if group[0].expert_load]:
        blocks += [
            Heading("Load of experts"),
            *(
                Plot(
                    f"experts-{safe_name(run.name)}",
                    figures.expert_load(run),
                    f"{run.name}, seed {run.seed}: tokens per expert in the last logged step, "
                    "relative to the block's mean.",
                )
                for run in with_experts
            ),
        ]
    if len(groups) < len(runs):
        blocks += [
            Heading("Speed and memory"),
            Paragraph("Medians over the seeds (quartiles)."),
            speed_table(groups),
        ]
    return [*blocks, Heading("Parameters by component"), components_table(groups)]


def contexts_table(groups: dict[str, list[Run]], text: str) -> Table:
    found = {name: aggregation.bits_by_context(group, text) for name, group in groups.items()}
    lengths = sorted({length for row in found.values() for length in row})
    return spread_table(groups, found, {length: f"context {length:,}" for length in lengths})


def benchmark_names(groups: dict[str, list[Run]]) -> list[str]:
    return list(
        dict.fromkeys(task for group in groups.values() for run in group for task in run.benchmarks)
    )


def benchmarks_table(groups: dict[str, list[Run]]) -> Table:
    def cell(group: list[Run], task: str) -> str:
        scores = [run.benchmarks[task] for run in group if task in run.benchmarks]
        return format_spread(aggregation.spread(scores), len(group))

    return Table(
        ("task", *groups),
        tuple(
            (task, *(cell(group, task) for group in groups.values()))
            for task in benchmark_names(groups)
        ),
    )


def speed_values(group: list[Run]) -> dict[str, list[float | None]]:
    """Returns {column of SPEEDS: one value per run}."""
    has_one_end = len({run.last and run.last.step for run in group}) == 1
    return dict(
        zip(
            SPEEDS,
            (
                [run.tokens_per_second for run in group],
                [run.last and run.last.seconds for run in group] if has_one_end else [],
                [run.memory_bytes and run.memory_bytes / 1e6 for run in group],
                [(ms := costs.step_ms(run.inference, batch=1)) and 1000 / ms for run in group],
            ),
        )
    )


def speed_table(groups: dict[str, list[Run]]) -> Table:
    def cell(values: list[float | None], form: str) -> str:
        if (found := aggregation.quartiles(values)) is None:
            return MISSING
        median, low, high = (found[key] for key in ("median", "low", "high"))
        return (
            format(median, form)
            if format(low, form) == format(high, form)
            else with_range(median, low, high, form)
        )

    return Table(
        ("run", "seeds", *SPEEDS),
        tuple(
            (
                name,
                f"{len(group)}",
                *(cell(values, SPEEDS[column]) for column, values in speed_values(group).items()),
            )
            for name, group in groups.items()
        ),
    )


def components_table(groups: dict[str, list[Run]]) -> Table:
    parts = list(dict.fromkeys(part for group in groups.values() for part in group[0].components))
    return Table(
        ("run", *parts, "total"),
        tuple(
            (
                name,
                *(
                    f"{group[0].components[part]:,}" if part in group[0].components else MISSING
                    for part in parts
                ),
                f"{group[0].parameters:,}",
            )
            for name, group in groups.items()
        ),
    )


def spread_table(
    groups: dict[str, list[Run]], found: dict[str, dict[Any, Spread]], heads: dict[Any, str]
) -> Table:
    """Returns one row per model with `found`, {model: {measure: spread}}, under `heads`, {measure:
    text}.
    """
    return Table(
        ("run", *heads.values()),
        tuple(
            (name, *(format_spread(row.get(measure), len(groups[name])) for measure in heads))
            for name, row in found.items()
        ),
    )


def format_spread(numbers: Spread | None, seeds: int = 1) -> str:
    """Returns text such as '1.2345 (1.2300 to 1.2390), 2 of 3 seeds'; the end only if seeds lack
    the number.
    """
    if numbers is None:
        return MISSING
    mean = (
        f"{numbers.mean:.4f}"
        if numbers.count == 1
        else with_range(numbers.mean, numbers.low, numbers.high)
    )
    return mean + f", {numbers.count} of {seeds} seeds" * (numbers.count < seeds)


def differences_blocks(measures: Mapping[str, statistics.Losses], reference: str) -> list:
    """Returns blocks with the paired differences of {measure: {name: {seed: value}}} to the
    reference, if any.
    """
    rows = [
        (measure, row)
        for measure, values in measures.items()
        if reference in values
        for row in statistics.compare_pairs(
            values, [(name, reference) for name in values if name != reference]
        )
        if row.half_width is not None
    ]
    if not rows:
        return []
    head = ("measure", "run", "difference", "95% interval", "seeds", "p", "verdict")
    return [
        Paragraph(
            f"Against {reference}, paired by seed; p with Holm's correction for the runs of a "
            "measure:"
        ),
        Table(
            head,
            tuple(
                (
                    measure,
                    row.name,
                    f"{row.mean:+.4f}",
                    format_interval(row),
                    f"{row.seeds}",
                    f"{row.p_value:.2g}",
                    row.verdict,
                )
                for measure, row in rows
            ),
        ),
    ]


def format_interval(difference: Difference) -> str:
    if difference.half_width is None:
        return MISSING
    return f"{difference.mean - difference.half_width:+.4f} to {difference.mean + difference.half_width:+.4f}"
