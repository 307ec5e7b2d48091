"""Writes reports: builds content blocks from the results of runs."""

import math
from collections.abc import Sequence
from pathlib import Path

from smallgpt_jax.comparison import (
    aggregation,
    choice_report,
    costs,
    figures,
    inference_report,
    inside_report,
    ranking,
    records,
    results,
    scaling_report,
)
from smallgpt_jax.comparison.aggregation import Spread
from smallgpt_jax.comparison.blocks import (
    MISSING,
    Code,
    Heading,
    Paragraph,
    Plot,
    Table,
    aligned_table,
    to_html,
    to_markdown,
)
from smallgpt_jax.comparison.learning_rates import Grid, format_multiple
from smallgpt_jax.comparison.names import RESULTS_FILE
from smallgpt_jax.comparison.ranking import Ranking
from smallgpt_jax.comparison.records import Record
from smallgpt_jax.comparison.results import OWN_TEXT, ROWS, Run
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.formatting import duration, millions, safe_name
from smallgpt_jax.run import plotting
from smallgpt_jax.storage.atomic import write_atomically

SPEEDS = {"tokens/s": ",.0f", "seconds": ",.0f", "memory MB": ",.1f", "decoding tokens/s": ",.0f"}  # {column: format}
UNCOUNTED = 1.05  # ratio of the work of two runs at equal FLOPs above which the report warns
# The report lists these config fields if they are equal in all runs.
SHARED = ("data.source", "data.tokenizer", "data.packing", "model.context_length", "train.batch_size", "train.steps",
          "train.eval_steps", "optimizer.learning_rate", "optimizer.decay_steps")


def write_report(output: Path, record: Record, logged: dict[str, list] | None = None) -> str:
    """Writes report.html, report.md, PNG plots and results.json. Returns the plain text up to the first table."""
    blocks = report_blocks(record, logged)
    for block in blocks:
        if isinstance(block, Plot):
            write_atomically(output / f"{block.name}.png", plotting.png(block.figure))
    records.write(record, output / RESULTS_FILE)
    write_atomically(output / "report.md", to_markdown(record.title, blocks))
    write_atomically(output / "report.html", to_html(record.title, blocks))
    first_table = next(i for i, block in enumerate(blocks) if isinstance(block, Table))
    texts = [block.text for block in blocks[:first_table] if not isinstance(block, Plot)]
    return "\n\n".join([*texts, aligned_table(blocks[first_table])])


def report_blocks(record: Record, logged: dict[str, list] | None) -> list:
    """Of several sizes, the sections from the ranking on contain the largest size that all models have."""
    shown, grids = records.at_one_size(record), record.grids
    runs = shown.full_runs
    groups = aggregation.group_by_name(runs)
    order = ranking.rank(groups, shown.reference)
    answers = [*choice_report.choice_blocks(record), *scaling_report.scaling_blocks(record)]
    losses = [*(Paragraph(text) for text in warnings(shown.runs) + grid_warnings(grids, runs)),
              *([Paragraph(ranking.conclusion(groups, order)), Paragraph(ranking.evidence(groups))]
                if len(groups) > 1 else []), summary_table(groups, order), Paragraph(legend(runs, order))]
    if records.is_scaling(record.runs):
        unfinished = sum(not run.is_finished for run in record.runs)
        size = records.largest_common_size(record.runs)
        text = record.budget + bool(unfinished) * f" {unfinished} of {len(record.runs)} runs are unfinished."
        blocks = [Paragraph(text), *answers, Heading(f"Ranking at {size}"),
                  Paragraph(f"This section and the next ones are about size {size}. Their tests are corrected for the "
                            "number of models and estimate each spread by itself, so with few seeds they find less "
                            "than the probabilities of the first section."), *losses]
    else:
        blocks = [Paragraph(record.budget), *losses, *answers]
    blocks += [*differences_blocks(order), Heading("Validation loss")]
    has_seeds = len(groups) < len(runs)
    blocks += [Plot(f"loss-{axis}", figures.loss_against(axis, runs, logged if axis == "tokens" else None),
                    f"Validation loss against {label}."
                    + has_seeds * " Lines: means over seeds; bands: range over seeds.")
               for axis, label in figures.AXES.items()]
    if len(groups) > 1:
        blocks.append(Plot("loss-parameters", figures.loss_against_parameters(runs),
                           "Last validation loss against parameters, one marker per finished run."))
    blocks += horizon_blocks(record.runs)
    if grids:
        blocks += grid_blocks(grids, runs)
    blocks += inference_report.inference_blocks(record) + inside_report.inside_blocks(runs, shown.reference)
    blocks += measurement_blocks(groups, runs, shown.reference)
    if has_seeds:
        blocks += [Heading("Speed and memory"), Paragraph("Medians over the seeds (quartiles)."), speed_table(groups)]
    blocks += [Heading("Parameters by component"), components_table(groups)]
    of_probe = tuple(f"data.{field}" for field in DataConfig.names(of_probe=True)) if any(
        run.last and run.last.answers for run in runs) else ()
    if shared := aggregation.shared_fields(runs, (*SHARED, *of_probe)) if runs else {}:
        blocks += [Heading("Shared config fields" if len(groups) > 1 else "Config"), Table(
            ("field", "value"), tuple((field, MISSING if value is None else str(value))
                                      for field, value in shared.items()))]
    if fields := aggregation.different_fields(runs):
        blocks += [Heading("Config differences"), differences_table(groups, fields)]
    return [*blocks, Heading("Runs and provenance"), runs_table(record.runs),
            *provenance(record.runs, record.command)]


