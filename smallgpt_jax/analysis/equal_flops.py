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
from smallgpt_jax.analysis.budgets import BUDGETS
from smallgpt_jax.analysis.candidates import Evidence, longest
from smallgpt_jax.analysis.findings import (
    INTERVAL,
    LEVEL,
    Multiplier,
    Order,
    Range,
    Segment,
    Untried,
)
from smallgpt_jax.analysis.lines import (
    MAX_GAP,
    SAME,
    Key,
    Lines,
    Point,
    Reading,
    best_common,
    lines_of,
)
from smallgpt_jax.analysis.record import Run
from smallgpt_jax.analysis.spreads import Difference

PER_SIZE = 2  # independent comparisons that the lengths of one size are worth


def _flops(run: Run) -> float | None:
    return BUDGETS["flops"].cost(run, 1)


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
    lines = _lines(evidence)
    base = lines.get(reference)
    if base is None:
        return ()
    return tuple(
        _order(model, reference, compare_at_nodes(own, base, evidence))
        for model, own in lines.items()
        if model != reference and model not in evidence.equal_to(reference)
    )


def compare_at_nodes(own: Lines, base: Lines, evidence: Evidence) -> list[Node]:
    """Returns the differences at the budgets with which either was trained, as far as both have a
    common line there.
    """
    budgets: list[float] = []
    for point in sorted((*own.points, *base.points), key=lambda point: point.cost):
        if not budgets or point.cost > SAME * budgets[-1]:
            budgets.append(point.cost)
    nodes = []
    for budget in budgets:
        readings = best_common(own, base, budget)
        if readings and evidence.prior.pooled > 0:
            size = readings[0].nearest.first.size
            nodes.append(Node(budget, size, compare(*readings, evidence)))
    return nodes


def compare(one: Reading, other: Reading, evidence: Evidence) -> Difference:
    losses = spreads.matrix([one.losses, other.losses])
    return spreads.estimate(losses, evidence.prior_at(other.nearest)).difference(0, 1)


def _order(model: str, reference: str, nodes: Sequence[Node]) -> Order:
    """A model is better over a range of budgets if it is at each node of it.

    The verdicts hold over all nodes together, with the probability 1 - LEVEL: at each, the error is
    LEVEL / n for n independent ones (Bonferroni). The lengths of a size share most of their noise
    and count as PER_SIZE.
    """
    sizes = {node.size for node in nodes}
    level = LEVEL / max(1, min(len(nodes), PER_SIZE * len(sizes)))
    names = []
    for node in nodes:
        better = model if node.difference.mean < 0 else reference
        names.append(better if node.difference.p_value < level else None)
    halves = [node.difference.half_width(1 - level) for node in nodes]
    means = [node.difference.mean for node in nodes]
    return Order(
        model=model,
        other=reference,
        segments=_segments([node.budget for node in nodes], names),
        budgets=tuple(node.budget for node in nodes),
        differences=tuple(means),
        low=tuple(mean - half for mean, half in zip(means, halves)),
        high=tuple(mean + half for mean, half in zip(means, halves)),
    )


def _segments(budgets: Sequence[float], names: Sequence[str | None]) -> tuple[Segment, ...]:
    """Returns the ranges of budgets with one verdict at two nodes or more. Between them, it cannot
    be told.
    """
    segments: list[Segment] = []
    for name, group in itertools.groupby(zip(budgets, names), key=lambda row: row[1]):
        reached = [budget for budget, _ in group]
        if name and (len(reached) > 1 or len(budgets) == 1):
            end = segments[-1].high if segments else budgets[0]
            if end < reached[0]:
                segments.append(Segment(end, reached[0], None))
            segments.append(Segment(reached[0], reached[-1], name))
    end = segments[-1].high if segments else budgets[0] if budgets else math.inf
    if budgets and (end < budgets[-1] or not segments):
        segments.append(Segment(end, budgets[-1], None))
    return tuple(segments)


# ------------------------------------------------------------------ compute multipliers
def find_multipliers(
    evidence: Evidence, reference: str, budgets: Sequence[float]
) -> tuple[Multiplier, ...]:
    lines = _lines(evidence)
    base = lines.get(reference)
    if base is None:
        return ()
    return tuple(
        multiplier(own, base, budget, evidence)
        for model, own in lines.items()
        if model != reference and model not in evidence.equal_to(reference)
        for budget in budgets
    )


def multiplier(own: Lines, base: Lines, budget: float, evidence: Evidence) -> Multiplier:
    """Returns FLOPs of `base` / FLOPs of `own` at the loss that `base` reaches with the budget.

    On the line where `base` is best, `own` reaches this loss with another budget. There the losses
    differ by zero ± e, the error of a paired difference. Along the line of `own`, the loss falls by
    its slope per logarithm of the budget, so the logarithm of the multiplier has the error e / slope:
    with e = 0.02 and a slope of 0.4, ±5%.
    """
    model, reference = (one.points[0].candidate.model for one in (own, base))

    def refuse(reason: str) -> Multiplier:
        return Multiplier(model, reference, budget, None, None, reason)

    if min(map(_most_budgets, (own, base))) < 2:
        return refuse("one budget")
    if evidence.prior.pooled == 0:
        return refuse("few seeds")
    readings = {key: one for key, one in base.at(budget).items() if key in own.lines}
    if not readings:
        return refuse("gap")
    key = min(readings, key=lambda key: readings[key].loss)
    crossing = _crossing(own.lines[key], readings[key].loss)
    if isinstance(crossing, str):
        return refuse(crossing)
    equal_budget, exponent = crossing
    reading = _reading(own, key, equal_budget)
    if reading is None:
        return refuse("gap")
    difference = compare(reading, readings[key], evidence)
    slope = exponent * reading.loss  # nats per logarithm of the budget
    center = math.log(budget / equal_budget) - difference.mean / slope
    half = difference.half_width(INTERVAL) / slope
    return Multiplier(
        model,
        reference,
        budget,
        math.exp(center),
        Range(math.exp(center - half), math.exp(center + half)),
        None,
    )


def _most_budgets(lines: Lines) -> int:
    return max(len(line) for line in lines.lines.values())


def _reading(lines: Lines, key: Key, budget: float) -> Reading | None:
    return lines.at(budget).get(key)


def _crossing(line: Sequence[Point], loss: float) -> tuple[float, float] | str:
    """Returns the least budget with which a line reaches a loss, and the exponent with which the
    loss falls there; or why there is none.
    """
    for before, after in itertools.pairwise(line):
        high, low = before.candidate.loss, after.candidate.loss
        if not high >= loss >= low or high == low:
            continue
        if after.cost > MAX_GAP * before.cost:
            return "gap"
        exponent = math.log(high / low) / math.log(after.cost / before.cost)
        return before.cost * (high / loss) ** (1 / exponent), exponent
    return "not reached"


# ------------------------------------------------------------------ what was not tried
def find_untried(evidence: Evidence) -> tuple[Untried, ...]:
    """Returns the names whose longest training is the best of their model at its budget, so that
    more tokens might be better than a larger size.
    """
    lines = _lines(evidence)
    untried = []
    for one in longest(evidence.candidates):
        own = lines.get(one.model)
        if own is None or not math.isfinite(one.loss) or one.flops is None:
            continue
        others = [reading.loss for reading in own.at(one.flops).values()]
        if one.loss <= min(others, default=one.loss):
            run = one.first
            untried.append(Untried(run.name, run.tokens, run.tokens / run.active_parameters))
    return tuple(untried)
