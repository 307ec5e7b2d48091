"""Sections of a report on the loss: warnings, the ranking, differences over seeds, horizons,
learning rates.
"""

import math
from collections.abc import Mapping, Sequence

from smallgpt_jax.comparison import aggregation, figures
from smallgpt_jax.comparison.aggregation import Ranking
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Plot, Table
from smallgpt_jax.comparison.learning_rates import Grid, format_multiple
from smallgpt_jax.comparison.measurement_report import (
    SPEEDS,
    format_interval,
    format_spread,
    speed_values,
)
from smallgpt_jax.comparison.results import ROWS, Run
from smallgpt_jax.comparison.statistics import MAX_SEEDS, Difference
from smallgpt_jax.formatting import millions

COMPUTE_OPTIMAL = 20  # tokens per parameter (Hoffmann et al., arXiv 2203.15556)
UNCOUNTED = 1.05  # ratio of the work of two runs at equal FLOPs above which the report warns


def ranking_blocks(
    runs: Sequence[Run], groups: dict[str, list[Run]], order: Ranking, grids: dict[str, Grid]
) -> list:
    """`groups` are the runs of horizon 1."""
    full = [run for group in groups.values() for run in group]
    conclusions = [conclusion(groups, order), evidence(groups)] if len(groups) > 1 else []
    return [
        *map(Paragraph, [*warnings(runs), *grid_warnings(grids, full), *conclusions]),
        summary_table(groups, order),
        Paragraph(legend(full, order)),
    ]


def conclusion(groups: Mapping[str, list[Run]], ranking: Ranking) -> str:
    if len(aggregation.last_losses(groups)) < 2:
        return "Fewer than two runs are finished: no ranking."
    if not ranking.means:
        return "The losses of the finished runs are means over different rows, or of different objectives: no ranking."
    first, second, *others = ranking.means
    text = (
        f"Lowest validation loss: {first}, {ranking.means[first]:.4f}; then {second}, "
        f"{ranking.means[second]:.4f}. "
    )
    difference = ranking.neighbors[0]
    if difference.p_value is None:
        count = "one common seed" if difference.seeds == 1 else "no common seed"
        return text + f"With {count}, there is no interval: the order may be chance."
    text += (
        f"{second} minus {first}: {format_difference(difference)} (95% interval over "
        f"{difference.seeds} seeds), "
        f"{difference.verdict}" + needed_text(difference) + "."
    )
    if not others:
        return text
    if not ranking.not_distinguishable:
        return text + f" {first} is lower than every other run."
    higher = [name for name in (second, *others) if name not in ranking.not_distinguishable]
    return (
        text
        + f" Not distinguishable from {first}: {', '.join(ranking.not_distinguishable)}."
        + (f" Higher: {', '.join(higher)}." if higher else "")
    )


def evidence(groups: Mapping[str, list[Run]]) -> str:
    """Returns text about the tokens per run and per parameter: the order of short runs proves
    little.
    """
    trained = [
        (run.last.tokens, run.active_parameters)
        for group in groups.values()
        for run in group
        if run.last
    ]
    if not trained:
        return "No evidence: no run was evaluated."
    tokens, per_parameter = (
        min(tokens for tokens, _ in trained),
        min(tokens / size for tokens, size in trained),
    )
    text = (
        f"vidence: at least {tokens:,} tokens per run and {per_parameter:.2g} tokens per parameter."
    )
    if is_short := per_parameter < COMPUTE_OPTIMAL:
        text += (
            f" About {COMPUTE_OPTIMAL} per parameter are compute-optimal (Hoffmann et al., arXiv "
            "2203.15556); after longer training, the order may be different."
        )
    losses = aggregation.last_losses(groups)
    is_single = len(losses) > 1 and len(aggregation.common_seeds(losses)) < 2
    return ("Little e" if is_short or is_single else "E") + text


def format_difference(difference: Difference) -> str:
    return f"{difference.mean:+.4f} ± {difference.half_width:.4f}"


def needed_text(difference: Difference) -> str:
    """Returns a suffix about the seeds that would decide, or "" if the verdict is lower or
    higher.
    """
    if difference.verdict != "not distinguishable":
        return ""
    if difference.seeds_needed is None:
        return f"; more than {MAX_SEEDS:,} seeds would be needed to decide"
    return f"; about {difference.seeds_needed:,} seeds would decide"


