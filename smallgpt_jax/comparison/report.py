"""Writes reports: builds content blocks from the results of runs."""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smallgpt_jax.comparison import aggregation, figures, results
from smallgpt_jax.comparison.aggregation import Spread
from smallgpt_jax.comparison.blocks import Code, Heading, Paragraph, Plot, Table, aligned_table, to_html, to_markdown
from smallgpt_jax.comparison.learning_rates import Grid, format_multiple
from smallgpt_jax.comparison.results import OWN_TEXT, Run
from smallgpt_jax.formatting import duration, millions
from smallgpt_jax.run import plotting
from smallgpt_jax.storage.files import safe_name, write_atomically

MISSING = "–"
UNCOUNTED = 1.05  # ratio of the work of two runs at equal FLOPs above which the report warns
# The report lists these config fields if they are equal in all runs.
SHARED = ("data.source", "data.tokenizer", "data.packing", "model.context_length", "train.batch_size", "train.steps",
          "train.eval_steps", "optimizer.learning_rate", "optimizer.decay_steps")
COMPUTE_OPTIMAL = 20  # tokens per parameter (Hoffmann et al., arXiv 2203.15556)
# The config fields that determine the validation rows.
ROWS = ("model.context_length", "data.packing", "data.separate_documents")


def write_report(output: Path, runs: Sequence[Run], about: dict[str, Any], logged: dict[str, list] | None = None,
                 grids: dict[str, Grid] | None = None) -> str:
    """Writes report.html, report.md with its PNG plots, and results.json into the folder `output`.

    `about` has the keys "title", "budget" (a sentence about the budget of the runs) and "command" (the command that
    repeats the comparison). `logged` contains additional curves for the plot of the loss against tokens. `grids`
    maps the names of the runs to their learning-rate grids. With grids, `runs` are the runs at the best learning rates.

    Returns the report as plain text, up to and including the first table.
    """
    blocks = report_blocks(runs, about, logged, grids or {})
    for block in blocks:
        if isinstance(block, Plot):
            write_atomically(output / f"{block.name}.png", plotting.png(block.figure))
    write_atomically(output / results.RESULTS_FILE, json.dumps(
        {**about, **({"learning_rates": {name: grid_facts(grid) for name, grid in grids.items()}} if grids else {}),
         "runs": [dataclasses.asdict(run) for run in runs]}, indent=1) + "\n")
    write_atomically(output / "report.md", to_markdown(about["title"], blocks))
    write_atomically(output / "report.html", to_html(about["title"], blocks))
    first_table = next(i for i, block in enumerate(blocks) if isinstance(block, Table))
    return "\n\n".join([*(block.text for block in blocks[:first_table]), aligned_table(blocks[first_table])])


def report_blocks(runs: Sequence[Run], about: dict, logged: dict[str, list] | None, grids: dict[str, Grid]) -> list:
    groups = aggregation.group_by_name(runs)
    blocks = [Paragraph(about["budget"]), *(Paragraph(text) for text in warnings(runs) + grid_warnings(grids)),
              *([Paragraph(conclusion(groups)), Paragraph(evidence(groups))] if len(groups) > 1 else []),
              summary_table(groups)]
    has_seeds = len(groups) < len(runs)
    blocks += [Paragraph(
        "Loss: nats per token on the validation split after the last step"
        + has_seeds * "; mean over the seeds (lowest to highest)"
        + ". tokens/s: training throughput without evaluation and padding, on the machine named below. "
        "Memory: per device, of the compiled training step. "
        "FLOPs: matrix products and convolutions of a training step, padding and masked attention scores included. M: "
        "millions."),
        Heading("Validation loss")]
    blocks += [Plot(f"loss-{axis}", figures.loss_against(axis, runs, logged if axis == "tokens" else None),
                    f"Validation loss against {label}."
                    + has_seeds * " Lines: means over seeds; bands: range over seeds.")
               for axis, label in figures.AXES.items()]
    if len(groups) > 1:
        blocks.append(Plot("loss-parameters", figures.loss_against_parameters(runs),
                           "Last validation loss against parameters, one marker per finished run."))
    if grids:
        blocks += [Heading("Learning rates"), Paragraph(
            f"With seed {min(run.seed for run in runs)}, each run was trained at several multiples of its own learning "
            "rate; with the other seeds, only at the best one. The table shows the validation loss after the last step "
            "with this seed. All other sections use only the runs at the best learning rate."),
            Plot("loss-learning-rate", figures.loss_against_learning_rate(grids, runs),
                 "Validation loss against the learning rate, with one seed. Filled: best rate. Crosses: diverged. "
                 "Vertical lines: range over seeds at the best rate."), grid_table(grids)]
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
        blocks += [Heading("Benchmarks"), benchmarks_table(groups)]
    if with_experts := [group[0] for group in groups.values() if group[0].expert_load]:
        blocks += [Heading("Load of experts"), *(Plot(
            f"experts-{safe_name(run.name)}", figures.expert_load(run),
            f"{run.name}, seed {run.seed}: tokens per expert in the last logged step, relative to the block's mean.")
            for run in with_experts)]
    blocks += [Heading("Parameters by component"), components_table(groups)]
    if shared := aggregation.shared_fields(runs, SHARED):
        blocks += [Heading("Shared config fields" if len(groups) > 1 else "Config"), Table(
            ("field", "value"), tuple((field, MISSING if value is None else str(value))
                                      for field, value in shared.items()))]
    if fields := aggregation.different_fields(runs):
        blocks += [Heading("Config differences"), differences_table(groups, fields)]
    return [*blocks, Heading("Runs and provenance"), runs_table(runs), *provenance(runs, about)]


