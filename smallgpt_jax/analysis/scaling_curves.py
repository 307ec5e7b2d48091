"""Scaling curves: the loss of a model at any training budget, between those of its candidates.

A curve is a series of candidates of one model that differ in one thing: the length of training at
one size, or the size at one number of tokens per parameter. On a curve, a loss falls nearly as a
power of the budget, so it is interpolated linearly in the logarithms of both. Nothing is
extrapolated, except for compute multipliers (`equal_flops.py`), by up to NEAR. Two models are
compared on curves that both have: otherwise, one that was trained at more sizes or lengths would look
better between those of the other.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from smallgpt_jax.analysis.candidates import Candidate, Contender
from smallgpt_jax.analysis.record import grouped

SAME_BUDGET = 1.01  # ratio up to which two budgets count as one
NEAR = 1.25  # ratio up to which a run above a budget, or a budget above all runs, is near
MAX_GAP = 8.0  # ratio of the budgets of two candidates between which losses are interpolated
SAME_RATIO = 1.1  # ratio up to which two numbers of tokens per parameter count as one
LEAST_LOSS = 1e-9  # nats; curves are of the logarithm, and tasks can be solved with a loss of 0
STEEPEST = 0.2  # no loss is expected to fall faster than with budget^-0.2; seen: 0.05 to 0.17

# ("size", SIZE), or ("ratio", number of `_ratio_groups`). Curves of two models with equal keys can be
# compared.
CurveKey = tuple[str, str | int]


class ScalingPoint(NamedTuple):
    candidate: Candidate
    cost: float
    ratio: int  # number of its group of about equal tokens per parameter


@dataclasses.dataclass(frozen=True)
class ScalingCurves:
    """The candidates of one model with finite losses, and the curves through them."""

    points: tuple[ScalingPoint, ...]  # one or more, in ascending order of the cost
    curves: dict[CurveKey, list[ScalingPoint]]  # each in ascending order of the cost

    @property
    def model(self) -> str:
        return self.points[0].candidate.model

    def at_budget(self, budget: float) -> dict[CurveKey, Contender]:
        """Returns the model at a budget, as each curve that has a loss there says."""
        contenders = {key: _at_budget(curve, budget) for key, curve in self.curves.items()}
        return {key: contender for key, contender in contenders.items() if contender}

    def losses_at(self, budget: float) -> dict[CurveKey, float]:
        return {key: contender.loss for key, contender in self.at_budget(budget).items()}

    def best_within(self, budget: float) -> ScalingPoint | None:
        """Returns the best point within the budget, which bounds the loss from above."""
        affordable = [point for point in self.points if point.cost <= SAME_BUDGET * budget]
        return min(affordable, key=lambda point: point.candidate.loss, default=None)

    def cheapest_just_above(self, budget: float) -> ScalingPoint | None:
        """Returns the cheapest point up to NEAR above, which bounds the loss from below."""
        for point in self.points:
            if SAME_BUDGET * budget < point.cost <= NEAR * budget:
                return point
        return None

    def steepest_fall(self, candidate: Candidate) -> float | None:
        """Returns the largest e of loss ∝ cost^−e from a point before the candidate; None without one
        that is further than NEAR, where luck decides.
        """
        exponents = []
        for curve in self.curves.values():
            for before, after in itertools.pairwise(curve):
                if after.candidate is candidate and after.cost > NEAR * before.cost:
                    exponents.append(exponent(before, after))
        return max(exponents, default=None)


def exponent(before: ScalingPoint, after: ScalingPoint) -> float:
    """Returns e of loss ∝ cost^−e between two points."""
    losses = [max(point.candidate.loss, LEAST_LOSS) for point in (before, after)]
    return math.log(losses[0] / losses[1]) / math.log(after.cost / before.cost)


def scaling_curves_of(
    candidates: Sequence[Candidate], cost_of: Callable[[Candidate], float | None]
) -> dict[str, ScalingCurves]:
    """Returns {model: its curves} through the candidates that have a cost and no diverged seed."""
    usable, costs = [], []
    for one in candidates:
        cost = cost_of(one)
        if cost and math.isfinite(one.loss):
            usable.append(one)
            costs.append(cost)
    ratios = _ratio_groups(usable)
    points = sorted(map(ScalingPoint, usable, costs, ratios), key=lambda point: point.cost)
    curves = {}
    for model, of_model in grouped(points, lambda point: point.candidate.model).items():
        by_size = grouped(of_model, lambda point: ("size", point.candidate.first.size))
        by_ratio = {}
        for key, group in grouped(of_model, lambda point: ("ratio", point.ratio)).items():
            by_ratio[key] = _best_of_equal_cost(group)
        curves[model] = ScalingCurves(tuple(of_model), {**by_size, **by_ratio})
    return curves


def _best_of_equal_cost(points: Sequence[ScalingPoint]) -> list[ScalingPoint]:
    """Keeps the best of points of about equal cost, such as one size at several learning rates."""
    kept: list[ScalingPoint] = []
    for point in points:
        if not kept or point.cost > SAME_BUDGET * kept[-1].cost:
            kept.append(point)
        elif point.candidate.loss < kept[-1].candidate.loss:
            kept[-1] = point
    return kept


def pair_at_budget(
    one: ScalingCurves, other: ScalingCurves, budget: float
) -> tuple[Contender, Contender] | None:
    """Returns both models at a budget, on the common curve with the lowest sum of their losses; None
    if no common curve has losses of both there.
    """
    some, others = one.at_budget(budget), other.at_budget(budget)
    pairs = [(some[key], others[key]) for key in some if key in others]
    return min(pairs, key=lambda pair: pair[0].loss + pair[1].loss, default=None)


def pair_at_nearest_budget(
    one: ScalingCurves, other: ScalingCurves, budget: float
) -> tuple[Contender, Contender] | None:
    """Returns `pair_at_budget` of the budget, or else of the nearest cost that has one."""
    costs = [point.cost for point in (*one.points, *other.points)]
    for near in sorted([budget, *costs], key=lambda cost: abs(math.log(cost / budget))):
        pair = pair_at_budget(one, other, near)
        if pair:
            return pair
    return None


def _ratio_groups(candidates: Sequence[Candidate]) -> list[int]:
    """Returns per candidate the number of its group of about equal tokens per parameter."""
    # Models of a size were trained on equal tokens with unequal parameters, so the parameters that
    # count are the median of the size.
    typical: dict[str, float] = {}  # {size: parameters}
    for size, group in grouped(candidates, lambda one: one.first.size).items():
        typical[size] = statistics.median(one.first.active_parameters for one in group)
    ratios = [one.first.tokens / typical[one.first.size] for one in candidates]
    number_of = {}  # {ratio: number of its group}
    number, lowest = 0, 0.0  # of the present group
    for ratio in sorted(ratios):
        if ratio > SAME_RATIO * lowest:  # above those of the last group
            number, lowest = number + 1, ratio
        number_of[ratio] = number
    return [number_of[ratio] for ratio in ratios]


def _at_budget(curve: Sequence[ScalingPoint], budget: float) -> Contender | None:
    """Returns the model at a budget: the point of this cost, or else interpolated between the points
    around it. None beyond the ends, and in a gap of more than MAX_GAP.
    """
    for point in curve:
        if budget / SAME_BUDGET <= point.cost <= budget * SAME_BUDGET:
            return Contender(point.candidate, point.candidate.losses, budget)
    for before, after in itertools.pairwise(curve):
        if before.cost < budget < after.cost <= MAX_GAP * before.cost:
            return interpolate(before, after, budget)
    return None


def interpolate(before: ScalingPoint, after: ScalingPoint, budget: float) -> Contender | None:
    """Returns the model at a budget on the line through two points: for each order of batches that
    both have, the loss is linear in logarithms. None if they have none in common.
    """
    # The fraction of the way from `before` to `after`: a budget of 2 between 1 and 4 is halfway.
    fraction = math.log(budget / before.cost) / math.log(after.cost / before.cost)

    def between(low: float, high: float) -> float:
        return max(low, LEAST_LOSS) ** (1 - fraction) * max(high, LEAST_LOSS) ** fraction

    some, others = before.candidate.losses, after.candidate.losses
    losses = {order: between(some[order], others[order]) for order in some if order in others}
    if not losses:
        return None
    first, second = before.candidate.first, after.candidate.first
    # The noise of two sizes is independent, so it partly cancels: halfway, (a + b) / 2 has half the
    # variance of a. Two lengths of one size share the start of their training, hence most of their
    # noise, which is taken as equal.
    is_one_size = first.name == second.name
    noise = 1.0 if is_one_size else fraction**2 + (1 - fraction) ** 2
    return Contender(
        candidate=after.candidate if fraction > 0.5 else before.candidate,
        losses=losses,
        cost=budget,
        known="interpolated",
        noise=noise,
        parameters=between(first.parameters, second.parameters),
        tokens=between(first.tokens, second.tokens),
    )