def warnings(runs: Sequence[Run]) -> list[str]:
    if not runs:
        return ["The comparison has no runs."]
    found = [
        f"{'Diverged' if run.diverged else 'Unfinished'}: {run.label}, seed {run.seed}, at step "
        f"{run.steps_done:,} of {run.config['train.steps']:,}."
        for run in runs
        if not run.is_finished
    ]
    runs = [run for run in runs if run.horizon == 1]
    found += [
        f"{run.name}, seed {run.seed}, started from an imported model, not from scratch."
        for run in runs
        if run.is_imported
    ]
    found += uncounted_work(runs)
    objectives = aggregation.objectives_of(runs)
    if len(objectives) > 1:
        found.append(
            f"The runs have different objectives ({', '.join(objectives)}): their losses are not "
            "comparable."
        )
    tokens, flops = (
        [getattr(run.last, axis) for run in runs if run.is_finished] for axis in ("tokens", "flops")
    )
    if (
        tokens
        and max(tokens) > 1.01 * min(tokens)
        and (None in flops or max(flops) > 1.01 * min(flops))
    ):
        found.append("The runs differ in tokens and in FLOPs: compare curves, not last losses.")
    if (
        len({(session["devices"], session["device"]) for run in runs for session in run.sessions})
        > 1
    ):
        found.append(
            "The runs were trained on different devices, or on different numbers of devices: "
            "their seconds and tokens/s are not comparable."
        )
    for run in runs:
        if others := sum(point.targets != run.last.targets for point in run.curve):
            found.append(
                f"{run.name}, seed {run.seed}: {others} of {len(run.curve)} evaluations used "
                "other rows than the last one and are not plotted."
            )
    if aggregation.differ_in_targets(runs):
        targets = [run.last.targets for run in runs if run.last]
        found.append(
            f"The last losses are means over different rows, {min(targets):,} to {max(targets):,} "
            "targets, and are not comparable. To evaluate a finished run again, rerun it with "
            "another config.train.eval_steps."
        )
    same = aggregation.shared_fields(runs, ROWS)
    return found + [
        f"The runs differ in config.{field}: their losses are means over different rows of the "
        "validation text."
        for field in ROWS
        if field not in same
    ]


def uncounted_work(runs: Sequence[Run]) -> list[str]:
    first = {run.name: run for run in runs}
    found = [
        f"The FLOPs of {name} are unknown: {run.flops_problem}."
        for name, run in first.items()
        if run.flops_problem
    ]
    shares = {name: run.uncounted for name, run in first.items() if run.uncounted is not None}
    if shares and 1 + max(shares.values()) > UNCOUNTED * (1 + min(shares.values())):
        listed = ", ".join(f"{share:.0%} in {name}" for name, share in shares.items())
        found.append(
            "FLOPs count only matrix products and convolutions. Other arithmetic (norms, softmax, "
            f"recurrences) comes on top: {listed}. Runs with equal FLOPs do not have equal work."
        )
    return found


def summary_table(groups: dict[str, list[Run]], order: Ranking) -> Table:
    """Returns one row per model, in ascending order of the loss; models without a comparable loss
    are last.
    """
    ranked = list(order.means)
    names = [*ranked, *(name for name in groups if name not in ranked)]
    head, rows = ["run", "validation loss"], [[name, losses_cell(groups[name])] for name in names]
    if order.against_reference:
        head.append(f"against {order.reference}")
        for row, name in zip(rows, names):
            verdict = order.verdict(name)
            row.append(
                "reference"
                if name == order.reference
                else format_verdict(verdict)
                if verdict
                else MISSING
            )
    for row, name in zip(rows, names):
        row[0] += unfinished_note(groups[name])
        row += measures(groups[name])
    return Table(
        (*head, "bits per byte", "seeds", "parameters", "FLOPs/token", *SPEEDS),
        tuple(map(tuple, rows)),
        best=0 if len(ranked) > 1 else None,
    )


def losses_cell(group: list[Run]) -> str:
    return (
        MISSING
        if unfinished_note(group)
        else format_spread(aggregation.final_spread(group, "loss"))
    )