def warnings(runs: Sequence[Run]) -> list[str]:
    """Returns warnings about runs that are incomplete or not comparable."""
    found = [f"{'Diverged' if run.diverged else 'Unfinished'}: {run.name}, seed {run.seed}, at step "
             f"{run.steps_done:,} of {run.config['train.steps']:,}." for run in runs if not run.is_finished]
    found += [f"{run.name}, seed {run.seed}, started from an imported model, not from scratch."
              for run in runs if run.is_imported]
    found += uncounted_work(runs)
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
    """Returns warnings about runs with unknown FLOPs, and about unequal work that FLOPs do not count."""
    first = {run.name: run for run in runs}
    found = [f"The FLOPs of {name} are unknown: {run.flops_problem}." for name, run in first.items()
             if run.flops_problem]
    shares = {name: run.uncounted for name, run in first.items() if run.uncounted is not None}
    if shares and 1 + max(shares.values()) > UNCOUNTED * (1 + min(shares.values())):
        listed = ", ".join(f"{share:.0%} in {name}" for name, share in shares.items())
        found.append("FLOPs count only matrix products and convolutions. Other arithmetic (norms, softmax, "
                     f"recurrences) comes on top: {listed}. Runs with equal FLOPs do not have equal work.")
    return found


def grid_warnings(grids: dict[str, Grid]) -> list[str]:
    """Returns warnings about models whose best learning rate may lie outside their grid."""
    return [f"{name} has diverged at every learning rate of its grid." if grid.has_diverged else
            f"{name}: the best learning rate is the {grid.edge} of its grid; a rate beyond it may be better. To extend "
            "the grid, increase config.compare.max_added_learning_rates."
            for name, grid in grids.items() if grid.edge]


def grid_table(grids: dict[str, Grid]) -> Table:
    """Returns a table of the last validation loss at each multiple of the models' own learning rates."""
    def cell(loss: float | None) -> str:
        return MISSING if loss is None else "diverged" if loss == math.inf else f"{loss:.4f}"

    multiples = sorted({multiple for grid in grids.values() for multiple in grid.losses})
    rows = []
    for name, grid in grids.items():
        best = MISSING
        if grid.best is not None and not grid.has_diverged:
            best = f"{grid.best * grid.learning_rate:.4g} (× {format_multiple(grid.best)}" + (
                f", {grid.edge} of the grid)" if grid.edge else ")")
        rows.append((name, f"{grid.learning_rate:.4g}", *(cell(grid.losses.get(multiple)) for multiple in multiples),
                     best))
    return Table(("run", "own learning rate", *(f"× {format_multiple(multiple)}" for multiple in multiples),
                  "best learning rate"), tuple(rows))


def grid_facts(grid: Grid) -> dict[str, Any]:
    """Returns the content of a grid for results.json. The loss of a diverged run is None, which JSON writes as null."""
    return {"best": None if grid.has_diverged else grid.best, "edge": grid.edge, "rates": [
        {"multiple": multiple, "learning_rate": multiple * grid.learning_rate,
         "loss": None if loss == math.inf else loss, "diverged": loss == math.inf}
        for multiple, loss in grid.losses.items()]}


