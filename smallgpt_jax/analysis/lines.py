"""The loss of a model at any training budget, between those of its candidates.

A line is a series of candidates of one model that differ in one thing: the length of training at
one size, or the size at one number of tokens per parameter. On a line, a loss falls nearly as a
power of the budget, so it is interpolated linearly in the logarithms of both. Nothing is
extrapolated. Two models are compared on lines that both have: otherwise, one that was trained at
more sizes or lengths would look better between those of the other.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from smallgpt_jax.analysis.candidates import Candidate, Entry
from smallgpt_jax.analysis.record import Run, grouped

SAME_BUDGET = 1.01  # ratio up to which two budgets count as one
NEAR = 1.25  # ratio up to which a run above a budget, or a budget above all runs, is near
MAX_GAP = 8.0  # ratio of the budgets of two candidates between which losses are interpolated
SAME_RATIO = 1.1  # ratio up to which two numbers of tokens per parameter count as one
STEEPEST = 0.2  # no loss is expected to fall faster than with budget^-0.2; seen: 0.05 to 0.17

Cost = Callable[[Run], float | None]
Key = tuple[str, str | int]  # ("size", SIZE), or ("ratio", number of the group of ratios)


class Point(NamedTuple):
    candidate: Candidate
    cost: float  # median over its runs
    ratio: int  # number of its group of tokens per parameter


@dataclasses.dataclass(frozen=True)
class Lines:
    """The candidates of one model with finite losses, and the lines through them."""

    points: tuple[Point, ...]  # in ascending order of the cost
    lines: dict[Key, list[Point]]  # each in ascending order of the cost

    def at(self, budget: float) -> dict[Key, Entry]:
        """Returns what is known at a budget, on each line that is known there."""
        entries = {key: _read(line, budget) for key, line in self.lines.items()}
        return {key: entry for key, entry in entries.items() if entry}

    def losses_at(self, budget: float) -> dict[Key, float]:
        return {key: entry.loss for key, entry in self.at(budget).items()}

    def within(self, budget: float) -> Point | None:
        """Returns the best point within the budget, which bounds the loss there from above."""
        affordable = [point for point in self.points if point.cost <= SAME_BUDGET * budget]
        return min(affordable, key=lambda point: point.candidate.loss, default=None)

    def above(self, budget: float) -> Point | None:
        """Returns the cheapest point within NEAR above the budget; its loss is a lower bound for that
        at the budget.
        """
        near = [
            point for point in self.points if SAME_BUDGET * budget < point.cost <= NEAR * budget
        ]
        return near[0] if near else None

    def steepness(self, candidate: Candidate) -> float | None:
        """Returns e of loss ∝ cost^−e between the candidate and the point before it, the largest
        over its lines.
        """
        slopes = []
        for line in self.lines.values():
            for before, after in itertools.pairwise(line):
                if after.candidate is candidate and after.cost > before.cost:
                    fall = math.log(before.candidate.loss / after.candidate.loss)
                    slopes.append(fall / math.log(after.cost / before.cost))
        return max(slopes, default=None)


def lines_of(candidates: Sequence[Candidate], cost: Cost) -> dict[str, Lines]:
    """Returns {model: lines} of the candidates that have a cost and no diverged seed.

    Models have equal keys for lines of the same size, and of the same tokens per parameter of the
    size's typical model: those of a size were trained on equal tokens with unequal parameters.
    """
    usable = []
    for one in candidates:
        costs = [cost(run) for run in one.runs]
        if None not in costs and math.isfinite(one.loss) and one.loss > 0:
            usable.append((one, statistics.median(costs)))
    ratios = _ratio_groups([one for one, _ in usable])
    points = [Point(one, price, ratios[one.first.name, one.first.steps]) for one, price in usable]
    points.sort(key=lambda point: point.cost)
    return {
        model: Lines(tuple(group), _lines(group))
        for model, group in grouped(points, lambda point: point.candidate.model).items()
    }


def best_common(one: Lines, other: Lines, budget: float) -> tuple[Entry, Entry] | None:
    """Returns both models on the common line that is best for the two; None if they have none."""
    some, others = one.at(budget), other.at(budget)
    pairs = [(some[key], others[key]) for key in some if key in others]
    return min(pairs, key=lambda pair: pair[0].loss + pair[1].loss, default=None)


def nearest_common(one: Lines, other: Lines, budget: float) -> tuple[Entry, Entry] | None:
    """Returns both models at the nearest budget at which they have a common line."""
    costs = [point.cost for point in (*one.points, *other.points)]
    for near in sorted([budget, *costs], key=lambda cost: abs(math.log(cost / budget))):
        pair = best_common(one, other, near)
        if pair:
            return pair
    return None


def _lines(points: Sequence[Point]) -> dict[Key, list[Point]]:
    by_size = grouped(points, lambda point: ("size", point.candidate.first.size))
    by_ratio = grouped(points, lambda point: ("ratio", point.ratio))
    return {**by_size, **by_ratio}


def _ratio_groups(candidates: Sequence[Candidate]) -> dict[tuple[str, int], int]:
    """Returns {(name, steps): number of the group} of about the same tokens per parameter."""
    sizes = grouped(candidates, lambda one: one.first.size)
    typical: dict[str, float] = {}  # parameters by size
    for size, group in sizes.items():
        typical[size] = statistics.median(one.first.active_parameters for one in group)

    def ratio(candidate: Candidate) -> float:
        return candidate.first.tokens / typical[candidate.first.size]

    groups, number, lowest = {}, 0, 0.0
    for one in sorted(candidates, key=ratio):
        if ratio(one) > SAME_RATIO * lowest:
            number, lowest = number + 1, ratio(one)
        groups[one.first.name, one.first.steps] = number
    return groups


def _read(line: Sequence[Point], budget: float) -> Entry | None:
    for point in line:
        if budget / SAME_BUDGET <= point.cost <= budget * SAME_BUDGET:
            return Entry(point.candidate, point.candidate.losses, budget)
    for before, after in itertools.pairwise(line):
        if before.cost < budget < after.cost <= MAX_GAP * before.cost:
            return interpolate(before, after, budget)
    return None


def interpolate(before: Point, after: Point, budget: float) -> Entry | None:
    """Returns the model at a budget between two points: for each order of batches that both have,
    the loss is interpolated linearly in logarithms. None if they have none in common.
    """
    # The share of the way: a budget of 2 between costs of 1 and 4 is half of it.
    share = math.log(budget / before.cost) / math.log(after.cost / before.cost)

    def between(low: float, high: float) -> float:
        return low ** (1 - share) * high**share

    some, others = before.candidate.losses, after.candidate.losses
    losses = {order: between(some[order], others[order]) for order in some if order in others}
    if not losses:
        return None
    first, second = before.candidate.first, after.candidate.first
    # The noise of two sizes is independent, so it partly cancels: halfway, (a + b) / 2 has half the
    # variance of a. Two lengths of one size share the start of their training, hence most of their
    # noise, which is taken as equal.
    is_one_size = first.name == second.name
    noise = 1.0 if is_one_size else share**2 + (1 - share) ** 2
    return Entry(
        candidate=after.candidate if share > 0.5 else before.candidate,
        losses=losses,
        cost=budget,
        known="interpolated",
        noise=noise,
        parameters=between(first.parameters, second.parameters),
        tokens=between(first.tokens, second.tokens),
    )
