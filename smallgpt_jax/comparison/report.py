"""Writes reports: builds content blocks from the results of runs."""

from collections.abc import Sequence
from pathlib import Path

from smallgpt_jax.comparison import (
    aggregation,
    choice_report,
    inference_report,
    inside_report,
    loss_report,
    measurement_report,
    records,
    scaling_report,
)
from smallgpt_jax.comparison.blocks import (
    MISSING,
    Code,
    Heading,
    Paragraph,
    Plot,
    Table,
    aligned_table,
    printable_block,
    to_html,
    to_markdown,
)
from smallgpt_jax.comparison.names import RESULTS_FILE, model_of
from smallgpt_jax.comparison.records import Record
from smallgpt_jax.comparison.results import Run
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.formatting import duration, printable
from smallgpt_jax.run import plotting
from smallgpt_jax.storage.atomic import write_atomically

MAX_NAMES = 8  # in the title
# The report lists these config fields if they are equal in all runs.
SHARED = (
    "data.source",
    "data.tokenizer",
    "data.packing",
    "model.context_length",
    "train.batch_size",
    "train.steps",
    "train.eval_steps",
    "optimizer.learning_rate",
    "optimizer.decay_steps",
)


def write_report(output: Path, record: Record, logged: dict[str, list] | None = None) -> str:
    """Writes report.html, report.md, PNG plots and results.json. Returns the plain text up to the
    first table.
    """
    blocks = list(map(printable_block, report_blocks(record, logged)))
    for block in blocks:
        if isinstance(block, Plot):
            write_atomically(output / f"{block.name}.png", plotting.png(block.figure))
    records.write(record, output / RESULTS_FILE)
    write_atomically(output / "report.md", to_markdown(title_of(record), blocks))
    write_atomically(output / "report.html", to_html(title_of(record), blocks))
    first_table = next(i for i, block in enumerate(blocks) if isinstance(block, Table))
    texts = [block.text for block in blocks[:first_table] if not isinstance(block, Plot)]
    return "\n\n".join([*texts, aligned_table(blocks[first_table])])


def title_of(record: Record) -> str:
    """Returns the record's title with the names of its models, if there are several."""
    names = list(dict.fromkeys(model_of(run.name) for run in record.runs))
    others = f" and {len(names) - MAX_NAMES} others" * (len(names) > MAX_NAMES)
    return printable(record.title + f": {', '.join(names[:MAX_NAMES])}{others}" * (len(names) > 1))


def report_blocks(record: Record, logged: dict[str, list] | None) -> list:
    """Of several sizes, the sections from the ranking on contain the largest size that all models
    have.
    """
    shown, grids = records.at_one_size(record), record.grids
    runs = shown.full_runs
    groups = aggregation.group_by_name(runs)
    order = aggregation.rank(groups, shown.reference)
    answers = [*choice_report.choice_blocks(record), *scaling_report.scaling_blocks(record)]
    losses = loss_report.ranking_blocks(shown.runs, groups, order, grids)
    if records.is_scaling(record.runs):
        unfinished = sum(not run.is_finished for run in record.runs)
        size = records.largest_common_size(record.runs)
        text = (
            record.budget
            + bool(unfinished) * f" {unfinished} of {len(record.runs)} runs are unfinished."
        )
        blocks = [
            Paragraph(text),
            *answers,
            Heading(f"Ranking at {size}"),
            Paragraph(
                f"This section and the next ones are about size {size}. Their tests are corrected "
                "for the number of models and estimate each spread by itself, so with few seeds "
                "they find less than the probabilities of the first section."
            ),
            *losses,
        ]
    else:
        blocks = [Paragraph(record.budget), *losses, *answers]
    blocks += loss_report.differences_blocks(order) + loss_report.plots(groups, logged)
    blocks += loss_report.horizon_blocks(record.runs)
    if grids:
        blocks += loss_report.grid_blocks(grids, runs)
    blocks += inference_report.inference_blocks(record.runs)
    blocks += inside_report.inside_blocks(runs, shown.reference)
    blocks += measurement_report.measurement_blocks(groups, runs, shown.reference)
    of_probe = (
        tuple(f"data.{field}" for field in DataConfig.names(of_probe=True))
        if any(run.last and run.last.answers for run in runs)
        else ()
    )
    if shared := aggregation.shared_fields(runs, (*SHARED, *of_probe)) if runs else {}:
        blocks += [
            Heading("Shared config fields" if len(groups) > 1 else "Config"),
            Table(
                ("field", "value"),
                tuple(
                    (field, MISSING if value is None else str(value))
                    for field, value in shared.items()
                ),
            ),
        ]
    if fields := aggregation.different_fields(runs):
        blocks += [
            Heading("Config differences"),
            Table(
                ("field", *groups),
                tuple(
                    (
                        field,
                        *(
                            MISSING if values[name] is None else str(values[name])
                            for name in groups
                        ),
                    )
                    for field, values in fields.items()
                ),
            ),
        ]
    return [
        *blocks,
        Heading("Runs and provenance"),
        runs_table(record.runs),
        *provenance(record.runs, record.command),
    ]


def runs_table(runs: Sequence[Run]) -> Table:
    return Table(
        ("run", "seed", "steps", "last loss", "sessions", "workdir"),
        tuple(
            (
                run.label,
                str(run.seed),
                f"{run.steps_done:,}"
                + ("" if run.is_finished else f" of {run.config['train.steps']:,}"),
                f"{run.last.loss:.4f}" if run.last and run.last.loss is not None else MISSING,
                str(len(run.sessions)),
                run.workdir,
            )
            for run in runs
        ),
    )


def provenance(runs: Sequence[Run], command: str) -> list:
    sessions = [session for run in runs for session in run.sessions]
    machines = dict.fromkeys(f"{s['devices']} × {s['device']}" for s in sessions)
    versions = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in s["versions"].items()) for s in sessions
    )
    days = sorted({session["time"][:10] for session in sessions})
    seconds = sum(
        (run.last.seconds or 0) * (1 - run.copied_steps / run.last.step) for run in runs if run.last
    )
    lines = [
        f"Trained on {'; '.join(machines)}." if machines else "",
        f"Versions: {'; '.join(versions)}." if versions else "",
        f"Started {days[0]}" + (f", last resumed {days[-1]}" if days[-1] != days[0] else "") + "."
        if days
        else "",
        f"Training took {duration(seconds)} in total, without evaluation and compilation."
        if seconds
        else "",
    ]
    return [Paragraph(" ".join(filter(None, lines))), Code(command)]