def conclusion(groups: dict[str, list[Run]]) -> str:
    """Returns text that names the two models with the lowest loss and says whether all seeds agree on their order."""
    last_losses = finished(groups)
    if len(last_losses) < 2:
        return "Fewer than two runs are finished: no ranking."
    if not (means := mean_losses(groups)):
        return "The losses of the finished runs are means over different rows: no ranking."
    first, second, *_ = means
    text = f"Lowest validation loss: {first}, {means[first]:.4f}; then {second}, {means[second]:.4f}"
    seeds = common_seeds(last_losses)
    if len(seeds) < 2:
        return f"{text}. With fewer than two common seeds, chance cannot be ruled out."
    differences = [last_losses[second][seed] - last_losses[first][seed] for seed in seeds]
    if not any(differences):
        return f"{text}. The two losses are equal for each of the {len(seeds)} common seeds."
    lower, low, high = sum(difference > 0 for difference in differences), min(differences), max(differences)
    text = f"{text}. Of the {len(seeds)} common seeds, {first} is lower for {lower}"
    if lower == len(seeds):
        return f"{text}, by {low:.4f} to {high:.4f}."
    return f"{text}; {second} minus {first} is {low:+.4f} to {high:+.4f}."


def evidence(groups: dict[str, list[Run]]) -> str:
    """Returns text that says how much the order of the losses proves, given the tokens and the number of seeds."""
    trained = [(run.last.tokens, run.active_parameters) for group in groups.values() for run in group if run.last]
    if not trained:
        return "No evidence: no run was evaluated."
    tokens, per_parameter = min(tokens for tokens, _ in trained), min(tokens / size for tokens, size in trained)
    text = f"vidence: at least {tokens:,} tokens per run and {per_parameter:.2g} tokens per parameter."
    if is_short := per_parameter < COMPUTE_OPTIMAL:
        text += (f" About {COMPUTE_OPTIMAL} per parameter are compute-optimal (Hoffmann et al., arXiv 2203.15556); "
                 "after longer training, the order may be different.")
    last_losses = finished(groups)
    seeds = len(common_seeds(last_losses)) if len(last_losses) > 1 else 0
    if seeds > 1:
        text += (f" Two equally good models have the same order for all {seeds} seeds with a probability of "
                 f"{2 ** (1 - seeds):.2g}.")
    return ("Little e" if is_short or seeds < 5 else "E") + text


def finished(groups: dict[str, list[Run]]) -> dict[str, dict[int, float]]:
    """Returns {name: {seed: last loss}} of the models whose runs are all finished."""
    return {name: {run.seed: run.last.loss for run in group} for name, group in groups.items()
            if all(run.is_finished for run in group) and aggregation.final_spread(group, "loss")}


def common_seeds(last_losses: dict[str, dict[int, float]]) -> set[int]:
    return set.intersection(*map(set, last_losses.values())) if last_losses else set()


def mean_losses(groups: dict[str, list[Run]]) -> dict[str, float]:
    """Returns {name: mean last loss} in ascending order of the loss. Returns {} if the losses are not comparable.

    Runs with the same seed read the same batches, so the means are over the common seeds, if there are any.
    """
    last_losses = finished(groups)
    if aggregation.differ_in_targets([run for name in last_losses for run in groups[name]]):
        return {}
    seeds = common_seeds(last_losses)
    means = {name: statistics.mean(losses[seed] for seed in seeds or losses) for name, losses in last_losses.items()}
    return {name: means[name] for name in sorted(means, key=means.get)}


