"""Numbers and verdicts as words, the same on the page, in Markdown and on a terminal.

The functions are filters of the templates (rendering.py).
"""

import itertools
import math
from collections.abc import Sequence

from smallgpt_jax.analysis.findings import (
    Choice,
    Contest,
    Findings,
    Multiplier,
    Pair,
    Range,
    Segment,
    Spread,
    Standing,
)
from smallgpt_jax.analysis.further_runs import Cost, NextRun
from smallgpt_jax.analysis.record import grouped
from smallgpt_jax.formatting import duration

MISSING = "–"
MANY_SEEDS = 1000
UNEQUAL = 1.1  # ratio of the FLOPs of two models from which a ranking says that they differ
BUDGET_NAMES = {
    "flops": "training FLOPs",
    "seconds": "seconds of training",
    "parameters": "parameters",
    "bytes": "bytes of weights",
    "decode_ms": "ms per decoding step",
    "memory": "bytes of weights and cache",
    "training_memory": "bytes of memory per device in training",
}
# {budget: how to get a cost that was not measured}
_HOW_TO_MEASURE = {
    "flops": "ask for --seconds",
    "seconds": "train again with a smaller config.train.log_every",
    "decode_ms": "rerun the comparison with --config.compare.decoding=true",
    "memory": "rerun the comparison with --config.compare.decoding=true",
}


# ------------------------------------------------------------------ numbers
def exponent(value: float, digits: int = 3) -> str:
    """Formats 1e13 and 29300000000000 as "1e13" and "2.93e13"."""
    return f"{value:.{digits}g}".replace("e+", "e").replace("e0", "e")


def amount(value: float | None) -> str:
    """Formats a count with three digits: 45264 as "45.3 k", 9.4e6 as "9.4 M"."""
    if value is None:
        return MISSING
    # 999,700 has three digits as "1 M", not as "1e+03 k".
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def amounts(values: Range) -> str:
    return _from_to(amount(values.low), amount(values.high))


def counts(values: Range) -> str:
    return _from_to(f"{values.low:,.0f}", f"{values.high:,.0f}")


