"""`analyse`: everything that a record says, computed once."""

from smallgpt_jax.analysis import description, laws, spreads
from smallgpt_jax.analysis.candidates import (
    Evidence,
    are_comparable,
    evidence_of,
    is_scaling,
    largest_common_size,
    longest,
)
from smallgpt_jax.analysis.choice import default_choices
from smallgpt_jax.analysis.contest import Entry, compare_pairs, compete, draw_losses
from smallgpt_jax.analysis.equal_flops import find_multipliers, find_orders, find_untried
from smallgpt_jax.analysis.findings import Contest, Findings, Pair
from smallgpt_jax.analysis.record import Record


def analyse(record: Record) -> Findings:
    evidence = evidence_of(record)
    size = largest_common_size(record.runs) if is_scaling(record) else ""
    model = record.reference.partition("@")[0]

    def contest_at(at_size: str) -> Contest | None:
        return as_trained(evidence, at_size)

    found, lacking = laws.find_laws(record, contest_at) if is_scaling(record) else (None, {})
    choices = default_choices(evidence)
    budgets = [
        one.limit for one in choices if one.budget == "flops" and one.limit == one.compared_at
    ]
    ranked = [run for run in record.runs if run.horizon == 1 and (not size or run.size == size)]
    base = f"{model}@{size}" if size else record.reference

    def compare_pairs(values: description.Values) -> tuple[Pair, ...]:
        return compare_measure(values, base)

    return Findings(
        setup=description.describe_setup(record),
        reference=model,
        ranking=as_trained(evidence, size) if is_scaling(record) else as_trained(evidence),
        ranked_size=size,
        correlation=0.0,
        choices=choices,
        orders=find_orders(evidence, model),
        multipliers=find_multipliers(evidence, model, budgets),
        laws=found,
        laws_refused=lacking,
        held_out=laws.check_predictions(record, contest_at),
        rates=description.describe_rates(record),
        diverged=description.diverged_runs(record),
        untried=find_untried(evidence),
        measures=description.describe_measures(ranked, compare_pairs),
        curves=description.describe_curves(ranked),
    )


def as_trained(evidence: Evidence, size: str | None = None) -> Contest | None:
    """Returns the contest of the models' longest runs of a size; None without any, or if their
    losses cannot be compared.
    """
    candidates = longest(evidence.candidates)
    candidates = [one for one in candidates if size is None or one.first.size == size]
    if not candidates or not are_comparable([run for one in candidates for run in one.runs]):
        return None
    entries = []
    for one in candidates:
        same = [other for other in candidates if other.model in evidence.equal_to(one.model)]
        if not any(entry.candidate in same for entry in entries):
            names = tuple(other.model for other in same)
            entries.append(Entry(one, one.losses, one.flops, equal_to=names))
    return compete(entries, evidence)


def compare_measure(values: description.Values, reference: str) -> tuple[Pair, ...]:
    """Returns the verdicts on a measure, {name: {seed: value}}: each name against the reference.

    "lower" and "higher" are of the measure, whichever is better.
    """
    names = [name for name in values if name != reference]
    if reference not in values or not names:
        return ()
    losses = spreads.matrix([values[reference], *(values[name] for name in names)])
    degrees = spreads.sample_variances(losses)[1]
    prior = spreads.prior_of([losses], float(degrees.sum() - degrees.max()))
    estimate = spreads.estimate(losses, prior)
    pairs = compare_pairs((reference, *names), estimate, draw_losses(estimate))
    return tuple(pair for pair in pairs if pair.other == reference)