def summary_table(groups: dict[str, list[Run]]) -> Table:
    """Returns a table of losses, size, speed and memory, with one row per model.

    The rows are in ascending order of the loss; models without a comparable loss are last.
    """
    ranked = list(mean_losses(groups))
    rows = []
    for name in [*ranked, *(name for name in groups if name not in ranked)]:
        group, first = groups[name], groups[name][0]
        loss, bits = (None if unfinished_note(group) else aggregation.final_spread(group, field)
                      for field in ("loss", "bits_per_byte"))
        speed = aggregation.spread([run.tokens_per_second for run in group])
        seconds = aggregation.final_spread(group, "seconds")
        decoding = aggregation.spread([run.decoding and run.decoding["tokens_per_second"] for run in group])
        rows.append((
            name + unfinished_note(group), format_spread(loss), f"{bits.mean:.4f}" if bits else MISSING,
            f"{len(group)}", millions(first.parameters) + f" ({millions(first.active_parameters)} active)" * (
                first.active_parameters != first.parameters),
            MISSING if first.flops_per_token is None else millions(round(first.flops_per_token)),
            f"{speed.mean:,.0f}" if speed else MISSING, f"{seconds.mean:,.0f}" if seconds else MISSING,
            f"{first.memory_bytes / 1e6:,.1f}" if first.memory_bytes else MISSING,
            f"{decoding.mean:,.0f}" if decoding else MISSING))
    return Table(("run", "validation loss", "bits per byte", "seeds", "parameters", "FLOPs/token", "tokens/s",
                  "seconds", "memory MB", "decoding tokens/s"), tuple(rows), best=0 if len(ranked) > 1 else None)


def unfinished_note(group: list[Run]) -> str:
    """Returns a suffix such as " (unfinished, step 400)" if a run in `group` is not finished, else ""."""
    if all(run.is_finished for run in group):
        return ""
    steps = sorted({run.steps_done for run in group if not run.is_finished})
    state = "diverged" if any(run.diverged for run in group) else "unfinished"
    return f" ({state}, step {', '.join(map(str, steps))})"


def format_spread(numbers: Spread | None, seeds: int = 1) -> str:
    """Returns the mean and the range of a number over all seeds, as text: '1.2345 (1.2300 to 1.2390)'.

    `seeds` is the number of seeds. If the number is missing for some seeds, a note such as ", 2 of 3 seeds" is
    appended.
    """
    if numbers is None:
        return MISSING
    return (f"{numbers.mean:.4f}" + (f" ({numbers.low:.4f} to {numbers.high:.4f})" if numbers.count > 1 else "")
            + (f", {numbers.count} of {seeds} seeds" if numbers.count < seeds else ""))


def contexts_table(groups: dict[str, list[Run]], text: str) -> Table:
    found = {name: aggregation.bits_by_context(group, text) for name, group in groups.items()}
    lengths = sorted({length for row in found.values() for length in row})
    return Table(("run", *(f"context {length:,}" for length in lengths)), tuple(
        (name, *(format_spread(row.get(length), len(groups[name])) for length in lengths))
        for name, row in found.items()))


def benchmarks_table(groups: dict[str, list[Run]]) -> Table:
    tasks = list(dict.fromkeys(task for group in groups.values() for run in group for task in run.benchmarks))

    def cell(group: list[Run], task: str) -> str:
        scores = [run.benchmarks[task] for run in group if task in run.benchmarks]
        return format_spread(aggregation.spread(scores), len(group))

    return Table(("task", *groups), tuple(
        (task, *(cell(group, task) for group in groups.values())) for task in tasks))


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
        (run.name, str(run.seed),
         f"{run.steps_done:,}" + ("" if run.is_finished else f" of {run.config['train.steps']:,}"),
         f"{run.last.loss:.4f}" if run.last and run.last.loss is not None else MISSING,
         str(len(run.sessions)), run.workdir) for run in runs))


def provenance(runs: Sequence[Run], about: dict) -> list:
    """Returns report blocks about the training (machines, versions, dates, time) and the command of the comparison."""
    sessions = [session for run in runs for session in run.sessions]
    machines = dict.fromkeys(f"{s['devices']} × {s['device']}" for s in sessions)
    versions = dict.fromkeys(", ".join(f"{name} {version}" for name, version in s["versions"].items())
                             for s in sessions)
    days = sorted({session["time"][:10] for session in sessions})
    seconds = sum(run.last.seconds or 0 for run in runs if run.last)
    lines = [f"Trained on {'; '.join(machines)}." if machines else "",
             f"Versions: {'; '.join(versions)}." if versions else "",
             f"Started {days[0]}" + (f", last resumed {days[-1]}" if days[-1] != days[0] else "") + "." if days else "",
             f"Training took {duration(seconds)} in total, without evaluation and compilation." if seconds else ""]
    return [Paragraph(" ".join(filter(None, lines))), Code(about["command"])]
