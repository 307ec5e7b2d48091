"""The section of a report about what `diagnose` has measured inside the models."""

from collections.abc import Sequence

from smallgpt_jax.comparison import aggregation, figures
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Plot, Table, with_range
from smallgpt_jax.comparison.measurement_report import differences_blocks
from smallgpt_jax.comparison.results import Run
from smallgpt_jax.diagnosis import summary

STREAM_LABELS = ("similarity", "neighbours", "effective rank")  # of summary.STREAM


def inside_blocks(runs: Sequence[Run], reference: str = "") -> list:
    observed = aggregation.group_by_name(
        [run for run in runs if run.inside and run.inside["blocks"]]
    )
    groups = {name: [run.inside for run in group] for name, group in observed.items()}
    if not groups:
        return []
    return [
        Heading("Inside the models"),
        Paragraph(
            "Measured by diagnose on windows of the validation split, after the last step; means "
            "over seeds, paths and heads. Similarity of all and of adjacent tokens, and rank: "
            "after the last block. Entropy and weight on position 0: means over the blocks. "
            "Repeats: loss of tokens that follow a pair of tokens as at its last occurrence in "
            "the window (lowest to highest over the seeds). In-context score: loss late minus "
            "early in the context. Last columns: how much higher the loss is without the block "
            "that matters least, and without the one that matters most."
        ),
        Plot(
            "inside",
            figures.by_depth(groups),
            "Measures after each block. Blocks of parallel paths are averaged.",
        ),
        without_empty_columns(
            Table(
                (
                    "run",
                    *STREAM_LABELS,
                    "entropy",
                    "position 0",
                    "repeats",
                    "other tokens",
                    "in-context score",
                    "least important block",
                    "most important block",
                ),
                tuple((name, *cells(group)) for name, group in groups.items()),
            )
        ),
        *differences_blocks(
            {
                label: {
                    name: {
                        run.seed: value
                        for run in group
                        if (value := run.inside["blocks"][-1][measure]) is not None
                    }
                    for name, group in observed.items()
                }
                for measure, label in zip(summary.STREAM, STREAM_LABELS)
            },
            reference,
        ),
    ]


def without_empty_columns(table: Table) -> Table:
    kept = [i for i in range(len(table.head)) if any(row[i] != MISSING for row in table.rows)]
    head, *rows = (tuple(line[i] for i in kept) for line in (table.head, *table.rows))
    return Table(head, tuple(rows))


def cells(group: Sequence[dict]) -> tuple[str, ...]:
    def cell(values, form: str) -> str:
        found = summary.mean(values)
        return MISSING if found is None else format(found, form)

    return (
        *(
            cell((found["blocks"][-1][measure] for found in group), form)
            for measure, form in zip(summary.STREAM, (".3f", ".3f", ".1f"))
        ),
        *(
            cell((block[measure] for found in group for block in found["blocks"]), ".3f")
            for measure in summary.ATTENTION
        ),
        *(
            spread_cell([found.get(name) for found in group])
            for name in ("loss_of_repeats", "loss_of_others")
        ),
        *(
            cell((found[name] for found in group), "+.4f")
            for name in ("in_context_score", "least_important_block", "most_important_block")
        ),
    )


def spread_cell(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return MISSING
    mean = summary.mean(found)
    return with_range(mean, min(found), max(found), ".3f") if len(found) > 1 else f"{mean:.3f}"
