"""Models at equal training FLOPs: compute multipliers, and the budgets at which the order of two
models changes.

Losses between the budgets of runs are interpolated (`candidates.at_training_budget`). Nothing is
extrapolated, and no scaling law is used.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from smallgpt_jax.comparison import statistics
from smallgpt_jax.comparison.candidates import NEAR, Candidate, at_training_budget
from smallgpt_jax.comparison.contest import INTERVAL

POINTS = 48  # budgets of a curve


@dataclasses.dataclass(frozen=True)
class Curve:
    """The loss of a model by budget and seed. With a larger budget, a loss is at most as high as
    with a smaller one.
    """

    name: str
    budgets: np.ndarray  # (budgets,), ascending
    losses: dict[
        int, np.ndarray
    ]  # {seed: (budgets,)}; NaN where the seed was not trained near the budget
    sizes: int  # trained ones: losses of one size and seed are not independent

    def at(self, seed: int, budgets: np.ndarray) -> np.ndarray:
        """Returns the losses at other budgets, NaN far from the trained ones."""
        last = self.budgets[-1]
        budgets = np.where(budgets <= NEAR * last, np.minimum(budgets, last), budgets)
        return np.interp(
            np.log(budgets), np.log(self.budgets), self.losses[seed], left=math.nan, right=math.nan
        )

    def budget_of(self, seed: int, loss: float) -> float:
        """Returns the least budget at which the loss is reached; NaN if it is not near a trained
        one.
        """
        known = ~np.isnan(self.losses[seed])
        losses, logs = self.losses[seed][known][::-1], np.log(self.budgets[known][::-1])
        budget = np.exp(np.interp(loss, losses, logs, left=math.nan, right=math.nan))
        return (
            math.nan if np.isnan(self.at(seed, budget)) else float(budget)
        )  # between budgets that are far apart


def curve_of(candidates: Sequence[Candidate]) -> Curve | None:
    """Returns the curve of one model, or None if it was trained with one budget only."""
    costs = sorted({one.cost for one in candidates if one.cost is not None})
    if len(costs) < 2:
        return None
    budgets = np.union1d(np.geomspace(costs[0], costs[-1], POINTS), costs)
    pairs = [at_training_budget(candidates, float(budget)) for budget in budgets]
    losses = {
        seed: np.array([pair[0].losses.get(seed, math.nan) if pair else math.nan for pair in pairs])
        for seed in sorted({seed for one in candidates for seed in one.losses})
    }
    return Curve(
        candidates[0].model,
        budgets,
        {
            seed: np.where(np.isnan(values), values, np.fmin.accumulate(values))
            for seed, values in losses.items()
        },
        len({one.runs[0]["name"] for one in candidates}),
    )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over seeds, with its interval from the t-distribution; that of a single seed has no
    width.
    """

    mean: float
    low: float
    high: float


def estimate(values: np.ndarray) -> Estimate | None:
    """Returns the estimate from the values of several seeds, of which NaN do not count; None
    without a value.
    """
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    mean, half = (
        float(values.mean()),
        statistics.half_width(values, 1 - INTERVAL) if len(values) > 1 else 0.0,
    )
    return Estimate(mean, mean - half, mean + half)


def differences(curve: Curve, base: Curve, budgets: np.ndarray) -> np.ndarray:
    """Returns the loss of `curve` minus that of `base`, shape (common seeds, budgets); NaN where
    one is unknown.
    """
    seeds = sorted(curve.losses.keys() & base.losses.keys())
    found = [curve.at(seed, budgets) - base.at(seed, budgets) for seed in seeds]
    return np.array(found).reshape(len(seeds), len(budgets))


def common_budgets(curve: Curve, base: Curve) -> np.ndarray:
    """Returns budgets that both were trained near, ascending."""
    low = max(curve.budgets[0], base.budgets[0])
    high = min(curve.budgets[-1], base.budgets[-1])
    return np.geomspace(low, high, POINTS) if low < high else np.empty(0)


def compute_multiplier(curve: Curve, base: Curve, budget: float) -> Estimate | None:
    """Returns the FLOPs of `base` divided by those of `curve`, at the loss that `base` reaches with
    the budget.

    Above 1, `curve` needs less. None if a seed of both does not reach this loss within the trained
    budgets.
    """
    logs = []
    for seed in sorted(curve.losses.keys() & base.losses.keys()):
        loss = float(base.at(seed, np.array([budget]))[0])
        if not math.isnan(loss):
            logs.append(math.log(base.budget_of(seed, loss) / curve.budget_of(seed, loss)))
    if not logs or any(map(math.isnan, logs)):
        return None
    found = estimate(np.array(logs))
    return Estimate(math.exp(found.mean), math.exp(found.low), math.exp(found.high))


@dataclasses.dataclass(frozen=True)
class Segment:
    """A range of budgets in which one of two models is better, or in which it cannot be told
    (better is None).
    """

    low: float
    high: float
    better: str | None


def order(curve: Curve, base: Curve) -> list[Segment]:
    """Returns the better of two models over the budgets of both: the 95% interval of the difference
    excludes zero.

    The order changes where two segments name different models. Returns [] without common budgets or
    seeds.
    """
    budgets = (
        common_budgets(curve, base) if curve.losses.keys() & base.losses.keys() else np.empty(0)
    )
    better, segments = better_at(curve, base, budgets), []
    for name, group in itertools.groupby(zip(budgets.tolist(), better), key=lambda pair: pair[1]):
        reached = [budget for budget, _ in group]
        segments.append(Segment(segments[-1].high if segments else reached[0], reached[-1], name))
    return segments


def better_at(curve: Curve, base: Curve, budgets: np.ndarray) -> list[str | None]:
    """Returns the better model at each budget. A few seeds determine no spread; it is drawn towards
    that at others.
    """
    samples = [values[~np.isnan(values)] for values in differences(curve, base, budgets).T]
    known = [sample for sample in samples if len(sample) > 1]
    prior = statistics.variance_prior(
        [sample.var(ddof=1) for sample in known], [len(sample) - 1 for sample in known]
    )

    def better(sample: np.ndarray) -> str | None:
        if len(sample) < 2:
            return None
        variance, degrees = prior.shrink(sample.var(ddof=1), len(sample) - 1)
        independent = min(curve.sizes, base.sizes) * (len(sample) - 1)
        half = statistics.student_quantile(0.975, min(degrees, independent)) * math.sqrt(
            variance / len(sample)
        )
        return (
            None if abs(sample.mean()) <= half else curve.name if sample.mean() < 0 else base.name
        )

    return list(map(better, samples))
