"""The tables of a report."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from smallgpt_jax.analysis.findings import (
    Choice,
    Contest,
    Findings,
    FrontPoint,
    HeldOut,
    Measure,
    Outcome,
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
_KNOWN_FROM = {  # {`Standing.known`: cell}
    "trained": "trained",
    "interpolated": "interpolated between runs",
    "cheaper": "trained with less; more was not tried",
    "dearer": "trained only with more than the budget",
}


def _table(rows: Iterable[Mapping[str, str]], marked: Sequence[int] = ()) -> Table:
    """Returns rows of {heading: cell} as a table, without columns that are empty in all rows. Without
    rows, the table has no head.
    """
    rows = list(rows)
    head = tuple(rows[0]) if rows else ()
    cells = tuple(tuple(row.values()) for row in rows)
    return Table(head, cells, tuple(marked)).without_empty_columns


# ------------------------------------------------------------------ choices
def answers(choices: Sequence[Choice]) -> Table:
    """Returns a row per budget, all of one kind."""
    return _table(map(_answer, choices))


def _answer(choice: Choice) -> dict[str, str]:
    contest, is_direct = choice.contest, choice.is_direct
    # The loss at stake and the seeds to decide need known losses of two models.
    has_rivals = is_direct and len(contest.possible) > 1 and words.has_probabilities(contest)
    return {
        f"{words.BUDGET_NAMES[choice.budget]}, at most": words.limit(choice.limit, choice.budget),
        "model (how sure)": words.choice(choice),
        "loss (80% interval)": words.standing_loss(contest.possible[0]) if is_direct else MISSING,
        "at stake": words.stake(contest) if has_rivals else MISSING,
        "seeds to decide": words.seeds_needed(contest.seeds_needed) if has_rivals else MISSING,
    }


def contenders(choice: Choice) -> Table:
    """Returns the models within a budget, lowest loss first."""
    has_probabilities = words.has_probabilities(choice.contest)
    rows = [
        {
            "model": words.names(one),
            "loss": words.standing_loss(one),
            "P(lowest loss)": words.percent(one.probability) if has_probabilities else MISSING,
            "cost": MISSING if one.cost is None else words.limit(one.cost, choice.budget),
            "parameters": _parameters(one),
            "tokens": words.amount(one.tokens),
            "known from": _KNOWN_FROM[one.known],
        }
        for one in shown_contenders(choice)
    ]
    return _table(rows, _marked(choice.contest, choice.chosen))


def shown_contenders(choice: Choice) -> list[Standing]:
    """Returns the MAX_CONTENDERS with the lowest losses, and all that may be the best."""
    standings, blockers = choice.contest.standings, choice.contest.blockers
    others = [one for one in standings[MAX_CONTENDERS:] if one.model in blockers]
    return [*standings[:MAX_CONTENDERS], *others]


def _marked(contest: Contest, chosen: str | None) -> list[int]:
    """Returns the row of the chosen model, or none."""
    return [index for index, one in enumerate(contest.standings) if one.model == chosen]


def front(choice: Choice) -> Table:
    """Returns the trained models that are best for their cost, the MAX_FRONT nearest to the limit."""
    # Those far from the limit answer another question.
    near = sorted(choice.front, key=lambda point: abs(math.log(point.cost / choice.limit)))
    return _table(
        {
            "best for the cost": point.name,
            "loss": words.loss(point.loss),
            "cost": words.limit(point.cost, choice.budget),
            "parameters": _parameters(point),
            "tokens": words.amount(point.tokens),
        }
        for point in sorted(near[:MAX_FRONT], key=lambda point: point.cost)
    )


def _parameters(one: Standing | FrontPoint | Run) -> str:
    total, active = words.amount(one.parameters), words.amount(one.active_parameters)
    return total if one.parameters == one.active_parameters else f"{total} ({active} active)"


# ------------------------------------------------------------------ ranking
def standings(contest: Contest, reference: str) -> Table:
    """Returns a row per model, the best first, with its difference to the reference."""
    has_probabilities = words.has_probabilities(contest)
    rows = []
    for one in contest.standings:
        pair = contest.pair(one.model, reference)
        # The reference has no pair with itself, nor two models that have diverged.
        without_pair = "reference" if one.model == reference else MISSING
        rows.append(
            {
                "model": words.names(one),
                "loss (80% interval)": words.standing_loss(one),
                f"minus {reference} (95% interval)": words.difference(pair) if pair else MISSING,
                "verdict": pair.verdict if pair else without_pair,
                "P(lowest loss)": words.percent(one.probability) if has_probabilities else MISSING,
                "seeds": str(one.seeds),
                "parameters": _parameters(one),
            }
        )
    return _table(rows, _marked(contest, contest.chosen))


def neighbors(contest: Contest) -> Table:
    """Returns each model beside the one before it in the ranking."""
    rows = []
    for first, second in itertools.pairwise(contest.standings):
        pair = contest.pair(second.model, first.model)
        if pair is None:  # both have diverged
            continue
        rows.append(
            {
                "model": pair.model,
                "minus": pair.other,
                "difference (95% interval)": words.difference(pair),
                "P(lower)": MISSING if pair.interval is None else words.percent(pair.probability),
                "verdict": pair.verdict,
                "seeds": str(pair.seeds),
                "to decide": words.seeds_needed(pair.seeds_needed),
            }
        )
    return _table(rows)


def _by_model(columns: Mapping[str, Mapping[str, str]], models: Iterable[str] = ()) -> Table:
    """Returns a row per model from {heading: {model: cell}}. `models` are the first rows."""
    rows = []
    for model in dict.fromkeys(itertools.chain(models, *columns.values())):
        cells = {heading: column.get(model, MISSING) for heading, column in columns.items()}
        rows.append({"model": model, **cells})
    return _table(rows)


# ------------------------------------------------------------------ over budgets
def losses_by_budget(choices: Sequence[Choice]) -> Table:
    """Returns a row per model, in the order at the largest budget, which is the last."""
    columns = {}
    for choice in choices:
        if choice.is_direct:
            losses = {one.model: words.standing_loss(one) for one in choice.contest.standings}
            columns[words.limit(choice.limit, choice.budget)] = losses
    return _by_model(columns, itertools.chain(*reversed(columns.values())))


def multipliers(findings: Findings) -> Table:
    columns = {}
    in_order = sorted(findings.multipliers, key=lambda one: one.budget)
    for budget, group in grouped(in_order, lambda one: words.exponent(one.budget)).items():
        columns[budget] = {one.model: words.multiplier(one) for one in group}
    return _by_model(columns)


def equal_flops(findings: Findings) -> Table:
    heading = f"the better of it and {findings.reference}, by FLOPs"
    return _table(
        {"model": one.model, heading: words.segments(one.segments)} for one in findings.equal_flops
    )


# ------------------------------------------------------------------ learning rates
def rates(all_rates: Sequence[Rates]) -> Table:
    multiples = sorted(set().union(*(one.grid.losses for one in all_rates)))
    rows = []
    for one in all_rates:
        losses, own_rate = one.grid.losses, one.grid.learning_rate
        best = MISSING if one.best is None else f"{one.best * own_rate:.3g}"
        plausible = [f"× {multiple:g}" for multiple in one.plausible]
        rows.append(
            {
                "run": one.name,
                "own rate": f"{own_rate:.3g}",
                **{f"× {multiple:g}": words.loss(losses.get(multiple)) for multiple in multiples},
                "best": f"{best}, the {one.edge} tried" if one.edge else best,
                "may be best": ", ".join(plausible) or MISSING,
                "minimum": MISSING if one.minimum is None else f"{one.minimum * own_rate:.3g}",
            }
        )
    return _table(rows)


# ------------------------------------------------------------------ laws
def outcomes(held_out: HeldOut) -> Table:
    return _table(map(_outcome, held_out.outcomes))


def _outcome(one: Outcome) -> dict[str, str]:
    row = {
        "model": one.model,
        "tokens": words.amount(one.tokens),
        "predicted (80% interval)": f"{one.predicted:.3f} ({words.interval(one.interval)})",
        "trained": words.loss(one.loss),
    }
    if one.loss is None:
        return row | dict.fromkeys(("error", "inside", "seeds"), MISSING)
    return row | {
        "error": f"{one.loss - one.predicted:+.3f}",
        "inside": "yes" if one.is_inside else "no",
        "seeds": str(one.seeds),
    }


# ------------------------------------------------------------------ measurements
def measures(measured: Sequence[Measure]) -> list[Table]:
    """Returns tables with a row per model and a column per measure, none of them too wide."""
    tables = []
    for start in range(0, len(measured), MAX_MEASURES):
        columns = {}
        for one in measured[start : start + MAX_MEASURES]:
            columns[_label(one)] = {name: _measure(one, name) for name in one.spreads}
        tables.append(_by_model(columns))
    return tables


def _label(measure: Measure) -> str:
    """Returns the heading of a measure, with its unit."""
    if measure.measure == "memory_bytes":
        return "MB per device"
    name = measure.measure.replace("cache_bytes_per_token", "cache bytes per token")
    return name.replace("_bytes", " MB").replace("_", " ")


def _measure(measure: Measure, name: str) -> str:
    """Returns the cell of a name, in as many digits as its kind of measure deserves."""
    spread = measure.spreads[name]
    if measure.measure.endswith("_bytes"):
        megabytes = Spread(spread.mean / 1e6, spread.low / 1e6, spread.high / 1e6)
        return words.spread(megabytes, ".4g")
    if measure.kind in ("answers", "benchmark", "text"):
        return words.spread(spread, ".4f")
    return words.spread(spread, ",.0f" if spread.mean >= 1000 else ".4g")


def measure_pairs(measured: Sequence[Measure]) -> Table:
    """Returns the verdicts on further measures, where seeds allow them."""
    return _table(
        {
            "measure": one.measure.replace("_", " "),
            "model": pair.model,
            "difference (95% interval)": words.difference(pair),
            "verdict": pair.verdict,
        }
        for one in measured
        for pair in one.pairs
        if pair.interval is not None
    )


# ------------------------------------------------------------------ configs and runs
def sizes(runs: Sequence[Run]) -> Table:
    """Returns a row per name, with means over its seeds."""
    rows = []
    for name, group in grouped(runs, lambda run: run.name).items():
        first = group[0]
        bits = [run.final("bits_per_byte") for run in group if run.is_finished]
        has_bits = bits and None not in bits
        rows.append(
            {
                "model": name,
                "parameters": _parameters(first),
                "FLOPs per token": words.amount(first.flops_per_token),
                "tokens": words.amount(first.tokens),
                "learning rate": f"{first.learning_rate:.3g}",
                "bits per byte": f"{statistics.fmean(bits):.4f}" if has_bits else MISSING,
            }
        )
    return _table(rows)


def components(runs: Sequence[Run]) -> Table:
    """Returns the parameters of each model by component."""
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
                differences.append(f"{field}={MISSING if value is None else value}")
        if differences:
            rows.append({"model": name, f"differs from {reference} in": ", ".join(differences)})
    return _table(rows)


def all_runs(runs: Sequence[Run]) -> Table:
    return _table(map(_run, runs))


def _run(run: Run) -> dict[str, str]:
    steps = f"{run.steps_done:,}" if run.is_finished else f"{run.steps_done:,} of {run.steps:,}"
    last = words.loss(run.last.loss if run.last else None, 4)
    return {
        "run": run.label,
        "seed": str(run.seed),
        "steps": steps,
        "last loss": "diverged" if run.diverged else last,
        "starts": str(len(run.sessions)),
        "workdir": run.workdir,
    }