def _from_to(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def limit(value: float, budget: str) -> str:
    """Formats a limit or a cost of a kind of budget, with its unit."""
    if budget == "flops":
        return exponent(value)
    if budget == "parameters":
        return amount(value)
    if budget in ("bytes", "memory", "training_memory"):
        return f"{value / 1e6:.3g} MB"
    return f"{value:.3g} {'ms' if budget == 'decode_ms' else 's'}"


def limited(budget: str) -> str:
    """Returns what follows a limit: "training FLOPs", and "per decoding step" after "3 ms"."""
    text = BUDGET_NAMES[budget]
    return text if budget in ("flops", "parameters") else text.partition(" ")[2]


def percent(probability: float) -> str:
    if probability > 0.99:
        return "over 99%"
    return "under 1%" if probability < 0.01 else f"{probability:.0%}"


def loss(value: float | None, digits: int = 3) -> str:
    if value is None or math.isnan(value):
        return MISSING
    return "diverged" if math.isinf(value) else f"{value:.{digits}f}"


def interval(values: Range, form: str = ".3f") -> str:
    return f"{values.low:{form}} to {values.high:{form}}"


def spread(values: Spread, form: str) -> str:
    """Formats a mean, with the least and the largest value of several."""
    mean, low, high = (format(value, form) for value in (values.mean, values.low, values.high))
    return mean if low == high else f"{mean} ({low} to {high})"


def enumeration(names: Sequence[str], word: str = "and") -> str:
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# ------------------------------------------------------------------ standings and pairs
def standing_loss(standing: Standing) -> str:
    """Formats the expected loss: with its interval, or by the groups that its seeds fall into."""
    if standing.diverged:
        return f"diverged ({standing.diverged} of {plural(standing.seeds, 'seed')})"
    if standing.known == "dearer":
        return f"over {loss(standing.potential)}"
    if standing.modes:
        modes = [f"{mode.loss:.3f} in {mode.share:.0%}" for mode in standing.modes]
        return f"{standing.loss:.3f} ({enumeration(modes)} of the seeds)"
    text = loss(standing.loss)
    return f"{text} ({interval(standing.interval)})" if standing.interval else text


def names(standing: Standing) -> str:
    # No run has an interpolated size: only its model has a name.
    name = standing.model if standing.known == "interpolated" else standing.name
    if not standing.equal_to:
        return name
    return f"{name} (the same function: {', '.join(standing.equal_to)})"


def difference(pair: Pair) -> str:
    if not math.isfinite(pair.difference):
        return MISSING
    text = f"{pair.difference + 0.0:+.4f}"  # + 0.0: no "-0.0000" of a negative zero
    return text if pair.interval is None else f"{text} ({interval(pair.interval, '+.4f')})"


def seeds_needed(values: Range | None) -> str:
    """Formats the number of seeds per model that would decide."""
    if values is None:
        return MISSING
    ends = []
    for value in (values.low, values.high):
        ends.append(f"over {MANY_SEEDS:,}" if value > MANY_SEEDS else f"{math.ceil(value):,}")
    return _from_to(*ends)


# ------------------------------------------------------------------ choices
# {refusal: (in a table, as a sentence)}; "" in a table: it names the models that may be the best
_REFUSALS = {
    "few seeds": (
        "too few seeds",
        "There are too few seeds to know how much the losses vary; train more.",
    ),
    "diverged": ("", "Every model has a run that diverged."),
    "dearer": (
        "{first}, or {others} above the budget",
        "{others} may be the best, but {were} trained only with more than this budget.",
    ),
    "more training": (
        "{trained}; or {others} with more training",
        "{others} may be the best with the whole budget, but {were} trained with less.",
    ),
    "not measured": (
        "{first}, or {others} at a low enough cost",
        "{others} may be the best, but {their} {unmeasured}.",
    ),
    "no cost": ("not measured", "The {unmeasured}."),
    "nothing within": (
        "every model needs more",
        "Every model needs at least {needed:.3g} times as much.",
    ),
    "beyond": (
        "{factor:.3g} times as much as was trained",
        "It is {factor:.3g} times as much as any model was trained or measured with.",
    ),
}
_UNKNOWN_LOSSES = ("few seeds", "more training", "dearer", "not measured")


def choice(answer: Choice) -> str:
    """Returns the cell of an answer: the model or models that may be the best, or why none is chosen."""
    if answer.chosen:
        return probabilities(answer.contest)
    reason, _ = _refusal(answer)
    return f"cannot tell: {reason or probabilities(answer.contest)}"


def refusal(answer: Choice) -> str:
    """Returns a sentence about why no model is chosen; "" if several may be the best."""
    _, sentence = _refusal(answer)
    return sentence


def _refusal(answer: Choice) -> list[str]:
    """Returns [text in a table, sentence] of _REFUSALS, with names and numbers filled in."""
    possible = answer.contest.possible if answer.contest else ()
    blockers = _blockers(answer)
    first = possible[0].model if possible else ""
    trained = answer.contest.trained if answer.contest else ()
    unmeasured = f"{BUDGET_NAMES[answer.budget]} were not measured"
    if answer.budget in _HOW_TO_MEASURE:
        unmeasured += f"; {_HOW_TO_MEASURE[answer.budget]}"
    # factor = budget / nearest cost: with 0.25, the cheapest model needs 4 times as much
    values = {
        "first": first,
        "trained": with_probabilities(trained) if len(trained) > 1 else first,
        "others": enumeration(blockers, "or") if blockers else "a model",
        "were": "they were" if len(blockers) > 1 else "was",
        "their": "their" if len(blockers) > 1 else "its",
        "unmeasured": unmeasured,
        "factor": answer.factor,
        "needed": 1 / answer.factor if answer.factor else None,
    }
    return [text.format(**values) for text in _REFUSALS.get(answer.refusal, ("", ""))]


def _blockers(answer: Choice) -> tuple[str, ...]:
    """Returns the models that the refusal is about: not those whose losses at about the budget are
    known.
    """
    if answer.contest is None:
        return ()
    contest = answer.contest
    known = {"dearer": "dearer", "more training": "cheaper"}.get(answer.refusal)
    trained = {one.model for one in contest.trained}
    unknown = {one.model for one in contest.standings if one.known == known} - trained
    return tuple(model for model in contest.blockers if model in unknown) or contest.blockers


def probabilities(contest: Contest) -> str:
    """Returns "moe (93%) or llama (7%)"; without probabilities, if not all losses are known."""
    if len(contest.standings) == 1:
        return f"{contest.standings[0].model} (the only model)"
    if has_probabilities(contest):
        return with_probabilities(contest.possible)
    return enumeration([one.model for one in contest.possible], "or")


def with_probabilities(standings: Sequence[Standing]) -> str:
    return enumeration([f"{one.model} ({percent(one.probability)})" for one in standings], "or")


def has_probabilities(contest: Contest) -> bool:
    """Whether probabilities of being the best are meaningful: all losses at the budget are known, and
    there are several.
    """
    return len(contest.standings) > 1 and contest.refusal not in _UNKNOWN_LOSSES


def stake(contest: Contest) -> str:
    """Formats `Contest.at_stake`."""
    return f"{contest.at_stake:.2g}" if math.isfinite(contest.at_stake) else MISSING


def cost(value: Cost | NextRun) -> str:
    flops = "unknown FLOPs" if value.flops is None else f"about {exponent(value.flops, 2)} FLOPs"
    texts = [plural(value.runs, "run"), flops]
    if value.seconds is not None:
        texts.append(f"{duration(value.seconds)} at the speed of the record")
    return ", ".join(texts)


def unequal_flops(contest: Contest) -> str:
    """Returns the least and the most FLOPs of the models; "" if they are about equal or unknown."""
    # without diverged runs, which cost only a part
    finite = [one for one in contest.standings if one.cost and math.isfinite(one.loss)]
    trained = sorted(finite, key=lambda one: one.cost)
    if not trained:
        return ""
    least, most = trained[0], trained[-1]
    if most.cost < UNEQUAL * least.cost:
        return ""
    return f"{exponent(least.cost)} ({least.model}) to {exponent(most.cost)} ({most.model})"


# ------------------------------------------------------------------ over budgets
_REFUSED_MULTIPLIERS = {
    "not reached": "does not reach this loss",
    "from the start": "better with its least budget",
    "few seeds": "too few seeds",
    "one budget": "one budget only",
    "gap": "runs too far apart",
    "solved": "a loss of 0",
    "flat": "the loss hardly falls",
}


def multiplier(value: Multiplier) -> str:
    """Returns how many times the model's FLOPs the reference needs, or why that cannot be told."""
    if value.refusal:
        return _REFUSED_MULTIPLIERS[value.refusal]
    return f"{value.value:.2f} ({interval(value.interval, '.2f')})"


def segments(ranges: Sequence[Segment]) -> str:
    """Returns, for example, "1e15 to 3e16: gpt; 3e16 to 1e17: cannot tell". Ranges too short to show
    are left out, and their neighbours joined.
    """
    if not ranges:
        return "not trained with common budgets"
    visible = [one for one in ranges if exponent(one.low, 2) != exponent(one.high, 2)]
    texts = []
    for better, group in itertools.groupby(visible, key=lambda one: one.better):
        adjacent = list(group)
        low, high = exponent(adjacent[0].low, 2), exponent(adjacent[-1].high, 2)
        texts.append(f"{low} to {high}: {better or 'cannot tell'}")
    return "; ".join(texts)


# ------------------------------------------------------------------ selections
def by_budget(findings: Findings) -> list[tuple[str, list[Choice]]]:
    """Returns the answers by kind of budget."""
    groups = grouped(findings.choices, lambda one: one.budget)
    if len(direct_choices(findings)) < 2:
        groups.pop("flops", None)  # the ranking already answers them
    return list(groups.items())


def direct_choices(findings: Findings) -> list[Choice]:
    """Returns the answers to training FLOPs at which models were compared."""
    return [one for one in findings.choices if one.budget == "flops" and one.is_direct]


def main_choice(findings: Findings) -> Choice | None:
    """Returns the answer to the most of several training FLOPs at which models were compared."""
    choices = [one for one in direct_choices(findings) if len(one.contest.standings) > 1]
    return choices[-1] if len(choices) > 1 else None


def hours(value: float) -> str:
    """Formats hours; less than 10 with minutes."""
    return f"{value:,.0f} hours" if value >= 10 else duration(3600 * value)
