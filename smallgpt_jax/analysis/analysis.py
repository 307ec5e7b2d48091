"""`analyse`: everything that a record says, computed once."""

import functools

from smallgpt_jax.analysis import description, laws
from smallgpt_jax.analysis.candidates import (
    Contender,
    Evidence,
    are_comparable,
    evidence_of,
    is_scaling,
    longest_trained,
    size_of_most_models,
)
from smallgpt_jax.analysis.choice import default_choices
from smallgpt_jax.analysis.contest import compete
from smallgpt_jax.analysis.equal_flops import compare_at_equal_flops, find_multipliers, find_untried
from smallgpt_jax.analysis.findings import Contest, Findings
from smallgpt_jax.analysis.further_measures import find_measures
from smallgpt_jax.analysis.record import Record, model_of


def analyse(record: Record) -> Findings:
    evidence = evidence_of(record)
    # The ranking is of one size, if models were trained at several.
    size = size_of_most_models(record.runs) if is_scaling(record) else None
    model = model_of(record.reference)
    reference = f"{model}@{size}" if size else record.reference
    ranked = record.longest_runs(size or "")
    contest_at = functools.partial(_as_trained, evidence)
    choices = default_choices(evidence)
    budgets = [one.limit for one in choices if one.budget == "flops" and one.is_direct]
    return Findings(
        setup=description.describe_setup(record),
        reference=model,
        ranking=contest_at(size),
        ranked_size=size or "",
        choices=choices,
        equal_flops=compare_at_equal_flops(evidence, model),
        multipliers=find_multipliers(evidence, model, budgets),
        laws=None if size is None else laws.find_laws(record, contest_at),
        held_out=laws.check_predictions(record, contest_at),
        rates=description.describe_rates(record),
        untried=find_untried(evidence),
        measures=find_measures(ranked, reference, evidence.pair_level),
        curves=description.describe_curves(ranked),
    )


def _as_trained(evidence: Evidence, size: str | None) -> Contest | None:
    """Compares the longest runs, of a size or of all; None without runs that can be compared."""
    candidates = longest_trained(evidence.candidates)
    candidates = [one for one in candidates if size is None or one.first.size == size]
    if not candidates or not are_comparable(candidates):
        return None
    models = {one.model for one in candidates}
    contenders: list[Contender] = []
    for one in candidates:  # of several models of one function, the first stands for all
        equal = tuple(other for other in evidence.equal_to(one.model) if other in models)
        if not any(contender.model in equal for contender in contenders):
            contenders.append(Contender(one, one.losses, one.flops, equal_to=equal))
    return compete(contenders, evidence)