def legend(runs: Sequence[Run], order: Ranking) -> str:
    has_seeds = len({run.name for run in runs}) < len(runs)
    averaged = max((run.averaged for run in runs), default=1)
    return ("Loss: nats per token on the validation split, "
            + (f"mean over the last {averaged} evaluations" if averaged > 1 else "after the last step")
            + has_seeds * "; mean over the seeds (lowest to highest)" + ". "
            + bool(order.against_reference) * (
                f"Against {order.reference}: from paired differences over seeds, at a level of 5% with Holm's "
                "correction; in parentheses, the number of seeds that would decide. ")
            + "tokens/s: training throughput without evaluation and padding, on the machine named below. Memory: per "
            "device, of the compiled training step. Decoding: of one text, with a full cache. "
            + has_seeds * "Speed and memory: medians over the seeds. "
            + "FLOPs: matrix products and convolutions of a training step, padding and masked attention scores "
            "included. M: millions.")


def differences_blocks(order: Ranking) -> list:
    if not order.neighbors:
        return []
    blocks = [Heading("Differences over seeds"), Paragraph(
        "Differences of the loss, paired by seed: runs with the same seed read the same batches. 95% interval: of the "
        "mean difference, from the t-distribution. p: two-sided, with Holm's correction. Verdict: lower or higher if p "
        "is below 0.05. Seeds to decide: for 80% power at the observed difference and spread. One seed gives no "
        "interval.")]
    if order.against_reference:
        blocks += [Paragraph(f"Against {order.reference}, corrected for {len(order.against_reference)} comparisons:"),
                   ranking.differences_table(order.against_reference)]
    if len(order.means) > 2 or not order.against_reference:
        count = math.comb(len(order.means), 2)
        blocks += [Paragraph(f"Neighbors in the ranking, corrected for all {count} pairs, because the losses chose "
                             "the neighbors:"),
                   ranking.differences_table(order.neighbors)]
    return blocks


def horizon_blocks(runs: Sequence[Run]) -> list:
    horizons = sorted({run.horizon for run in runs})
    if len(horizons) < 2:
        return []
    steps = sum(run.steps_done for run in runs)
    copied = sum(run.copied_steps for run in runs)
    rows = []
    for name in aggregation.group_by_name(runs):
        groups = [[run for run in runs if (run.name, run.horizon) == (name, horizon)] for horizon in horizons]
        rows.append((name, *(losses_cell(group) + unfinished_note(group) if group else MISSING for group in groups)))
    return [Heading("Loss by horizon"), Paragraph(
        "Validation loss at the end of runs with these multiples of the steps, each with its own decay of the learning "
        "rate. The other sections contain only the longest runs. Runs with the same name and seed have their steps "
        f"before a decay in common; of the {steps:,} steps of all runs, {steps - copied:,} were trained."),
        Table(("run", *(f"× {format_multiple(horizon)}" for horizon in horizons)), tuple(rows))]


