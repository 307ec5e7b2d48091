"""The tables of a report."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from smallgpt_jax.analysis.findings import (
    Choice,
    Contest,
    Findings,
    HeldOut,
    Measure,
    Pair,
    Rates,
    Spread,
    Standing,
)
from smallgpt_jax.analysis.record import Run, grouped
from smallgpt_jax.report import words
from smallgpt_jax.report.rendering import Table
from smallgpt_jax.report.words import MISSING

MAX_CONTENDERS = 10  # in one budget
MAX_MEASURES = 5  # in a table
MAX_FRONT = 6  # rows of a Pareto front
MEASURES = {
    "tokens_per_second": "tokens per second",
    "seconds": "seconds",
    "memory_bytes": "MB per device",
}


# ------------------------------------------------------------------ choices
def answers(choices: Sequence[Choice]) -> Table:
    """Returns a row per budget, all of one kind."""
    head = (
        f"{words.BUDGETS[choices[0].budget]}, at most",
        "model (how sure)",
        "loss (80% interval)",
        "at stake",
        "seeds to decide",
    )
    return Table(head, tuple(map(_answer, choices))).kept


def _answer(choice: Choice) -> tuple[str, ...]:
    limit = words.limit(choice.limit, choice.budget)
    if not words.is_direct(choice):
        return (limit, words.choice(choice), *[MISSING] * 3)
    possible = choice.contest.possible
    # The loss at stake and the seeds to decide need known losses.
    is_open = len(possible) > 1 and words.has_probabilities(choice.contest)
    return (
        limit,
        words.choice(choice),
        words.standing_loss(possible[0]),
        words.stake(choice.contest) if is_open else MISSING,
        _seeds(choice.contest, possible) if is_open else MISSING,
    )


def _seeds(contest: Contest, possible: Sequence[Standing]) -> str:
    pair = contest.pair(possible[1].model, possible[0].model)
    return words.seeds_needed(pair.seeds_needed)


def contenders(choice: Choice) -> Table:
    """Returns the models within a budget, lowest loss first."""
    head = ("model", "loss", "P(lowest loss)", "cost", "parameters", "tokens", "known from")
    is_known = words.has_probabilities(choice.contest)
    rows = []
    for one in shown_contenders(choice):
        rows.append(
            (
                words.names(one),
                words.standing_loss(one),
                words.percent(one.probability) if is_known else MISSING,
                MISSING if one.cost is None else words.limit(one.cost, choice.budget),
                parameters(one.parameters, one.active_parameters),
                words.amount(one.tokens),
                words.known(one),
            )
        )
    return Table(head, tuple(rows), _marked(choice)).kept


def shown_contenders(choice: Choice) -> list[Standing]:
    """Returns those with the lowest losses, and those that may be the best: one that was trained
    only with more than the budget has no loss.
    """
    standings, blockers = choice.contest.standings, choice.contest.blockers
    others = [one for one in standings[MAX_CONTENDERS:] if one.model in blockers]
    return [*standings[:MAX_CONTENDERS], *others]


def _marked(choice: Choice) -> tuple[int, ...]:
    models = [one.model for one in choice.contest.standings]
    return (models.index(choice.chosen),) if choice.chosen in models else ()


def front(choice: Choice) -> Table:
    """Returns the trained models that are best for their cost, those nearest to the limit."""

    def distance(point) -> float:
        return abs(math.log(point.cost / choice.limit))

    # The front has many points; those far from the budget answer another question.
    near = sorted(choice.front, key=distance)[:MAX_FRONT]
    rows = []
    for point in sorted(near, key=lambda point: point.cost):
        rows.append(
            (
                point.name,
                words.loss(point.loss),
                words.limit(point.cost, choice.budget),
                parameters(point.parameters, point.active_parameters),
                words.amount(point.tokens),
            )
        )
    return Table(("best for the cost", "loss", "cost", "parameters", "tokens"), tuple(rows))


def parameters(total: int, active: int) -> str:
    text = words.amount(total)
    return text if total == active else f"{text} ({words.amount(active)} active)"


# ------------------------------------------------------------------ ranking
def standings(contest: Contest, reference: str) -> Table:
    head = (
        "model",
        "loss (80% interval)",
        f"minus {reference} (95% interval)",
        "verdict",
        "P(lowest loss)",
        "seeds",
        "parameters",
    )
    rows = []
    is_contest = len(contest.standings) > 1 and words.has_probabilities(contest)
    for one in contest.standings:
        pair = _pair(contest, one.model, reference)
        rows.append(
            (
                words.names(one),
                words.standing_loss(one),
                words.difference(pair) if pair else MISSING,
                pair.verdict if pair else "reference",
                words.percent(one.probability) if is_contest else MISSING,
                str(one.seeds),
                parameters(one.parameters, one.active_parameters),
            )
        )
    marked = [number for number, one in enumerate(contest.standings) if one.model == contest.chosen]
    return Table(head, tuple(rows), tuple(marked)).kept


def neighbors(contest: Contest) -> Table:
    """Returns each model beside the one before it in the ranking."""
    pairs = []
    for first, second in itertools.pairwise(contest.standings):
        pairs.append(contest.pair(second.model, first.model))
    return pairs_table(pairs)


def pairs_table(pairs: Sequence[Pair]) -> Table:
    head = (
        "model",
        "minus",
        "difference (95% interval)",
        "P(lower)",
        "verdict",
        "seeds",
        "to decide",
    )
    rows = []
    for pair in pairs:
        rows.append(
            (
                pair.model,
                pair.other,
                words.difference(pair),
                MISSING if pair.interval is None else words.percent(pair.probability),
                pair.verdict,
                str(pair.seeds),
                words.seeds_needed(pair.seeds_needed),
            )
        )
    return Table(head, tuple(rows)).kept


def _pair(contest: Contest, model: str, other: str) -> Pair | None:
    try:
        return contest.pair(model, other)
    except KeyError:  # the model itself, or one that is not in the contest
        return None


def _by_model(columns: Mapping[str, Mapping[str, str]], models: Iterable[str] = ()) -> Table:
    """Returns a row per model and a column per key of `columns`. `models` are the first rows."""
    rows = []
    for model in dict.fromkeys(itertools.chain(models, *columns.values())):
        rows.append((model, *(column.get(model, MISSING) for column in columns.values())))
    return Table(("model", *columns), tuple(rows))


# ------------------------------------------------------------------ over budgets
def losses_by_budget(choices: Sequence[Choice]) -> Table:
    """Returns a row per model, in the order at the largest budget."""
    columns = {}
    for choice in choices:
        if words.is_direct(choice):
            losses = {one.model: words.standing_loss(one) for one in choice.contest.standings}
            columns[words.limit(choice.limit, choice.budget)] = losses
    return _by_model(columns, itertools.chain(*reversed(columns.values())))


def multipliers(findings: Findings) -> Table:
    columns: dict[str, dict[str, str]] = {}
    for one in sorted(findings.multipliers, key=lambda one: one.budget):
        columns.setdefault(words.exponent(one.budget), {})[one.model] = words.multiplier(one)
    return _by_model(columns)


def orders(findings: Findings) -> Table:
    rows = [(order.model, words.segments(order.segments)) for order in findings.orders]
    return Table(("model", f"the better of it and {findings.reference}, by FLOPs"), tuple(rows))


# ------------------------------------------------------------------ learning rates
def rates(all_rates: Sequence[Rates]) -> Table:
    multiples = sorted(set().union(*(one.grid.losses for one in all_rates)))
    columns = [f"× {multiple:g}" for multiple in multiples]
    head = ("run", "own rate", *columns, "best", "may be best", "minimum")
    rows = []
    for one in all_rates:
        losses, own_rate = one.grid.losses, one.grid.learning_rate
        plausible = [f"× {multiple:g}" for multiple in one.plausible]
        best = MISSING if one.best is None else f"{one.best * own_rate:.3g}"
        rows.append(
            (
                one.name,
                f"{own_rate:.3g}",
                *(words.loss(losses.get(multiple)) for multiple in multiples),
                f"{best}, the {one.edge} tried" if one.edge else best,
                ", ".join(plausible) or MISSING,
                MISSING if one.minimum is None else f"{one.minimum * own_rate:.3g}",
            )
        )
    return Table(head, tuple(rows)).kept


# ------------------------------------------------------------------ laws


def outcomes(held_out: HeldOut) -> Table:
    head = ("model", "tokens", "predicted (80% interval)", "trained", "error", "inside", "seeds")
    rows = []
    for one in held_out.outcomes:
        trained = [MISSING] * 4  # until the run is finished
        if one.loss is not None:
            error = f"{one.loss - one.predicted:+.3f}"
            inside = "yes" if one.is_inside else "no"
            trained = [words.loss(one.loss), error, inside, str(one.seeds)]
        predicted = f"{one.predicted:.3f} ({words.interval(one.interval)})"
        rows.append((one.model, words.amount(one.tokens), predicted, *trained))
    return Table(head, tuple(rows)).kept


# ------------------------------------------------------------------ measurements
def measures(measured: Sequence[Measure]) -> list[Table]:
    """Returns tables with a row per model and a column per measure, none of them too wide."""
    tables = []
    for start in range(0, len(measured), MAX_MEASURES):
        columns = {}
        for one in measured[start : start + MAX_MEASURES]:
            columns[_label(one)] = {name: _measure(one, name) for name in one.spreads}
        tables.append(_by_model(columns).kept)
    return tables


def _label(measure: Measure) -> str:
    name = measure.measure.replace("cache_bytes_per_token", "cache bytes per token")
    if name in MEASURES:
        return MEASURES[name]
    return name.replace("_bytes", " MB").replace("_", " ")


def _measure(measure: Measure, name: str) -> str:
    spread = measure.spreads[name]
    if measure.measure.endswith("_bytes"):
        megabytes = Spread(spread.mean / 1e6, spread.low / 1e6, spread.high / 1e6, spread.count)
        return words.spread(megabytes, ".4g")
    if measure.kind in ("answers", "benchmark", "text"):
        return words.spread(spread, ".4f")
    return words.spread(spread, ",.0f" if spread.mean >= 1000 else ".4g")


def measure_pairs(measured: Sequence[Measure]) -> Table:
    """Returns the verdicts on further measures, where seeds allow them."""
    rows = []
    for one in measured:
        for pair in one.pairs:
            if pair.interval is not None:
                label = one.measure.replace("_", " ")
                rows.append((label, pair.model, words.difference(pair), pair.verdict))
    return Table(("measure", "model", "difference (95% interval)", "verdict"), tuple(rows))


# ------------------------------------------------------------------ configs and runs
def sizes(runs: Sequence[Run]) -> Table:
    """Returns a row per name, with means over its seeds."""
    head = ("model", "parameters", "FLOPs per token", "tokens", "learning rate", "bits per byte")
    rows = []
    for name, group in grouped(runs, lambda run: run.name).items():
        first = group[0]
        bits = [run.final("bits_per_byte") for run in group if run.is_finished]
        is_known = bits and None not in bits
        rows.append(
            (
                name,
                parameters(first.parameters, first.active_parameters),
                words.amount(first.flops_per_token),
                words.amount(first.tokens),
                f"{first.learning_rate:.3g}",
                f"{statistics.fmean(bits):.4f}" if is_known else MISSING,
            )
        )
    return Table(head, tuple(rows)).kept


def components(runs: Sequence[Run]) -> Table:
    columns: dict[str, dict[str, str]] = {}
    for run in runs:
        for kind, count in run.components.items():
            columns.setdefault(kind, {})[run.name] = f"{count:,}"
    totals = {run.name: f"{run.parameters:,}" for run in runs}
    return _by_model({**columns, "total": totals}, totals)


def different_fields(runs: Sequence[Run], reference: str) -> Table:
    """Returns the fields in which the first run of a name differs from that of the reference."""
    config_of: dict[str, dict] = {}
    for run in runs:
        config_of.setdefault(run.name, run.config)
    base = config_of.get(reference, runs[0].config)
    rows = []
    for name, config in config_of.items():
        differences = []
        for field in {**base, **config}:
            value = config.get(field)
            if field != "train.seed" and repr(value) != repr(base.get(field)):
                differences.append(f"{field}={_value(value)}")
        if differences:
            rows.append((name, ", ".join(differences)))
    return Table(("model", f"differs from {reference} in"), tuple(rows))


def _value(value: Any) -> str:
    return MISSING if value is None else str(value)


def all_runs(runs: Sequence[Run]) -> Table:
    head = ("run", "seed", "steps", "last loss", "starts", "workdir")
    rows = []
    for run in runs:
        steps = f"{run.steps_done:,}"
        if not run.is_finished:
            steps += f" of {run.steps:,}"
        loss = words.loss(run.last.loss if run.last else None, 4)
        if run.diverged:
            loss = "diverged"
        starts = str(len(run.sessions))
        rows.append((run.label, str(run.seed), steps, loss, starts, run.workdir))
    return Table(head, tuple(rows))
