"""Two models at equal training FLOPs: which is better at which budget, and how much compute one
saves.

Both are read on the curves that both have (`scaling_curves.py`), so what one was not trained with
does not count.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from smallgpt_jax.analysis import spreads
from smallgpt_jax.analysis.candidates import Contender, Evidence, longest_trained
from smallgpt_jax.analysis.findings import INTERVAL, LEVEL, EqualFlops, Multiplier, Range, Segment
from smallgpt_jax.analysis.scaling_curves import (
    LEAST_LOSS,
    MAX_GAP,
    NEAR,
    SAME_BUDGET,
    CurveKey,
    ScalingCurves,
    ScalingPoint,
    exponent,
    interpolate,
    pair_at_budget,
    scaling_curves_of,
)
from smallgpt_jax.analysis.spreads import ROUNDING, Difference

_MAX_LOG_MULTIPLIER = math.log(1e6)  # of a multiplier and the ends of its interval

MIN_SEEDS = 3  # of multipliers: two seeds give only a guess of the spread (`variance_prior_of`)


def _curves_over_flops(evidence: Evidence) -> dict[str, ScalingCurves]:
    """Returns {model: loss over training FLOPs}."""
    return scaling_curves_of(evidence.candidates, lambda candidate: candidate.flops)


# ------------------------------------------------------------------ the better model
@dataclasses.dataclass(frozen=True)
class BudgetComparison:
    """Two models at one budget."""

    budget: float  # training FLOPs
    size: str  # of the nearest trained candidate
    difference: Difference  # loss of the model minus that of the reference


def compare_at_equal_flops(evidence: Evidence, reference: str) -> tuple[EqualFlops, ...]:
    """Returns one result per other model that can be compared with the reference."""
    results = []
    for curves, base in _curves_to_compare(evidence, reference):
        comparisons = _compare_at_trained_budgets(curves, base, evidence)
        results.append(_decide(curves.model, reference, comparisons, evidence))
    return tuple(results)


def _curves_to_compare(
    evidence: Evidence, reference: str
) -> list[tuple[ScalingCurves, ScalingCurves]]:
    """Returns (curves of a model, curves of the reference) per model of another function."""
    curves = _curves_over_flops(evidence)
    base = curves.get(reference)
    if base is None:
        return []
    same = {reference, *evidence.equal_to(reference)}
    return [(of_model, base) for model, of_model in curves.items() if model not in same]


def _compare_at_trained_budgets(
    curves: ScalingCurves, base: ScalingCurves, evidence: Evidence
) -> list[BudgetComparison]:
    """Returns the differences at the budgets that either was trained with, where both have losses
    on a common curve: at one size, or at one number of tokens per parameter.
    """
    if not evidence.variance_prior.is_known:
        return []  # nothing tells how far a difference is luck
    comparisons = []
    for budget in _distinct_budgets((*curves.points, *base.points)):
        pair = pair_at_budget(curves, base, budget)
        if not pair:
            continue
        difference = _compare(*pair, evidence)
        # A sequential test is one of seeds that both have.
        if difference.common_orders or not evidence.record.seeds_as_needed:
            size = pair[0].candidate.first.size
            comparisons.append(BudgetComparison(budget, size, difference))
    return comparisons


def _distinct_budgets(points: Sequence[ScalingPoint]) -> list[float]:
    """Returns the costs in ascending order, one of those that differ by less than SAME_BUDGET."""
    budgets: list[float] = []
    for cost in sorted(point.cost for point in points):
        if not budgets or cost > SAME_BUDGET * budgets[-1]:
            budgets.append(cost)
    return budgets


def _compare(one: Contender, base: Contender, evidence: Evidence) -> Difference:
    """Returns the loss of `one` minus that of `base`, below 0 if `one` is better."""
    losses = spreads.matrix([one.losses, base.losses])
    prior = evidence.variance_prior_at(base.candidate)
    return spreads.estimate(losses, prior, [one.noise, base.noise]).difference(0, 1)


def _decide(
    model: str, reference: str, comparisons: Sequence[BudgetComparison], evidence: Evidence
) -> EqualFlops:
    """Returns in which ranges of budgets one is better: where the band excludes 0."""
    # divided by the number of verdicts, so that all of this model hold together (Bonferroni)
    level = LEVEL / max(1, len(comparisons))
    differences = [one.difference for one in comparisons]
    if evidence.record.seeds_as_needed:
        # Which seeds exist depends on earlier looks at the losses, which only a sequential test
        # allows for. It is one of the mean over common orders of batches.
        half_widths = [one.half_width_at_all_looks(level) for one in differences]
        means = [one.paired for one in differences]
    else:
        half_widths = [one.half_width(1 - level) for one in differences]
        means = [one.mean for one in differences]
    verdicts, low, high = [], [], []
    for mean, half_width in zip(means, half_widths):
        better = model if mean < 0 else reference
        verdicts.append(better if abs(mean) > half_width else None)
        low.append(mean - half_width)
        high.append(mean + half_width)
    return EqualFlops(
        model=model,
        other=reference,
        segments=_segments(comparisons, verdicts),
        budgets=tuple(one.budget for one in comparisons),
        differences=tuple(means),
        low=tuple(low),
        high=tuple(high),
    )


def _segments(
    comparisons: Sequence[BudgetComparison], verdicts: Sequence[str | None]
) -> tuple[Segment, ...]:
    """Returns the ranges of budgets over which one model is better, and those between them.
    `verdicts` are the better models at the budgets of `comparisons`, None where neither is.
    """
    if not comparisons:
        return ()
    # A range needs comparisons at two sizes, if several were trained: the lengths of one size are
    # the same runs, which may all have been lucky.
    needed = min(2, len({one.size for one in comparisons}))
    first, last = comparisons[0].budget, comparisons[-1].budget
    segments: list[Segment] = []
    covered = first  # budget up to which there are segments
    for better, group in itertools.groupby(zip(comparisons, verdicts), key=lambda row: row[1]):
        adjacent = [one for one, _ in group]
        sizes = {one.size for one in adjacent}
        is_range = len(adjacent) > 1 or len(comparisons) == 1
        if better and is_range and len(sizes) >= needed:
            low, high = adjacent[0].budget, adjacent[-1].budget
            if covered < low:
                segments.append(Segment(covered, low, None))
            segments.append(Segment(low, high, better))
            covered = high
    if covered < last or not segments:
        segments.append(Segment(covered, last, None))
    return tuple(segments)


# ------------------------------------------------------------------ compute multipliers
def find_multipliers(
    evidence: Evidence, reference: str, budgets: Sequence[float]
) -> tuple[Multiplier, ...]:
    """Returns one multiplier per other model and budget; one that cannot be computed says why."""
    return tuple(
        _multiplier(curves, base, budget, evidence)
        for curves, base in _curves_to_compare(evidence, reference)
        for budget in budgets
    )


def _multiplier(
    curves: ScalingCurves, base: ScalingCurves, budget: float, evidence: Evidence
) -> Multiplier:
    """Returns FLOPs of `base` / FLOPs of `curves` at the loss of `base` with the budget."""

    def refuse(reason: str) -> Multiplier:
        return Multiplier(curves.model, base.model, budget, None, None, reason)

    for of_model in (curves, base):
        if max(map(len, of_model.curves.values())) < 2:  # no curve has two points
            return refuse("one budget")
    most_seeds = max(len(one.candidate.losses) for one in (*curves.points, *base.points))
    if not evidence.variance_prior.is_known or most_seeds < MIN_SEEDS:
        return refuse("few seeds")
    key = _best_common_key(curves, base, budget)
    if key is None:
        return refuse("gap")
    base_contender = base.at_budget(budget)[key]
    if base_contender.loss < ROUNDING:
        return refuse("solved")
    crossing = _crossing(curves.curves[key], base_contender.loss)
    if isinstance(crossing, str):
        return refuse(crossing)
    contender, fall = crossing
    # On a common curve, the model reaches this loss with another budget. There the losses differ by
    # zero ± e, the error of a paired difference. Along its curve, the loss falls by its slope per
    # logarithm of the budget, so the logarithm of the multiplier has the error e / slope: with
    # e = 0.02 and a slope of 0.4, ±5%.
    difference = _compare(contender, base_contender, evidence)
    slope = fall * contender.loss  # nats per logarithm of the budget
    center = math.log(budget / contender.cost) - difference.mean / slope
    half_width = difference.half_width(INTERVAL) / slope
    if abs(center) + half_width > _MAX_LOG_MULTIPLIER:
        return refuse("flat")
    interval = Range(math.exp(center - half_width), math.exp(center + half_width))
    return Multiplier(curves.model, base.model, budget, math.exp(center), interval, None)


def _best_common_key(curves: ScalingCurves, base: ScalingCurves, budget: float) -> CurveKey | None:
    """Returns the key of the best curve of both, on which `base` has a loss at the budget."""
    losses, base_losses = curves.losses_at(budget), base.losses_at(budget)
    # The best is that with the lowest sum of both losses, where both are known: the loss of `base`
    # alone would prefer the curve on which it had luck.
    common = {key: loss + losses[key] for key, loss in base_losses.items() if key in losses}
    possible = common or {key: loss for key, loss in base_losses.items() if key in curves.curves}
    return min(possible, key=possible.get, default=None)


def _crossing(curve: Sequence[ScalingPoint], loss: float) -> tuple[Contender, float] | str:
    """Returns the model where its curve first falls to a loss, and e of loss ∝ budget^−e there; or
    the reason why it does not (`Multiplier.refusal`).
    """
    # The first and the last two points are extended to NEAR times their budgets. Otherwise, at the
    # end of a curve only the models would have a multiplier whose losses are low by luck.
    for before, after in itertools.pairwise(curve):
        high, low = before.candidate.loss, after.candidate.loss
        if high <= low or after.cost <= SAME_BUDGET * before.cost:
            continue  # the loss does not fall here
        fall = exponent(before, after)
        # Of a nearly flat curve, the budget itself may be beyond all numbers.
        log_budget = math.log(before.cost) + math.log(high / max(loss, LEAST_LOSS)) / fall
        least = before.cost / (NEAR if before is curve[0] else 1)
        most = after.cost * (NEAR if after is curve[-1] else 1)
        if math.log(least) <= log_budget <= math.log(most):
            contender = interpolate(before, after, math.exp(log_budget))
            is_gap = contender is None or after.cost > MAX_GAP * before.cost
            return "gap" if is_gap else (contender, fall)
    return "from the start" if curve[0].candidate.loss < loss else "not reached"


# ------------------------------------------------------------------ what was not tried
def find_untried(evidence: Evidence) -> dict[str, float]:
    """Returns {MODEL@SIZE: tokens per parameter} where the longest training has the lowest loss of the
    model at these FLOPs, so that still more tokens per parameter may be better.
    """
    curves = _curves_over_flops(evidence)
    untried = {}
    for one in longest_trained(evidence.candidates):
        of_model, run = curves.get(one.model), one.first
        if of_model and math.isfinite(one.loss) and one.flops is not None:
            # at these FLOPs, of all sizes of the model, this one included
            losses = of_model.losses_at(one.flops).values()
            if one.loss <= min(losses, default=one.loss):
                untried[run.name] = run.tokens / run.active_parameters
    return untried