def measures(group: list[Run]) -> tuple[str, ...]:
    """Returns the cells of a model in the summary table after those about its loss."""
    first = group[0]
    bits = None if unfinished_note(group) else aggregation.final_spread(group, "bits_per_byte")
    speeds = (aggregation.quartiles(values) for values in speed_values(group).values())
    active = f" ({millions(first.active_parameters)} active)" * (
        first.active_parameters != first.parameters
    )
    return (
        f"{bits.mean:.4f}" if bits else MISSING,
        f"{len(group)}",
        millions(first.parameters) + active,
        MISSING if first.flops_per_token is None else millions(round(first.flops_per_token)),
        *(
            format(found["median"], form) if found else MISSING
            for found, form in zip(speeds, SPEEDS.values())
        ),
    )


def unfinished_note(group: list[Run]) -> str:
    """Returns a suffix such as " (unfinished, step 400)" if a run in `group` is not finished, else
    "".
    """
    if all(run.is_finished for run in group):
        return ""
    steps = sorted({run.steps_done for run in group if not run.is_finished})
    state = "diverged" if any(run.diverged for run in group) else "unfinished"
    return f" ({state}, step {', '.join(map(str, steps))})"


def legend(runs: Sequence[Run], order: Ranking) -> str:
    has_seeds = len({run.name for run in runs}) < len(runs)
    averaged = max((run.averaged for run in runs), default=1)
    return (
        "Loss: nats per token on the validation split, "
        + (f"mean over the last {averaged} evaluations" if averaged > 1 else "after the last step")
        + has_seeds * "; mean over the seeds (lowest to highest)"
        + ". "
        + bool(order.against_reference)
        * (
            f"Against {order.reference}: from paired differences over seeds, at a level of 5% "
            "with Holm's correction; in parentheses, the number of seeds that would decide. "
        )
        + "tokens/s: training throughput without evaluation and padding, on the machine named below. Memory: per "
        "device, of the compiled training step. Decoding: of one text, with a full cache. "
        + has_seeds
        * "Speed and memory: medians over the seeds. "
        + "FLOPs: matrix products and convolutions of a training step, padding and masked attention scores "
        "included. M: millions."
    )


def format_verdict(difference: Difference) -> str:
    return difference.verdict + (
        f" (≈ {format_needed(difference)} seeds)"
        if difference.verdict == "not distinguishable"
        else ""
    )


def format_needed(difference: Difference) -> str:
    if difference.p_value is None:
        return MISSING
    return f"> {MAX_SEEDS:,}" if difference.seeds_needed is None else f"{difference.seeds_needed:,}"


def differences_table(differences: tuple[Difference, ...]) -> Table:
    return Table(
        (
            "run",
            "against",
            "difference",
            "95% interval",
            "seeds",
            "p",
            "verdict",
            "seeds to decide",
        ),
        tuple(
            (
                row.name,
                row.other,
                MISSING if row.mean is None else f"{row.mean:+.4f}",
                format_interval(row),
                f"{row.seeds}",
                MISSING if row.p_value is None else f"{row.p_value:.2g}",
                row.verdict,
                format_needed(row),
            )
            for row in differences
        ),
    )


def differences_blocks(order: Ranking) -> list:
    if not order.neighbors:
        return []
    blocks = [
        Heading("Differences over seeds"),
        Paragraph(
            "Differences of the loss, paired by seed: runs with the same seed read the same "
            "batches. 95% interval: of the mean difference, from the t-distribution. p: "
            "two-sided, with Holm's correction. Verdict: lower or higher if p is below 0.05. "
            "Seeds to decide: for 80% power at the observed difference and spread. One seed gives "
            "no interval."
        ),
    ]
    if order.against_reference:
        blocks += [
            Paragraph(
                f"Against {order.reference}, corrected for {len(order.against_reference)} "
                "comparisons:"
            ),
            differences_table(order.against_reference),
        ]
    if len(order.means) > 2 or not order.against_reference:
        count = math.comb(len(order.means), 2)
        blocks += [
            Paragraph(
                f"Neighbors in the ranking, corrected for all {count} pairs, because the losses "
                "chose the neighbors:"
            ),
            differences_table(order.neighbors),
        ]
    return blocks