def grid_blocks(grids: dict[str, Grid], runs: Sequence[Run]) -> list:
    seeds = ", ".join(map(str, sorted({grid.seed for grid in grids.values()})))
    return [Heading("Learning rates"), Paragraph(
        f"With seed {seeds}, each model was trained at several multiples of its own learning rate; with the seeds of "
        "the comparison, only at the best one. The table shows the validation loss with the seed of the grid, which is "
        "in no other section. Minimum: of the parabola in ln(learning rate) through the best rate and its neighbors. "
        "Rise: how much higher the parabola is at half and at twice that rate."),
        Plot("loss-learning-rate", figures.loss_against_learning_rate(grids, runs),
             "Validation loss against the learning rate, with the seed of the grid. Filled: best rate. Dotted: "
             "parabola. Crosses: diverged. Vertical lines: range over the seeds of the comparison."), grid_table(grids)]


def answers_blocks(groups: dict[str, list[Run]]) -> list:
    """Returns the measures of a probe's answers; [] for text."""
    found = {name: aggregation.answers(group) for name, group in groups.items()}
    measures = list(dict.fromkeys(measure for row in found.values() for measure in row))
    if not measures:
        return []
    return [Heading("Answers"), Paragraph(
        "Exact match: fraction of the validation examples without a wrong answer. Accuracy: fraction of right answers. "
        "Both after the last step. An answer is the most probable token after the inputs, among which are the right "
        "earlier answers. \"at N\": at the further length N."),
        Table(("run", *(measure.replace("_", " ") for measure in measures)), tuple(
            (name, *(format_spread(row.get(measure), len(groups[name])) for measure in measures))
            for name, row in found.items()))]


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
        blocks += [Heading("Benchmarks"), benchmarks_table(groups), *ranking.measures_blocks(
            {task: {name: {run.seed: run.benchmarks[task] for run in group if task in run.benchmarks}
                    for name, group in groups.items()} for task in benchmark_names(groups)}, reference)]
    if with_experts := [group[0] for group in groups.values() if group[0].expert_load]:
        blocks += [Heading("Load of experts"), *(Plot(
            f"experts-{safe_name(run.name)}", figures.expert_load(run),
            f"{run.name}, seed {run.seed}: tokens per expert in the last logged step, relative to the block's mean.")
            for run in with_experts)]
    return blocks


def warnings(runs: Sequence[Run]) -> list[str]:
    if not runs:
        return ["The comparison has no runs."]
    found = [f"{'Diverged' if run.diverged else 'Unfinished'}: {run.label}, seed {run.seed}, at step "
             f"{run.steps_done:,} of {run.config['train.steps']:,}." for run in runs if not run.is_finished]
    runs = [run for run in runs if run.horizon == 1]
    found += [f"{run.name}, seed {run.seed}, started from an imported model, not from scratch."
              for run in runs if run.is_imported]
    found += uncounted_work(runs)
    objectives = aggregation.objectives_of(runs)
    if len(objectives) > 1:
        found.append(f"The runs have different objectives ({', '.join(objectives)}): their losses are not comparable.")
    tokens, flops = ([getattr(run.last, axis) for run in runs if run.is_finished] for axis in ("tokens", "flops"))
    if tokens and max(tokens) > 1.01 * min(tokens) and (None in flops or max(flops) > 1.01 * min(flops)):
        found.append("The runs differ in tokens and in FLOPs: compare curves, not last losses.")
    if len({(session["devices"], session["device"]) for run in runs for session in run.sessions}) > 1:
        found.append("The runs were trained on different devices, or on different numbers of devices: their seconds "
                     "and tokens/s are not comparable.")
    for run in runs:
        if others := sum(point.targets != run.last.targets for point in run.curve):
            found.append(f"{run.name}, seed {run.seed}: {others} of {len(run.curve)} evaluations used other rows "
                         "than the last one and are not plotted.")
    if aggregation.differ_in_targets(runs):
        targets = [run.last.targets for run in runs if run.last]
        found.append(f"The last losses are means over different rows, {min(targets):,} to {max(targets):,} targets, "
                     "and are not comparable. To evaluate a finished run again, rerun it with another "
                     "config.train.eval_steps.")
    same = aggregation.shared_fields(runs, ROWS)
    return found + [f"The runs differ in config.{field}: their losses are means over different rows of the "
                    "validation text." for field in ROWS if field not in same]


