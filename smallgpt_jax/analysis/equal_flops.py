"""Two models at equal training FLOPs: which is better at which budget, and how much compute one
saves.

Both are read on the lines that both have (`lines.py`), so what one was not trained with does not
count.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from smallgpt_jax.analysis import spreads
from smallgpt_jax.analysis.candidates import Entry, Evidence, longest
from smallgpt_jax.analysis.findings import INTERVAL, LEVEL, Multiplier, Order, Range, Segment
from smallgpt_jax.analysis.lines import (
    MAX_GAP,
    NEAR,
    SAME_BUDGET,
    Key,
    Lines,
    Point,
    best_common,
    interpolate,
    lines_of,
)
from smallgpt_jax.analysis.record import Run
from smallgpt_jax.analysis.spreads import Difference

MIN_SEEDS = 3  # of multipliers: how much losses of two seeds vary is a guess (`spreads.prior_of`)


def _flops(run: Run) -> float | None:
    return run.last and run.last.flops


def _lines(evidence: Evidence) -> dict[str, Lines]:
    return lines_of(evidence.candidates, _flops)


# ------------------------------------------------------------------ the better model
@dataclasses.dataclass(frozen=True)
class Node:
    """A budget at which two models are compared."""

    budget: float
    size: str  # of the nearest candidate
    difference: Difference


def find_orders(evidence: Evidence, reference: str) -> tuple[Order, ...]:
    """Returns one order per other model."""
    return tuple(
        _order(model, reference, compare_at_nodes(rival, base, evidence), evidence)
        for model, rival, base in _rivals(evidence, reference)
    )


def _rivals(evidence: Evidence, reference: str) -> list[tuple[str, Lines, Lines]]:
    """Returns (model, its lines, those of the reference), without models of the same function."""
    lines = _lines(evidence)
    base = lines.get(reference)
    if base is None:
        return []
    same = {reference, *evidence.equal_to(reference)}
    return [(model, rival, base) for model, rival in lines.items() if model not in same]


def compare_at_nodes(rival: Lines, base: Lines, evidence: Evidence) -> list[Node]:
    """Returns the differences at the budgets that either was trained with, where both have losses
    on a common line: at one size, or at one number of tokens per parameter.
    """
    if not evidence.prior.is_known:  # nothing tells how far a difference is luck
        return []
    nodes = []
    for budget in _distinct_budgets((*rival.points, *base.points)):
        entries = best_common(rival, base, budget)
        if entries:
            size = entries[0].candidate.first.size
            nodes.append(Node(budget, size, compare(*entries, evidence)))
    return nodes


def _distinct_budgets(points: Sequence[Point]) -> list[float]:
    budgets: list[float] = []
    for cost in sorted(point.cost for point in points):
        if not budgets or cost > SAME_BUDGET * budgets[-1]:
            budgets.append(cost)
    return budgets


def compare(one: Entry, other: Entry, evidence: Evidence) -> Difference:
    losses = spreads.matrix([one.losses, other.losses])
    prior = evidence.prior_at(other.candidate)
    return spreads.estimate(losses, prior, [one.noise, other.noise]).difference(0, 1)


def _order(model: str, reference: str, nodes: Sequence[Node], evidence: Evidence) -> Order:
    level = LEVEL / max(1, len(nodes))  # so the verdicts of all nodes hold together (Bonferroni)
    differences = [node.difference for node in nodes]
    if evidence.record.seeds_as_needed:
        halves = [difference.half_width_at_all_looks(level) for difference in differences]
        means = [difference.paired for difference in differences]
    else:
        halves = [difference.half_width(1 - level) for difference in differences]
        means = [difference.mean for difference in differences]
    verdicts = []
    for mean, half in zip(means, halves):
        better = model if mean < 0 else reference
        verdicts.append(better if abs(mean) > half else None)
    return Order(
        model=model,
        other=reference,
        segments=_segments(nodes, verdicts),
        budgets=tuple(node.budget for node in nodes),
        differences=tuple(means),
        low=tuple(mean - half for mean, half in zip(means, halves)),
        high=tuple(mean + half for mean, half in zip(means, halves)),
    )


def _segments(nodes: Sequence[Node], verdicts: Sequence[str | None]) -> tuple[Segment, ...]:
    """Returns the ranges of budgets over which one model is better, and those between them.

    A range needs nodes of two sizes, if several were trained: the lengths of one size are the same
    runs, which may all have been lucky.
    """
    if not nodes:
        return ()
    needed = min(2, len({node.size for node in nodes}))
    first, last = nodes[0].budget, nodes[-1].budget
    segments: list[Segment] = []
    told = first  # budget up to which there are segments
    for better, group in itertools.groupby(zip(nodes, verdicts), key=lambda row: row[1]):
        reached = [node for node, _ in group]
        is_range = len(reached) > 1 or len(nodes) == 1
        if better is None or not is_range or len({node.size for node in reached}) < needed:
            continue
        low, high = reached[0].budget, reached[-1].budget
        if told < low:
            segments.append(Segment(told, low, None))
        segments.append(Segment(low, high, better))
        told = high
    if told < last or not segments:
        segments.append(Segment(told, last, None))
    return tuple(segments)


# ------------------------------------------------------------------ compute multipliers
def find_multipliers(
    evidence: Evidence, reference: str, budgets: Sequence[float]
) -> tuple[Multiplier, ...]:
    """Returns one multiplier per other model and budget; one that cannot be told says why."""
    return tuple(
        multiplier(rival, base, budget, evidence)
        for _, rival, base in _rivals(evidence, reference)
        for budget in budgets
    )


def multiplier(rival: Lines, base: Lines, budget: float, evidence: Evidence) -> Multiplier:
    """Returns FLOPs of `base` / FLOPs of `rival` at the loss that `base` reaches with the budget:
    above 1, `rival` is the cheaper one.
    """
    model, reference = (one.points[0].candidate.model for one in (rival, base))

    def refuse(reason: str) -> Multiplier:
        return Multiplier(model, reference, budget, None, None, reason)

    for one in (rival, base):
        most_budgets = max(map(len, one.lines.values()))
        if most_budgets < 2:
            return refuse("one budget")
    if not evidence.prior.is_known or evidence.most_seeds < MIN_SEEDS:
        return refuse("few seeds")
    key = _common_key(rival, base, budget)
    if key is None:
        return refuse("gap")
    base_entry = base.at(budget)[key]
    crossing = _crossing(rival.lines[key], base_entry.loss)
    if isinstance(crossing, str):
        return refuse(crossing)
    entry, exponent = crossing
    # On a common line, `rival` reaches this loss with another budget. There the losses differ by
    # zero ± e, the error of a paired difference. Along the line of `rival`, the loss falls by its
    # slope per logarithm of the budget, so the logarithm of the multiplier has the error e / slope:
    # with e = 0.02 and a slope of 0.4, ±5%.
    difference = compare(entry, base_entry, evidence)
    slope = exponent * entry.loss  # nats per logarithm of the budget
    center = math.log(budget / entry.cost) - difference.mean / slope
    half = difference.half_width(INTERVAL) / slope
    interval = Range(math.exp(center - half), math.exp(center + half))
    return Multiplier(model, reference, budget, math.exp(center), interval, None)


def _common_key(rival: Lines, base: Lines, budget: float) -> Key | None:
    """Returns the line that is best for both models at the budget, or else for `base`."""
    losses, base_losses = rival.losses_at(budget), base.losses_at(budget)
    # The loss of `base` alone would prefer the line on which it had luck.
    common = {key: loss + losses[key] for key, loss in base_losses.items() if key in losses}
    possible = common or {key: loss for key, loss in base_losses.items() if key in rival.lines}
    return min(possible, key=possible.get, default=None)


def _crossing(line: Sequence[Point], loss: float) -> tuple[Entry, float] | str:
    """Returns where a line first reaches a loss and its exponent there, or why it does not."""
    # The first and the last two points are extended to NEAR times their budgets. Otherwise, at the
    # end of a line only the models would have a multiplier whose losses are low by luck.
    for before, after in itertools.pairwise(line):
        high, low = before.candidate.loss, after.candidate.loss
        if high <= low or after.cost <= SAME_BUDGET * before.cost:
            continue
        exponent = math.log(high / low) / math.log(after.cost / before.cost)
        budget = before.cost * (high / loss) ** (1 / exponent)
        least = before.cost / (NEAR if before is line[0] else 1)
        most = after.cost * (NEAR if after is line[-1] else 1)
        if least <= budget <= most:
            entry = interpolate(before, after, budget)
            is_gap = entry is None or after.cost > MAX_GAP * before.cost
            return "gap" if is_gap else (entry, exponent)
    return "from the start" if line[0].candidate.loss < loss else "not reached"


# ------------------------------------------------------------------ what was not tried
def find_untried(evidence: Evidence) -> dict[str, float]:
    """Returns {name: tokens per parameter} where the longest training is its model's best, so that
    still more tokens may be better at these FLOPs.
    """
    lines = _lines(evidence)
    untried = {}
    for one in longest(evidence.candidates):  # of each model and size
        of_model = lines.get(one.model)
        if of_model is None or not math.isfinite(one.loss) or one.flops is None:
            continue
        # at these FLOPs, of all sizes of the model, this one included
        losses = of_model.losses_at(one.flops).values()
        if one.loss <= min(losses, default=one.loss):
            run = one.first
            untried[run.name] = run.tokens / run.active_parameters
    return untried