def plots(groups: dict[str, list[Run]], logged: dict[str, list] | None) -> list:
    runs = [run for group in groups.values() for run in group]
    over_seeds = (len(groups) < len(runs)) * " Lines: means over seeds; bands: range over seeds."
    blocks = [
        Plot(
            f"loss-{axis}",
            figures.loss_against(axis, runs, logged if axis == "tokens" else None),
            f"Validation loss against {label}.{over_seeds}",
        )
        for axis, label in figures.AXES.items()
    ]
    if len(groups) > 1:
        blocks.append(
            Plot(
                "loss-parameters",
                figures.loss_against_parameters(runs),
                "Last validation loss against parameters, one marker per finished run.",
            )
        )
    return [Heading("Validation loss"), *blocks]


def horizon_blocks(runs: Sequence[Run]) -> list:
    horizons = sorted({run.horizon for run in runs})
    if len(horizons) < 2:
        return []
    steps = sum(run.steps_done for run in runs)
    copied = sum(run.copied_steps for run in runs)
    rows = []
    for name in aggregation.group_by_name(runs):
        groups = [
            [run for run in runs if (run.name, run.horizon) == (name, horizon)]
            for horizon in horizons
        ]
        rows.append(
            (
                name,
                *(
                    losses_cell(group) + unfinished_note(group) if group else MISSING
                    for group in groups
                ),
            )
        )
    return [
        Heading("Loss by horizon"),
        Paragraph(
            "Validation loss at the end of runs with these multiples of the steps, each with its "
            "own decay of the learning rate. The other sections contain only the longest runs. "
            "Runs with the same name and seed have their steps before a decay in common; of the "
            f"{steps:,} steps of all runs, {steps - copied:,} were trained."
        ),
        Table(("run", *(f"× {format_multiple(horizon)}" for horizon in horizons)), tuple(rows)),
    ]


def grid_blocks(grids: dict[str, Grid], runs: Sequence[Run]) -> list:
    seeds = ", ".join(map(str, sorted({grid.seed for grid in grids.values()})))
    return [
        Heading("Learning rates"),
        Paragraph(
            f"With seed {seeds}, each model was trained at several multiples of its own learning "
            "rate; with the seeds of the comparison, only at the best one. The table shows the "
            "validation loss with the seed of the grid, which is in no other section. Minimum: "
            "of the parabola in ln(learning rate) through the best rate and its neighbors. Rise: "
            "how much higher the parabola is at half and at twice that rate."
        ),
        Plot(
            "loss-learning-rate",
            figures.loss_against_learning_rate(grids, runs),
            "Validation loss against the learning rate, with the seed of the grid. Filled: best "
            "rate. Dotted: parabola. Crosses: diverged. Vertical lines: range over the seeds of "
            "the comparison.",
        ),
        grid_table(grids),
    ]


def grid_table(grids: dict[str, Grid]) -> Table:
    def cell(loss: float | None) -> str:
        return MISSING if loss is None else "diverged" if loss == math.inf else f"{loss:.4f}"

    multiples = sorted({multiple for grid in grids.values() for multiple in grid.losses})
    rows = []
    for name, grid in grids.items():
        best, minimum = MISSING, grid.minimum
        if grid.best is not None and not grid.has_diverged:
            best = f"{grid.best * grid.learning_rate:.4g} (× {format_multiple(grid.best)}" + (
                f", {grid.edge} of the grid)" if grid.edge else ")"
            )
        rows.append(
            (
                name,
                f"{grid.learning_rate:.4g}",
                *(cell(grid.losses.get(multiple)) for multiple in multiples),
                best,
                f"{minimum.multiple * grid.learning_rate:.3g}" if minimum else MISSING,
                f"{minimum.rise:+.4f}" if minimum else MISSING,
            )
        )
    return Table(
        (
            "run",
            "own learning rate",
            *(f"× {format_multiple(multiple)}" for multiple in multiples),
            "best learning rate",
            "minimum",
            "rise",
        ),
        tuple(rows),
    )


def grid_warnings(grids: dict[str, Grid], runs: Sequence[Run]) -> list[str]:
    seeds = {(run.name, run.seed) for run in runs}
    found = [
        f"{name}: seed {grid.seed} chose the learning rate and is also in the mean, which is "
        "therefore too low."
        for name, grid in grids.items()
        if (name, grid.seed) in seeds
    ]
    return found + [
        f"{name} has diverged at every learning rate of its grid."
        if grid.has_diverged
        else f"{name}: the best learning rate is the {grid.edge} of its grid; a rate beyond it may be better. To extend "
        "the grid, increase config.compare.max_added_learning_rates."
        for name, grid in grids.items()
        if grid.edge
    ]