def uncounted_work(runs: Sequence[Run]) -> list[str]:
    first = {run.name: run for run in runs}
    found = [f"The FLOPs of {name} are unknown: {run.flops_problem}." for name, run in first.items()
             if run.flops_problem]
    shares = {name: run.uncounted for name, run in first.items() if run.uncounted is not None}
    if shares and 1 + max(shares.values()) > UNCOUNTED * (1 + min(shares.values())):
        listed = ", ".join(f"{share:.0%} in {name}" for name, share in shares.items())
        found.append("FLOPs count only matrix products and convolutions. Other arithmetic (norms, softmax, "
                     f"recurrences) comes on top: {listed}. Runs with equal FLOPs do not have equal work.")
    return found


def grid_warnings(grids: dict[str, Grid], runs: Sequence[Run]) -> list[str]:
    seeds = {(run.name, run.seed) for run in runs}
    found = [f"{name}: seed {grid.seed} chose the learning rate and is also in the mean, which is therefore too low."
             for name, grid in grids.items() if (name, grid.seed) in seeds]
    return found + [f"{name} has diverged at every learning rate of its grid." if grid.has_diverged else
            f"{name}: the best learning rate is the {grid.edge} of its grid; a rate beyond it may be better. To extend "
            "the grid, increase config.compare.max_added_learning_rates."
            for name, grid in grids.items() if grid.edge]


def grid_table(grids: dict[str, Grid]) -> Table:
    def cell(loss: float | None) -> str:
        return MISSING if loss is None else "diverged" if loss == math.inf else f"{loss:.4f}"

    multiples = sorted({multiple for grid in grids.values() for multiple in grid.losses})
    rows = []
    for name, grid in grids.items():
        best, minimum = MISSING, grid.minimum
        if grid.best is not None and not grid.has_diverged:
            best = f"{grid.best * grid.learning_rate:.4g} (× {format_multiple(grid.best)}" + (
                f", {grid.edge} of the grid)" if grid.edge else ")")
        rows.append((name, f"{grid.learning_rate:.4g}", *(cell(grid.losses.get(multiple)) for multiple in multiples),
                     best, f"{minimum.multiple * grid.learning_rate:.3g}" if minimum else MISSING,
                     f"{minimum.rise:+.4f}" if minimum else MISSING))
    return Table(("run", "own learning rate", *(f"× {format_multiple(multiple)}" for multiple in multiples),
                  "best learning rate", "minimum", "rise"), tuple(rows))


def summary_table(groups: dict[str, list[Run]], order: Ranking) -> Table:
    """Returns one row per model, in ascending order of the loss; models without a comparable loss are last."""
    ranked = list(order.means)
    names = [*ranked, *(name for name in groups if name not in ranked)]
    head, rows = ["run", "validation loss"], [[name, losses_cell(groups[name])] for name in names]
    if order.against_reference:
        head.append(f"against {order.reference}")
        for row, name in zip(rows, names):
            verdict = order.verdict(name)
            row.append("reference" if name == order.reference else
                       ranking.format_verdict(verdict) if verdict else MISSING)
    for row, name in zip(rows, names):
        row[0] += unfinished_note(groups[name])
        row += measures(groups[name])
    return Table((*head, "bits per byte", "seeds", "parameters", "FLOPs/token", *SPEEDS), tuple(map(tuple, rows)),
                 best=0 if len(ranked) > 1 else None)


def losses_cell(group: list[Run]) -> str:
    return MISSING if unfinished_note(group) else format_spread(aggregation.final_spread(group, "loss"))


def measures(group: list[Run]) -> tuple[str, ...]:
    """Returns the cells of a model in the summary table after those about its loss."""
    first = group[0]
    bits = None if unfinished_note(group) else aggregation.final_spread(group, "bits_per_byte")
    speeds = (aggregation.quartiles(values) for values in speed_values(group).values())
    active = f" ({millions(first.active_parameters)} active)" * (first.active_parameters != first.parameters)
    return (
        f"{bits.mean:.4f}" if bits else MISSING, f"{len(group)}", millions(first.parameters) + active,
        MISSING if first.flops_per_token is None else millions(round(first.flops_per_token)),
        *(format(found.median, form) if found else MISSING for found, form in zip(speeds, SPEEDS.values())))


