"""The section of a report about what `diagnose` has measured inside the models."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from smallgpt_jax.comparison import aggregation, figures, ranking
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Plot, Table
from smallgpt_jax.comparison.results import Run
from smallgpt_jax.evaluation.inside import summary
from smallgpt_jax.run.plotting import style_axes

BY_DEPTH = {"token_similarity": "mean cosine of all tokens", "effective_rank": "effective rank of the activations",
            "entropy": "attention entropy / ln(keys)", "first_weight": "attention on position 0"}
STREAM_LABELS = ("similarity", "neighbours", "effective rank")  # of summary.STREAM
SIZE = (8.4, 6.0)  # inches


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
        Plot("inside", by_depth(groups), "Measures after each block. Blocks of parallel paths are averaged."),
        without_empty_columns(Table(
            ("run", *STREAM_LABELS, "entropy", "position 0", "repeats", "other tokens", "in-context score",
             "least important block", "most important block"),
            tuple((name, *cells(group)) for name, group in groups.items()))),
        *ranking.measures_blocks({label: {name: values_by_seed(group, measure) for name, group in observed.items()}
                                  for measure, label in zip(summary.STREAM, STREAM_LABELS)}, reference)]


def values_by_seed(group: Sequence[Run], measure: str) -> dict[int, float]:
    values = {run.seed: run.inside["blocks"][-1][measure] for run in group}
    return {seed: value for seed, value in values.items() if value is not None}


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
    return f"{summary.mean(found):.3f}" + f" ({min(found):.3f} to {max(found):.3f})" * (len(found) > 1)


def by_depth(groups: dict[str, list[dict]]) -> Figure:
    """Small multiples: one plot per measure, one line per model."""
    figure = Figure(figsize=SIZE, layout="constrained")
    plots = figure.subplots(2, 2).ravel()
    depth = max(len(found["blocks"]) for group in groups.values() for found in group)
    for style, (name, group) in zip(figures.line_styles(), groups.items()):
        for plot, measure in zip(plots, BY_DEPTH):
            values = [summary.mean(block[measure] for block in blocks)
                      for blocks in zip(*(found["blocks"] for found in group))]
            points = [(number, value) for number, value in enumerate(values) if value is not None]
            if points:
                plot.plot(*zip(*points), label=name, **style)
    for plot, label in zip(plots, BY_DEPTH.values()):
        style_axes(plot, "after block", label)
        plot.set_xlim(-0.5, depth - 0.5)
        plot.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    plots[0].legend(fontsize=8, frameon=False)
    return figure