def unfinished_note(group: list[Run]) -> str:
    """Returns a suffix such as " (unfinished, step 400)" if a run in `group` is not finished, else ""."""
    if all(run.is_finished for run in group):
        return ""
    steps = sorted({run.steps_done for run in group if not run.is_finished})
    state = "diverged" if any(run.diverged for run in group) else "unfinished"
    return f" ({state}, step {', '.join(map(str, steps))})"


def format_spread(numbers: Spread | None, seeds: int = 1) -> str:
    """Returns text such as '1.2345 (1.2300 to 1.2390), 2 of 3 seeds'; the end only if seeds lack the number."""
    if numbers is None:
        return MISSING
    return (f"{numbers.mean:.4f}" + (f" ({numbers.low:.4f} to {numbers.high:.4f})" if numbers.count > 1 else "")
            + (f", {numbers.count} of {seeds} seeds" if numbers.count < seeds else ""))


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
        median, low, high = (format(value, form) for value in (found.median, found.low, found.high))
        return median if low == high else f"{median} ({low} to {high})"

    return Table(("run", "seeds", *SPEEDS), tuple(
        (name, f"{len(group)}", *(cell(values, SPEEDS[column]) for column, values in speed_values(group).items()))
        for name, group in groups.items()))


def contexts_table(groups: dict[str, list[Run]], text: str) -> Table:
    found = {name: aggregation.bits_by_context(group, text) for name, group in groups.items()}
    lengths = sorted({length for row in found.values() for length in row})
    return Table(("run", *(f"context {length:,}" for length in lengths)), tuple(
        (name, *(format_spread(row.get(length), len(groups[name])) for length in lengths))
        for name, row in found.items()))


def benchmark_names(groups: dict[str, list[Run]]) -> list[str]:
    return list(dict.fromkeys(task for group in groups.values() for run in group for task in run.benchmarks))


def benchmarks_table(groups: dict[str, list[Run]]) -> Table:
    def cell(group: list[Run], task: str) -> str:
        scores = [run.benchmarks[task] for run in group if task in run.benchmarks]
        return format_spread(aggregation.spread(scores), len(group))

    return Table(("task", *groups), tuple(
        (task, *(cell(group, task) for group in groups.values())) for task in benchmark_names(groups)))


def components_table(groups: dict[str, list[Run]]) -> Table:
    parts = list(dict.fromkeys(part for group in groups.values() for part in group[0].components))
    return Table(("run", *parts, "total"), tuple(
        (name, *(f"{group[0].components[part]:,}" if part in group[0].components else MISSING for part in parts),
         f"{group[0].parameters:,}") for name, group in groups.items()))


def differences_table(groups: dict[str, list[Run]], fields: dict[str, dict]) -> Table:
    return Table(("field", *groups), tuple(
        (field, *(MISSING if values[name] is None else str(values[name]) for name in groups))
        for field, values in fields.items()))


def runs_table(runs: Sequence[Run]) -> Table:
    return Table(("run", "seed", "steps", "last loss", "sessions", "workdir"), tuple(
        (run.label, str(run.seed),
         f"{run.steps_done:,}" + ("" if run.is_finished else f" of {run.config['train.steps']:,}"),
         f"{run.last.loss:.4f}" if run.last and run.last.loss is not None else MISSING,
         str(len(run.sessions)), run.workdir) for run in runs))


def provenance(runs: Sequence[Run], command: str) -> list:
    sessions = [session for run in runs for session in run.sessions]
    machines = dict.fromkeys(f"{s['devices']} × {s['device']}" for s in sessions)
    versions = dict.fromkeys(", ".join(f"{name} {version}" for name, version in s["versions"].items())
                             for s in sessions)
    days = sorted({session["time"][:10] for session in sessions})
    seconds = sum((run.last.seconds or 0) * (1 - run.copied_steps / run.last.step) for run in runs if run.last)
    lines = [f"Trained on {'; '.join(machines)}." if machines else "",
             f"Versions: {'; '.join(versions)}." if versions else "",
             f"Started {days[0]}" + (f", last resumed {days[-1]}" if days[-1] != days[0] else "") + "." if days else "",
             f"Training took {duration(seconds)} in total, without evaluation and compilation." if seconds else ""]
    return [Paragraph(" ".join(filter(None, lines))), Code(command)]
